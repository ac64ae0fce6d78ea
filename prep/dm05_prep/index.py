"""``dm05-prep index``: write, check or rebuild index_cache.json (its layout: :mod:`dm05_schemas.index`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from dm05_schemas.commands import aiming
from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.files import replace_file
from dm05_schemas.index import (
    FORMAT,
    EpisodeEntry,
    FileState,
    fingerprint_of,
    index_path,
    read_index,
    require_episodes,
    require_fresh,
)
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.version import tool_version
from dm05_schemas.workspace import Workspace

from dm05_prep.console import progress as progress_bar
from dm05_prep.console import say
from dm05_prep.index_scan import Counted, count_files
from dm05_prep.parallel import batches, chosen_jobs, default_jobs, ordered_map

# Starting processes takes longer than counting less than this much.
_PARALLEL_BYTES = 1 << 29
_BATCH_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class IndexResult:
    """The index of a dataset; ``computed`` is False when the one on disk was already right."""

    path: Path
    episodes: int
    frames: int
    fingerprint: str
    computed: bool


def build_index(
    workspace: Workspace,
    spec: DatasetSpec,
    *,
    force: bool = False,
    jobs: int | None = None,
    progress: bool = False,
    known: Mapping[Path, Counted] | None = None,
) -> IndexResult:
    """Write the dataset's index and the copy at the top of the workspace, unless both are right already.

    Args:
        workspace: where the dataset lies.
        spec: the dataset.
        force: count every file again, also those whose size and time did not change.
        jobs: processes, all cores when None.
        progress: show a bar.
        known: what :func:`~dm05_prep.index_scan.count_bytes` said of files while they were extracted; taken where
            the size on disk agrees.

    Raises:
        DataError: no folder, no episodes, or a file that is no episode (a blank line, no frames), with file and line.
    """
    folder = spec.jsonl(workspace)
    present = require_episodes(workspace, spec)
    for name, state in present.items():
        if state.size < 0:
            what = "is no file that can be read (a symlink to nothing?)"
            raise DataError(what, where=folder / name, fix="Remove or restore it")
    entries = {} if force else _still_right(workspace, spec, present)
    reused = len(entries) == len(present)
    for path, counted in (known or {}).items():
        name = path.relative_to(folder).as_posix()
        if name in present and present[name].size == counted.size:
            entries[name] = EpisodeEntry(counted.frames, counted.size, present[name].mtime_ns, counted.crc32c)
    with aiming(workspace, spec.name):
        entries |= _count(folder, {name: present[name] for name in present if name not in entries}, jobs, progress)
    data = _document(spec, entries)
    written = False
    for path in (index_path(workspace, spec), workspace.index_cache):
        if not _holds(path, data):
            replace_file(path, data)
            written = True
    return IndexResult(
        path=index_path(workspace, spec),
        episodes=len(entries),
        frames=sum(entry.frames for entry in entries.values()),
        fingerprint=fingerprint_of(spec.jsonl_dir, entries),
        computed=written or not reused,
    )


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:  # what it is that hinders shows when it is written
        return False


def _still_right(workspace: Workspace, spec: DatasetSpec, present: Mapping[str, FileState]) -> dict[str, EpisodeEntry]:
    """Entries of the index on disk whose file has the same size and time."""
    try:
        old = read_index(index_path(workspace, spec), workspace, spec)
    except DataError:
        return {}
    return {
        name: entry
        for name, entry in old.entries.items()
        if name in present and (entry.size, entry.mtime_ns) == tuple(present[name])
    }


def _count(folder: Path, files: Mapping[str, FileState], jobs: int | None, progress: bool) -> dict[str, EpisodeEntry]:
    total = sum(state.size for state in files.values())
    work = list(batches(files, lambda name: files[name].size, _BATCH_BYTES))
    found: dict[str, EpisodeEntry] = {}
    workers = (jobs or default_jobs()) if total >= _PARALLEL_BYTES else 1
    with progress_bar(total, "B", "index", quiet=not progress) as bar:
        results = ordered_map(count_files, ([f"{folder}/{name}" for name in names] for names in work), workers)
        for names, entries in zip(work, results, strict=True):
            found.update(zip(names, entries, strict=True))
            bar.update(sum(files[name].size for name in names))
    return found


def _document(spec: DatasetSpec, entries: Mapping[str, EpisodeEntry]) -> bytes:
    """The bytes of index_cache.json: one line a file, so that two versions can be compared by eye."""
    prefix = f"{spec.folder.as_posix()}/{spec.jsonl_dir}/"
    meta = {
        "dataset": spec.name,
        "total_samples": sum(entry.frames for entry in entries.values()),
        "total_jsonl_files": len(entries),
        "fingerprint": fingerprint_of(spec.jsonl_dir, entries),
        "format": FORMAT,
        "tool_version": tool_version(),
    }
    keyed = sorted((prefix + name, entry) for name, entry in entries.items())
    counts = b",\n".join(orjson.dumps(key) + b": %d" % entry.frames for key, entry in keyed)
    states = b",\n".join(orjson.dumps(key) + b": " + orjson.dumps(entry[1:]) for key, entry in keyed)
    body = (orjson.dumps(meta), counts, states)
    return b'{\n"meta_data": %b,\n"data": {\n%b\n},\n"files": {\n%b\n}\n}\n' % body


@dataclass(frozen=True, kw_only=True)
class IndexCommand:
    """Write index_cache.json: how many frames every episode file holds.

    The file goes to the dataset's folder and to the top of the workspace. Files whose size and time did not change
    are not read again.

    Examples:
      dm05-prep index                       write it, or say that it is current
      dm05-prep index --check               exit 1 and say why when it is missing or stale
      dm05-prep index --rebuild             read every file again
    """

    dataset_name: str = "libero_pi0_all"
    """Name of the dataset (dm05-prep datasets lists them)."""
    check: bool = False
    """Only say whether the index is current."""
    rebuild: bool = False
    """Count every file again, also those that did not change."""
    jobs: int | None = None
    """Processes (default: all cores)."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """No progress bar, no lines but errors."""

    def run(self) -> int:
        """Do it; 1 when --check finds the index stale."""
        if self.check and self.rebuild:
            raise UsageError("--check writes nothing and --rebuild writes everything", fix="Give one of the two")
        workspace = Workspace.resolve(self.workspace)
        spec = lookup(self.dataset_name, workspace)
        if self.check:
            return self._check(workspace, spec)
        result = build_index(workspace, spec, force=self.rebuild, jobs=chosen_jobs(self.jobs), progress=not self.quiet)
        state = "written" if result.computed else "already current"
        if not self.quiet:
            say(f"index      {result.episodes:,} episodes, {result.frames:,} frames, {state}: {result.path}")
        return 0

    def _check(self, workspace: Workspace, spec: DatasetSpec) -> int:
        index = require_fresh(workspace, spec)
        if not self.quiet:
            say(f"index      {len(index.entries):,} episodes, {index.frames:,} frames, current: {index.path}")
        return 0
