"""``dm05-prep validate``: is a dataset what the contract says? Fast for every start, deep before a GPU is rented.

Fast looks at folders, index, statistics, pack and the ends of every episode; deep reads every frame with the very
function that training reads with (:func:`dm05_schemas.episode.scan_episode`), and the header and the end of every
image they name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.findings import Finding, finding
from dm05_schemas.index import FileState, Index, list_episodes
from dm05_schemas.pack import PACK_DIR, read_info
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.report import Report
from dm05_schemas.workspace import Workspace

from dm05_prep.console import progress as progress_bar
from dm05_prep.parallel import chosen_jobs
from dm05_prep.validate.deep import Outcome, check_episodes, odd_sizes
from dm05_prep.validate.layout import check_ends, check_folders, check_index, check_pack, check_stats
from dm05_prep.validate.output import github, human, write_json
from dm05_prep.validate.pack_checks import check_blobs


def validate(
    workspace: Workspace,
    spec: DatasetSpec,
    *,
    deep: bool = False,
    sample: int | None = None,
    decode: bool = False,
    jobs: int | None = None,
    progress: bool = False,
) -> Report:
    """Everything that is wrong with a dataset; nothing is changed and nothing is raised for it.

    Args:
        workspace: where it lies.
        spec: the dataset.
        deep: read every frame and every image.
        sample: with ``deep``, look at the images of this many frames only.
        decode: with ``deep``, decode every pixel too.
        jobs: processes, all cores when None.
        progress: show a bar.
    """
    begin = time.monotonic()
    seen = _Seen()
    try:
        _look(workspace, spec, seen, _Depth(deep=deep, sample=sample, decode=decode, jobs=jobs, progress=progress))
    except OSError as error:  # a folder that may not be entered: what comes after it stays unknown
        place = error.filename or spec.root(workspace)
        seen.findings.append(finding("unreadable", place, None, f"cannot be read: {error.strerror or error}"))
    return Report(
        dataset=spec.name,
        workspace=str(workspace.root),
        deep=deep,
        episodes=seen.episodes,
        frames=seen.frames,
        images=seen.images,
        seconds=time.monotonic() - begin,
        findings=tuple(dict.fromkeys(seen.findings)),
    )


@dataclass(kw_only=True)
class _Seen:
    """What was looked at so far (None: not known how much), and what was wrong with it."""

    episodes: int | None = None
    frames: int | None = None
    images: int = 0
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Depth:
    """How closely to look; the arguments of :func:`validate`."""

    deep: bool
    sample: int | None
    decode: bool
    jobs: int | None
    progress: bool


def _look(workspace: Workspace, spec: DatasetSpec, seen: _Seen, depth: _Depth) -> None:
    """Everything, in the order in which one thing rests on another."""
    root, jsonl = spec.root(workspace), spec.jsonl(workspace)
    pack = root / PACK_DIR
    index = None
    if pack.is_dir() and not jsonl.exists():  # all that training needs of the episodes is in the pack
        about_pack = check_pack(workspace, spec, None)
        if not about_pack:
            info = read_info(pack)
            seen.episodes, seen.frames, source = len(info.episodes), info.frames, info.source
        else:
            source = None
    else:
        files, unusable = _list(root, jsonl)
        if unusable is not None:
            seen.findings.append(unusable)
            return
        seen.episodes = len(files)
        index = _look_at_episodes(workspace, spec, files, seen, depth)
        source = index.fingerprint if index is not None else None
        about_pack = check_pack(workspace, spec, index)
    seen.findings += [*check_stats(workspace, spec, source), *about_pack]
    if depth.deep and not about_pack:
        packed = 0
        for count, findings in check_blobs(pack, depth.sample, depth.decode, depth.jobs):
            packed += count
            seen.findings += findings
        seen.images = max(seen.images, packed)  # beside image files, the same pictures once more


def _look_at_episodes(
    workspace: Workspace, spec: DatasetSpec, files: dict[str, FileState], seen: _Seen, depth: _Depth
) -> Index | None:
    """The folders, the index (returned when it is usable) and the episodes themselves."""
    seen.findings += check_folders(workspace, spec, files)
    index, about_index = check_index(workspace, spec, files)
    seen.findings += about_index
    seen.frames = index.frames if index is not None else None if files else 0
    if depth.deep:
        outcomes = _deep(workspace, spec, files, index, depth)
        seen.findings += [item for outcome in outcomes for item in outcome.findings] + odd_sizes(outcomes)
        seen.frames, seen.images = (
            sum(getattr(outcome, name) for outcome in outcomes) for name in ("frames", "images")
        )
    else:
        seen.findings += check_ends(workspace, spec, files, index)
    return index


def _list(root: Path, jsonl: Path) -> tuple[dict[str, FileState], Finding | None]:
    """The episode files, or why they cannot be listed."""
    for folder in (root, jsonl):
        if not folder.is_dir():
            return {}, finding("no-dataset", folder, None, "there is no such folder")
    try:
        return list_episodes(jsonl), None
    except DataError as error:
        return {}, finding("bad-name", error.where or jsonl, None, error.what)


def _deep(
    workspace: Workspace,
    spec: DatasetSpec,
    files: dict[str, FileState],
    index: Index | None,
    depth: _Depth,
) -> list[Outcome]:
    images = spec.images(workspace)
    files = {name: state for name, state in files.items() if state.size > 0}
    outcomes = []
    results: Iterable[tuple[int, Outcome]] = check_episodes(
        spec,
        spec.jsonl(workspace),
        files,
        index,
        images=images if images.is_dir() else None,
        sample=depth.sample,
        decode=depth.decode,
        jobs=depth.jobs,
    )
    total = sum(state.size for state in files.values())
    with progress_bar(total, "B", "validate", quiet=not depth.progress) as bar:
        for size, outcome in results:
            outcomes.append(outcome)
            bar.update(size)
    return outcomes


@dataclass(frozen=True, kw_only=True)
class ValidateCommand:
    """Check a dataset against the contract; exit 1 when something is wrong.

    Fast, the default, takes seconds: folders, index, statistics, pack, first and last frame of every episode. --deep
    reads every frame, and every image file's header and end. Damage among the pixels of an image shows only when they
    are decoded: --deep --decode.

    Examples:
      dm05-prep validate
      dm05-prep validate --deep --json report.json
      dm05-prep validate --deep --decode             decode every image too
      dm05-prep validate --deep --sample 1000        every frame, but the images of 1,000 only
      dm05-prep validate --fix                       mend what can be mended without loss, then check
      dm05-prep validate --deep --format github      annotations for a GitHub workflow
    """

    dataset_name: str = "libero_pi0_all"
    """Name of the dataset (dm05-prep datasets lists them)."""
    deep: bool = False
    """Read every frame and the header and end of every image."""
    sample: int | None = None
    """With --deep: look at the images of this many frames, chosen evenly at random."""
    decode: bool = False
    """With --deep: decode every pixel of the images too, which alone finds damage between header and end."""
    fix: bool = False
    """First mend blank lines, line ends, byte order marks, UTF-16 and a stale index, through new files."""
    all: bool = False
    """Show every finding, not the first places of each kind."""
    json: Path | None = None
    """Also write the report to this file ("-": to stdout, in place of the table)."""
    format: Literal["table", "github"] = "table"
    """A table for people, or annotations for GitHub."""
    jobs: int | None = None
    """Processes (default: all cores)."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """No progress bar, no table; the exit code and --json tell."""

    def run(self) -> int:
        """Do it; 1 when there are errors."""
        if (self.sample is not None or self.decode) and not self.deep:
            raise UsageError("--sample and --decode need --deep")
        if self.sample is not None and self.sample < 1:
            raise UsageError(f"--sample must be 1 or more, not {self.sample}")
        if self.json is not None and (self.json.is_dir() or self.json.parent.is_file()):
            raise UsageError("--json names a folder, or lies in a file", where=self.json, fix="Name a file")
        workspace = Workspace.resolve(self.workspace)
        spec = lookup(self.dataset_name, workspace)
        to_stdout = self.json == Path("-")
        if self.fix:
            self._fix(workspace, spec, silent=self.quiet or to_stdout)
        report = validate(
            workspace,
            spec,
            deep=self.deep,
            sample=self.sample,
            decode=self.decode,
            jobs=chosen_jobs(self.jobs),
            progress=not self.quiet,
        )
        if self.json is not None and not to_stdout:
            self.json.parent.mkdir(parents=True, exist_ok=True)
        if self.json is not None:
            write_json(report, None if to_stdout else self.json)
        if not self.quiet and not to_stdout:
            print(github(report, self.all) if self.format == "github" else human(report, self.all))
        return 1 if report.errors else 0

    def _fix(self, workspace: Workspace, spec: DatasetSpec, silent: bool) -> None:
        from dm05_prep.fix import fix_dataset

        for line in fix_dataset(workspace, spec, jobs=chosen_jobs(self.jobs), progress=not self.quiet):
            if not silent:
                print(f"fixed    {line}")
