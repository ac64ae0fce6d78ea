"""``dm05-prep norm-stats``: exact normalisation statistics from vectors alone (files: :mod:`dm05_schemas.stats`).

Episodes are parsed once, by all cores; their vectors go to a temporary file as columns (60 bytes a LIBERO frame, under
$TMPDIR), and each column is then summarised from there. No chunk is ever built in absolute mode: a frame weighs as
often as chunks hold it. Memory does not grow with the dataset.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import crc32c
import numpy as np
from dm05_schemas.commands import aiming
from dm05_schemas.episode import scan_episode
from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.files import folder_lock, is_locked
from dm05_schemas.index import index_path, read_index
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.sample import CHUNK_FLAGS, USE_ABSOLUTE, require_chunk
from dm05_schemas.stats import (
    FIELDS,
    NormStats,
    VectorStats,
    narrow_dims,
    read_stats,
    stats_stem,
    write_stats,
)
from dm05_schemas.version import tool_version
from dm05_schemas.workspace import Workspace
from numpy.typing import NDArray

from dm05_prep.columns import Batch, Column, Summary, summarise
from dm05_prep.console import progress as progress_bar
from dm05_prep.console import say, warn
from dm05_prep.index import build_index
from dm05_prep.parallel import batches, chosen_jobs, default_jobs, ordered_map

# Counts of a frame's weight and of all frames stay well inside 64 bits.
MAX_CHUNK = 1_000_000
_COLUMNS, _STALE_S = "dm05-columns-", 60.0
_BATCH_BYTES = 1 << 25
# Starting processes takes longer than parsing less than this much.
_PARALLEL_BYTES = 1 << 24
_PARALLEL_VALUES = 25_000_000


@dataclass(frozen=True, kw_only=True)
class StatsResult:
    """The pair of files; ``computed`` is False when the one on disk was already right."""

    parquet: Path
    json: Path
    stats: NormStats
    computed: bool


class _Task(NamedTuple):
    paths: Sequence[Path]
    checksums: Sequence[int | None]
    spec: DatasetSpec


class _Vectors(NamedTuple):
    """The columns of one batch: float32 [S, R] and [A, R]."""

    state: NDArray[np.float32]
    target: NDArray[np.float32]
    lengths: NDArray[np.int64]
    from_states: NDArray[np.bool_]


def compute(
    workspace: Workspace,
    spec: DatasetSpec,
    chunk_size: int,
    action_mode: str,
    *,
    out: Path | None = None,
    jobs: int | None = None,
    force: bool = False,
    progress: bool = False,
) -> StatsResult:
    """Statistics of every sample of a dataset, written unless those on disk are of the same data.

    The index is brought up to date first. Any number of jobs gives the same bytes.

    Args:
        workspace: where the dataset lies.
        spec: the dataset.
        chunk_size: H, 1 to a million.
        action_mode: "absolute" or "relative".
        out: folder to write to, the workspace's norm_stats when None.
        jobs: processes, all cores when None.
        force: compute even if the files on disk are right.
        progress: show bars.

    Raises:
        DataError: the first unacceptable frame, with file and line, relative mode for dims that differ, or a chunk
            longer than any episode.
    """
    if not 1 <= chunk_size <= MAX_CHUNK:
        raise DataError(f"a chunk cannot hold {chunk_size} actions", fix=f"Give {CHUNK_FLAGS} 1 to {MAX_CHUNK}")
    if action_mode == "relative" and spec.state_dim != spec.action_dim:
        dims = f"{spec.action_dim} action and {spec.state_dim} state dims"
        raise DataError(f"relative mode needs as many of both, {spec.name} has {dims}", fix=USE_ABSOLUTE)
    folder = out if out is not None else workspace.norm_stats_dir
    built = build_index(workspace, spec, jobs=jobs, progress=progress)
    longest = max((entry.frames for entry in read_index(built.path, workspace, spec).entries.values()), default=0)
    require_chunk(chunk_size, longest, spec.name)
    fingerprint = built.fingerprint
    held = None if force else _current(folder, spec.name, chunk_size, action_mode, fingerprint)
    if held is not None:
        return held
    summaries = _summarise(workspace, spec, chunk_size, action_mode, jobs or default_jobs(), progress)
    stats = NormStats(
        dataset=spec.name,
        chunk_size=chunk_size,
        action_mode=action_mode,
        state=_vector(summaries[: spec.state_dim]),
        action=_vector(summaries[spec.state_dim :]),
        source_fingerprint=fingerprint,
        tool_version=tool_version(),
    )
    parquet, json = write_stats(folder, stats)
    return StatsResult(parquet=parquet, json=json, stats=stats, computed=True)


def _current(folder: Path, dataset: str, chunk_size: int, action_mode: str, fingerprint: str) -> StatsResult | None:
    """The pair on disk when both files are whole and of this data."""
    stem = stats_stem(dataset, chunk_size, action_mode)
    parquet, json = folder / f"{stem}.parquet", folder / f"{stem}.json"
    try:
        stats, plain = read_stats(parquet), read_stats(json)
    except (DataError, OSError):
        return None
    if stats.source_fingerprint != fingerprint or not np.array_equal(stats.action.q99, plain.action.q99):
        return None
    return StatsResult(parquet=parquet, json=json, stats=stats, computed=False)


def _summarise(
    workspace: Workspace, spec: DatasetSpec, chunk_size: int, action_mode: str, jobs: int, progress: bool
) -> list[Summary]:
    """Statistics of every state dim, then of every action dim."""
    _drop_stale_columns()
    with tempfile.TemporaryDirectory(prefix=_COLUMNS) as temporary, folder_lock(Path(temporary)):
        file = Path(temporary) / "columns.f32"
        try:
            parts = _spill(workspace, spec, file, jobs, progress)
        except OSError as error:
            if error.filename is not None:
                raise
            what = f"the vectors cannot be written: {error.strerror or error}"
            fix = "Set TMPDIR to a folder with 4 bytes free for each number of a frame's state and action"
            raise DataError(what, where=temporary, fix=fix) from error
        columns = _columns(spec, file, parts, chunk_size, action_mode)
        values = len(columns) * sum(part.rows for part in parts) * (chunk_size if action_mode == "relative" else 1)
        with progress_bar(len(columns), "dims", "statistics", quiet=not progress) as bar:
            summaries = []
            for summary in ordered_map(summarise, columns, jobs if values > _PARALLEL_VALUES else 1):
                summaries.append(summary)
                bar.update()
    return summaries


def _drop_stale_columns() -> None:
    """Delete the columns of runs that were killed: theirs are no longer locked (a new folder may not be so yet)."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_COLUMNS}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_S and not is_locked(folder):
                shutil.rmtree(folder)


def _spill(workspace: Workspace, spec: DatasetSpec, file: Path, jobs: int, progress: bool) -> list[Batch]:
    """Parse every episode and write its vectors to ``file``."""
    index = read_index(index_path(workspace, spec), workspace, spec)
    sizes = {name: entry.size or 0 for name, entry in index.entries.items()}
    tasks = [
        _Task([index.jsonl / name for name in names], [index.entries[name].crc32c for name in names], spec)
        for names in batches(sizes, sizes.__getitem__, _BATCH_BYTES)
    ]
    total = sum(sizes.values())
    weights = [sum(sizes[path.relative_to(index.jsonl).as_posix()] for path in task.paths) for task in tasks]
    parts = []
    offset = 0
    bars = progress_bar(total, "B", "episodes", quiet=not progress)
    with aiming(workspace, spec.name), file.open("wb") as sink, bars as bar:
        results = ordered_map(_read_vectors, tasks, jobs if total > _PARALLEL_BYTES else 1)
        for weight, vectors in zip(weights, results, strict=True):
            parts.append(Batch(offset=offset, lengths=vectors.lengths, from_states=vectors.from_states))
            for matrix in (vectors.state, vectors.target):
                sink.write(matrix.data)
                offset += matrix.nbytes
            bar.update(weight)
    return parts


def _read_vectors(task: _Task) -> _Vectors:
    states, targets, lengths, from_states = [], [], [], []
    for path, checksum in zip(task.paths, task.checksums, strict=True):
        data = path.read_bytes()
        if checksum is not None and crc32c.crc32c(data) != checksum:
            what = "is not what the index says, though its size and time are"
            fix = "Run dm05-prep index --rebuild, then this command again"
            raise DataError(what, where=path, fix=fix)
        episode, findings = scan_episode(path, task.spec, data=data)
        if episode is None:
            raise next(found for found in findings if found.severity == "error").error()
        states.append(episode.state)
        targets.append(episode.targets)
        lengths.append(len(episode))
        from_states.append(episode.action is None)
    return _Vectors(
        np.ascontiguousarray(np.concatenate(states).T),
        np.ascontiguousarray(np.concatenate(targets).T),
        np.array(lengths, dtype=np.int64),
        np.array(from_states, dtype=np.bool_),
    )


def _columns(spec: DatasetSpec, file: Path, parts: Sequence[Batch], chunk_size: int, action_mode: str) -> list[Column]:
    """Every state dim, then every action dim."""

    def column(state: int | None, target: int | None, relative: bool) -> Column:
        return Column(
            file=file, batches=parts, state=state, target=target, relative=relative, chunk_size=chunk_size
        )  # fmt: skip

    states = [column(dim, None, False) for dim in range(spec.state_dim)]
    moving = set(range(spec.action_dim)) - set(spec.gripper_dims) if action_mode == "relative" else set()
    return states + [
        column(dim if dim in moving else None, spec.state_dim + dim, dim in moving) for dim in range(spec.action_dim)
    ]


def _vector(summaries: Sequence[Summary]) -> VectorStats:
    arrays = {name: np.array([getattr(summary, name) for summary in summaries], dtype=np.float64) for name in FIELDS}
    return VectorStats(**arrays, count=summaries[0].count)


@dataclass(frozen=True, kw_only=True)
class NormStatsCommand:
    """Compute the normalisation statistics of a dataset, exactly, for one chunk size and action mode.

    Writes a parquet (with where it comes from) and the JSON that the public code reads. Only vectors are read; no
    image needs to be there. Runs again only when the data changed.

    Examples:
      dm05-prep norm-stats
      dm05-prep norm-stats --chunk-size 50 --action-mode relative --dataset-name my_robot
    """

    dataset_name: str = "libero_pi0_all"
    """Name of the dataset (dm05-prep datasets lists them)."""
    chunk_size: int = 10
    """Number of actions in a chunk."""
    action_mode: str | None = None
    """absolute or relative (default: the dataset's own)."""
    out: Path | None = None
    """Folder to write to (default: norm_stats in the workspace)."""
    force: bool = False
    """Compute even when the files are current."""
    jobs: int | None = None
    """Processes (default: all cores)."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """No progress bar, no lines but errors."""

    def run(self) -> None:
        """Do it."""
        workspace = Workspace.resolve(self.workspace)
        spec = lookup(self.dataset_name, workspace)
        mode = self.action_mode or spec.action_mode
        if mode not in ("absolute", "relative"):
            raise UsageError(f"--action-mode must be absolute or relative, not {mode!r}")
        if not 1 <= self.chunk_size <= MAX_CHUNK:
            raise UsageError(f"--chunk-size must be 1 to {MAX_CHUNK:,}, not {self.chunk_size}")
        result = compute(
            workspace, spec, self.chunk_size, mode, out=self.out, jobs=chosen_jobs(self.jobs), force=self.force,
            progress=not self.quiet,
        )  # fmt: skip
        for narrow in narrow_dims(result.stats):
            warn(narrow.text)
        if not self.quiet:
            state = "written" if result.computed else "already current"
            count = result.stats.state.count
            say(f"norm-stats {count:,} samples, chunk size {self.chunk_size}, {mode}, {state}: {result.json}")
