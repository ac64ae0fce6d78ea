"""Fast validation: the folder, the first and last frame of episodes, the index, the statistics, the pack."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from dm05_schemas.episode_lines import HUGE_LINE, foreign_encoding, parse_line, too_few_frames
from dm05_schemas.errors import DataError
from dm05_schemas.findings import Finding, finding
from dm05_schemas.frame import UrlProblem, clean_url
from dm05_schemas.index import FOREIGN, FileState, Index, check_fresh, index_path, read_index
from dm05_schemas.pack import PACK_DIR, check_files, check_matches, read_pack
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.stats import JSON_FIELDS, KEYS, NormStats, narrow_dims, read_stats, stats_stem
from dm05_schemas.workspace import Workspace

from dm05_prep.validate.image_checks import explain_missing

PEEK_BYTES = 1 << 14
PEEK_EPISODES = 2000


def check_folders(workspace: Workspace, spec: DatasetSpec, files: Mapping[str, FileState]) -> list[Finding]:
    """Missing folders, files that do not belong, symlinks to nothing, empty episodes."""
    jsonl, images = spec.jsonl(workspace), spec.images(workspace)
    found = []
    for name, state in files.items():
        if state.size < 0:
            found.append(finding("broken-link", jsonl / name, None, "is a symlink to nothing or cannot be read"))
        elif state.size == 0:
            found.append(finding("empty-episode", jsonl / name, None, "has no frames"))
    if not files:
        found.append(finding("no-episodes", jsonl, None, "has no .jsonl files"))
    if not images.is_dir() and not (spec.root(workspace) / PACK_DIR).exists():
        found.append(finding("no-images", images, None, "there is no such folder, and no pack"))
    for entry in sorted(os.scandir(jsonl), key=lambda entry: entry.name):
        if not entry.name.startswith(".") and not entry.name.endswith(".jsonl") and not os.path.isdir(entry.path):
            found.append(finding("stray-file", entry.path, None, "is not an episode (.jsonl)"))
    return found


def check_ends(
    workspace: Workspace, spec: DatasetSpec, files: Mapping[str, FileState], index: Index | None
) -> list[Finding]:
    """The first and the last line of every episode (of 2,000, evenly chosen, when there are more)."""
    names = [name for name in files if files[name].size > 0]
    step = max(1, -(-len(names) // PEEK_EPISODES))
    root = spec.images(workspace)
    images = root if root.is_dir() else None
    found: list[Finding] = []
    for name in names[::step]:
        path = spec.jsonl(workspace) / name
        frames = index.entries[name].frames if index is not None and name in index.entries else None
        try:
            found += _check_ends(path, spec, images, frames)
        except OSError as error:
            found.append(finding("unreadable", path, None, f"cannot be read: {error.strerror or error}"))
    return found


def check_index(
    workspace: Workspace, spec: DatasetSpec, files: Mapping[str, FileState]
) -> tuple[Index | None, list[Finding]]:
    """The index (None when it cannot be used or is stale), and what is wrong with it or its copy."""
    path = index_path(workspace, spec)
    if not path.is_file():
        return None, [finding("index-missing", path, None, "there is no index")]
    try:
        index = read_index(path, workspace, spec)
    except DataError as error:
        return None, [finding("index-broken", path, None, error.what)]
    reasons = check_fresh(index, files)
    if reasons:
        return None, [finding("index-stale", path, None, f"the index is stale: {'; '.join(reasons)}")]
    foreign = [finding("index-foreign", path, None, FOREIGN)] if index.fingerprint is None else []
    return index, foreign + _check_copy(workspace, spec, index)


def check_stats(workspace: Workspace, spec: DatasetSpec, source: str | None) -> list[Finding]:
    """Every pair of statistics of the dataset: readable, of this data, of these dims, the two files alike.

    ``source`` is the fingerprint of the episodes as they are now, None when it is not known.
    """
    folder = workspace.norm_stats_dir
    pattern = re.compile(re.escape(spec.name) + r"_[0-9a-f]{16}\.(parquet|json)")
    stems: dict[str, set[str]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if pattern.fullmatch(path.name):
            stems.setdefault(path.stem, set()).add(path.suffix)
    if not stems:
        return [finding("stats-missing", folder, None, f"no statistics of {spec.name} yet")]
    return [item for stem, suffixes in stems.items() for item in _check_pair(folder / stem, suffixes, spec, source)]


def check_pack(workspace: Workspace, spec: DatasetSpec, index: Index | None) -> list[Finding]:
    """The pack, if there is one: whole, of this dataset and of these episodes."""
    folder = spec.root(workspace) / PACK_DIR
    if not folder.exists():
        return []
    try:
        info = read_pack(workspace, spec)
        check_files(folder, info)
        check_matches(folder, info, spec, None if index is None else index.fingerprint)
    except DataError as error:
        return [finding("pack-broken", error.where or folder, None, error.what)]
    return []


def _check_ends(path: Path, spec: DatasetSpec, images: Path | None, frames: int | None) -> Iterator[Finding]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = _first_line(file.fileno(), size)
        tail = _last_line(file.fileno(), size)
    encoding = foreign_encoding(head)
    if encoding:
        yield finding("utf16", path, None, f"is {encoding}, not UTF-8")
        return
    ends: list[tuple[int | None, bytes]] = [(1, head)]
    if tail is not None:
        ends.append((frames, tail))
    for number, line in ends:
        if len(line) > HUGE_LINE:  # deep validation reads it
            yield finding("huge-line", path, number, f"line of more than {HUGE_LINE >> 20} MiB")
            continue
        frame, problems = parse_line(line.removesuffix(b"\r"), spec)
        if tail is None and isinstance(frame, dict):
            yield from too_few_frames(path, 1)
        yield from (finding(kind, path, number, detail) for kind, detail in problems)
        if images is not None and isinstance(frame, dict):
            yield from _check_urls(path, number, frame, spec, images)


def _check_urls(
    path: Path, number: int | None, frame: dict[str, object], spec: DatasetSpec, images: Path
) -> Iterator[Finding]:
    for key in spec.image_keys:
        entry = frame.get(key)
        url = entry.get("url") if isinstance(entry, dict) else None
        if not isinstance(url, str):
            continue
        try:
            clean = clean_url(url)
        except UrlProblem:
            continue  # reported with the frame
        if not os.path.isfile(images / clean):
            kind, detail = explain_missing(images, clean)
            yield finding(kind, path, number, f"{key}: {detail}")


def _first_line(handle: int, size: int) -> bytes:
    """The first line; of a huge one, more than HUGE_LINE bytes from its start."""
    data = os.pread(handle, PEEK_BYTES, 0)
    if b"\n" not in data and size > PEEK_BYTES:
        data = os.pread(handle, HUGE_LINE + 1, 0)
    return data.split(b"\n", 1)[0]


def _last_line(handle: int, size: int) -> bytes | None:
    """The last line, empty when it is blank; None when it is the first too. A huge one is cut at its start."""
    for span in (PEEK_BYTES, HUGE_LINE + 2):
        start = max(0, size - span)
        data = os.pread(handle, span, start).removesuffix(b"\n")
        if b"\n" in data:
            return data.rsplit(b"\n", 1)[1]
        if start == 0:
            return None
    return data


def _check_copy(workspace: Workspace, spec: DatasetSpec, index: Index) -> list[Finding]:
    path = workspace.index_cache
    if not path.is_file():
        return [finding("index-missing", path, None, "there is no copy of the index at the top of the workspace")]
    try:
        copy = read_index(path, workspace, spec)
    except DataError as error:
        return [finding("index-broken", path, None, error.what)]
    if not copy.entries:
        return []  # it is of the dataset that was indexed last
    if copy.entries != index.entries or copy.outside:
        return [finding("index-copies", path, None, f"differs from {index.path}")]
    return []


def _check_pair(stem: Path, suffixes: set[str], spec: DatasetSpec, source: str | None) -> Iterator[Finding]:
    parquet, json = Path(f"{stem}.parquet"), Path(f"{stem}.json")
    read: dict[str, NormStats] = {}
    for path in (parquet, json):
        if path.suffix not in suffixes:
            continue
        try:
            read[path.suffix] = read_stats(path, spec.robot_type)
        except (DataError, OSError) as error:
            yield finding("stats-broken", path, None, error.what if isinstance(error, DataError) else str(error))
            continue
        yield from _check_dims(path, read[path.suffix], spec)
    ours, plain = read.get(".parquet"), read.get(".json")
    if ours is None:
        return
    if stats_stem(ours.dataset, ours.chunk_size, ours.action_mode) != stem.name:
        held = f"{ours.dataset}, chunk size {ours.chunk_size}, {ours.action_mode}"
        yield finding("stats-broken", parquet, None, f"holds statistics of {held}, which belong under another name")
    if source not in (None, ours.source_fingerprint):
        yield finding("stats-stale", parquet, None, "was computed from other episodes than those here now")
    if ".json" not in suffixes:
        yield finding("stats-broken", json, None, "is missing beside the parquet")
    elif plain is not None and not _alike(ours, plain):
        yield finding("stats-broken", json, None, "differs from the parquet beside it")
    for narrow in narrow_dims(ours):
        yield finding("stats-narrow", parquet, None, narrow.text)


def _check_dims(path: Path, stats: NormStats, spec: DatasetSpec) -> Iterator[Finding]:
    for key, vector, due in (("state", stats.state, spec.state_dim), ("action", stats.action, spec.action_dim)):
        if len(vector.mean) != due:
            detail = f"{key} has {len(vector.mean)} dims, those of {spec.name} have {due}"
            yield finding("stats-dims", path, None, detail)


def _alike(one: NormStats, other: NormStats) -> bool:
    return all(
        np.array_equal(getattr(getattr(one, key), name), getattr(getattr(other, key), name))
        for key in KEYS
        for name in JSON_FIELDS
    )
