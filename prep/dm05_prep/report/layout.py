"""What lies around the frames of a dataset: its folders, index, statistics and pack, each with a word on its state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dm05_schemas.findings import Finding
from dm05_schemas.index import Index, index_path, list_episodes
from dm05_schemas.pack import PACK_DIR
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.stats import NormStats, stats_stem
from dm05_schemas.workspace import Workspace

from dm05_prep.console import human_bytes
from dm05_prep.report.facts import Facts
from dm05_prep.validate.layout import check_folders, check_index, check_pack, check_stats

Mood = Literal["good", "warning", "error", "plain"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the layout: a path, what it is, and how it does."""

    path: str
    text: str
    mood: Mood


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The lines, and everything that validation finds wrong with what they name."""

    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...]


def look(workspace: Workspace, spec: DatasetSpec, facts: Facts, stats: NormStats | None) -> Layout:
    """The layout of a dataset, from the frames to what was derived from them."""
    files = list_episodes(spec.jsonl(workspace))
    folders = check_folders(workspace, spec, files)
    index, about_index = check_index(workspace, spec, files)
    about_stats = check_stats(workspace, spec, index.fingerprint if index is not None else None)
    about_pack = check_pack(workspace, spec, index)
    pictures = f"{facts.frames * len(spec.image_keys):,} pictures named: {', '.join(spec.image_prompts)}"
    episodes = f"{len(facts.episodes):,} episodes, {human_bytes(facts.jsonl_bytes)}"
    if facts.refused:
        episodes += f"; {facts.refused:,} more that the loader refuses"
    image_dir = "./" if spec.image_dir == "." else f"{spec.image_dir}/"
    packed = (spec.root(workspace) / PACK_DIR).is_dir()
    no_images = [item for item in folders if item.kind == "no-images"]
    entries = (
        Entry(path=f"{spec.jsonl_dir}/", text=episodes, mood="error" if facts.refused else "good"),
        _entry(image_dir, pictures, no_images, "plain"),
        _entry(index_path(workspace, spec).name, _of_index(index), about_index, "good"),
        _entry("norm_stats/", _of_stats(stats), about_stats, "good" if stats else "plain"),
        _entry(f"{PACK_DIR}/", "whole and current" if packed else "none", about_pack, "good" if packed else "plain"),
    )
    return Layout(entries=entries, findings=(*folders, *about_index, *about_stats, *about_pack))


def _entry(path: str, text: str, findings: Iterable[Finding], otherwise: Mood) -> Entry:
    """What the first and worst finding says, else ``text``."""
    worst = min(findings, key=lambda item: item.severity != "error", default=None)
    if worst is None:
        return Entry(path=path, text=text, mood=otherwise)
    return Entry(path=path, text=worst.detail, mood=worst.severity)


def _of_index(index: Index | None) -> str:
    return f"current: {index.frames:,} frames" if index is not None else ""


def _of_stats(stats: NormStats | None) -> str:
    if stats is None:
        return "none for the dataset's own action mode"
    stem = stats_stem(stats.dataset, stats.chunk_size, stats.action_mode)
    return f"{stem}: {stats.action_mode}, chunk size {stats.chunk_size}, {stats.state.count:,} samples"
