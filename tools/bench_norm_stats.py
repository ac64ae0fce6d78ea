"""Exact statistics at LIBERO's size against the plain way, and at 100 times that within limited memory.

    python tools/bench_norm_stats.py                        side by side, 273 thousand frames
    python tools/bench_norm_stats.py --times 100 --limit-gib 2    27 million frames, allocations limited per process

For developers; never a test. The plain way builds the sample of every frame as a loader does: open the episode's file,
parse all of its lines, cut the chunk; then stack all rows and let NumPy find mean, std and quantiles. Its cost grows
with the number of frames, so it is timed on some of the episodes and scaled.
"""

from __future__ import annotations

import json
import resource
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import tyro
from dm05_prep.columns import frame_weights
from dm05_prep.index import build_index
from dm05_prep.norm_stats import compute
from dm05_prep.parallel import default_jobs
from dm05_schemas.episode import read_episode
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.sample import action_chunk
from dm05_schemas.stats import NormStats
from dm05_schemas.workspace import Workspace
from synthetic_episodes import LIBERO_EPISODES, LIBERO_FRAMES, link_episodes, write_episodes


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time exact statistics."""

    episodes: int = LIBERO_EPISODES
    """Number of episode files written."""
    frames: int = LIBERO_FRAMES
    """About how many frames they have together."""
    times: int = 1
    """How often each file stands in the dataset, as hard links."""
    limit_gib: float | None = None
    """Limit the memory that this process and each worker may allocate to this (RLIMIT_DATA)."""
    chunk_size: int = 10
    """H."""
    plain_episodes: int = 12
    """Episodes that the plain way is timed on (scaled up by frames); 0: not at all."""
    jobs: int | None = None
    """Processes of ours (default: all cores)."""
    repeats: int = 3
    """Runs of ours; the best one counts."""
    action_mode: Literal["absolute"] = "absolute"
    """LIBERO's own mode."""


def main(bench: Bench) -> None:
    """Write the files, time both ways, check the numbers."""
    with tempfile.TemporaryDirectory(prefix="dm05-bench-") as folder:
        workspace = Workspace(Path(folder))
        spec = lookup("libero_pi0_all", workspace)
        jsonl = spec.jsonl(workspace)
        frames = write_episodes(jsonl, bench.episodes, bench.frames)
        originals = sorted(jsonl.glob("*.jsonl"))
        files = link_episodes(jsonl, bench.times)
        print(f"{files:,} episodes, {frames * bench.times:,} frames, {bench.jobs or default_jobs()} processes")
        plain = _plain(originals[: bench.plain_episodes], spec, bench.chunk_size, frames * bench.times)
        if bench.limit_gib is not None:
            limit = int(bench.limit_gib * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            print(f"allocations limited to {bench.limit_gib:g} GiB a process")
        build_index(workspace, spec)
        best, stats, peak = float("inf"), None, 0
        for _ in range(bench.repeats if bench.times == 1 else 1):
            begin = time.perf_counter()
            with _Peak() as watch:
                result = compute(workspace, spec, bench.chunk_size, bench.action_mode, jobs=bench.jobs, force=True)
            best, stats, peak = min(best, time.perf_counter() - begin), result.stats, max(peak, watch.peak)
        print(f"ours: {best:.2f} s, all processes together at most {peak / 2**20:,.0f} MiB resident")
        if plain:
            print(f"plain: {plain:,.0f} s (scaled), that is {plain / best:,.0f}x")
        assert stats is not None
        _check(stats, originals, spec, bench)


class _Peak:
    """Highest sum of the resident memory of this process and its children, looked at twenty times a second."""

    def __enter__(self) -> _Peak:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.05):
            total = me.memory_info().rss
            for child in me.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)


def _plain(paths: list[Path], spec: DatasetSpec, chunk_size: int, frames: int) -> float:
    """Seconds that the plain way takes on ``paths``, scaled to ``frames``; 0 without paths."""
    if not paths:
        return 0.0
    begin = time.perf_counter()
    states, rows, seen = [], [], 0
    for path in paths:
        length = sum(1 for _ in path.open())
        seen += length
        for t in range(length - 1):
            episode = [json.loads(line) for line in path.read_text().splitlines()]
            states.append(np.float32(episode[t]["state"]))
            actions = np.float32([frame["action"] for frame in episode])
            rows.append(action_chunk(actions, t, chunk_size, from_states=False))
    for matrix in (np.float64(states), np.concatenate(rows).astype(np.float64)):
        matrix.mean(0), matrix.std(0), np.quantile(matrix, [0.01, 0.99], axis=0)
    return (time.perf_counter() - begin) * frames / seen


def _check(stats: NormStats, originals: list[Path], spec: DatasetSpec, bench: Bench) -> None:
    """Quantiles and extremes against sorting, bit for bit; every file counts ``times`` times."""
    episodes = [read_episode(path, spec) for path in originals]
    lengths = np.array([len(episode) for episode in episodes])
    state = np.concatenate([episode.state[:-1] for episode in episodes])
    action = np.concatenate([episode.targets for episode in episodes])
    weights = frame_weights(lengths, np.zeros(len(lengths), dtype=np.bool_), bench.chunk_size)
    for name, vector, values, counts in (
        ("state", stats.state, state, np.ones(len(state), dtype=np.int64)),
        ("action", stats.action, action, weights),
    ):
        total = int(counts.sum()) * bench.times
        assert vector.count == total, (name, vector.count, total)
        for dim in range(values.shape[1]):
            order = np.argsort(values[:, dim])
            ends = np.cumsum(counts[order]) * bench.times
            for quantile, found in ((0.01, vector.q01[dim]), (0.99, vector.q99[dim])):
                position = quantile * (total - 1)
                ranks = np.array([np.floor(position), np.floor(position) + 1])
                low, high = values[order[np.searchsorted(ends, ranks, side="right")], dim].astype(np.float64)
                part = position - np.floor(position)
                due = high - (high - low) * (1 - part) if part >= 0.5 else low + (high - low) * part
                assert found == due, (name, dim, found, due)
            assert vector.min[dim] == values[:, dim].min() and vector.max[dim] == values[:, dim].max()
            mean = np.average(values[:, dim].astype(np.float64), weights=counts)
            assert abs(vector.mean[dim] - mean) < 1e-12
    print("quantiles, min and max equal those found by sorting, bit for bit")


if __name__ == "__main__":
    main(tyro.cli(Bench, description=__doc__))
