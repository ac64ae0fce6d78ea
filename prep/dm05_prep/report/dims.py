"""Numbers of one dimension of a state or action vector, and what is odd about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dm05_schemas.errors import DataError
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.stats import NormStats, VectorStats, read_stats
from dm05_schemas.workspace import Workspace
from numpy.typing import NDArray

from dm05_prep.report.facts import Facts

STEPS = 48
CHUNK_SIZE = 10
"""The chunk size whose statistics are shown where several are there: the default of training."""

Float = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Dim:
    """One dimension: its frames' values, what normalisation clips to, and its usual course over an episode."""

    key: str
    number: int
    word: str
    values: Float
    mean: float
    std: float
    low: float
    high: float
    course: tuple[Float, Float, Float]
    """[STEPS] each: 10th, 50th and 90th percentile over episodes at equal shares of their length."""

    @property
    def oddity(self) -> str | None:
        """What makes it a poor input to a model, if anything does."""
        least, most = float(self.values.min()), float(self.values.max())
        if least == most:
            return f"always {least:g}"
        if self.high - self.low < 1e-3 * (most - least):
            return f"q01 and q99 are {self.high - self.low:.2g} apart, the values {most - least:.2g}"
        return None


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """The dimensions of state and action, and where q01 and q99 come from."""

    state: tuple[Dim, ...]
    action: tuple[Dim, ...]
    source: str


def find_norm_stats(workspace: Workspace, spec: DatasetSpec) -> NormStats | None:
    """The dataset's stored statistics for its own action mode: those of the default chunk size, else of the smallest.

    A file that cannot be read counts as absent; ``dm05-prep validate`` speaks about those.
    """
    found = []
    for path in sorted(workspace.norm_stats_dir.glob(f"{spec.name}_*.parquet")):
        try:
            stats = read_stats(path)
        except DataError:
            continue
        if (stats.dataset, stats.action_mode) == (spec.name, spec.action_mode):
            found.append(stats)
    return min(found, key=lambda stats: (stats.chunk_size != CHUNK_SIZE, stats.chunk_size), default=None)


def measure(facts: Facts, spec: DatasetSpec, stats: NormStats | None) -> Vectors:
    """Every dimension of a dataset with at least one episode.

    q01 and q99 are those that training clips to when ``stats`` are given; those of an action relative to the state say
    nothing about the actions in the frames, so they are then taken over the frames, as without ``stats``.
    """
    absolute = stats is not None and spec.action_mode == "absolute"
    names = ["action" if facts.has_action else ""] * spec.action_dim
    if stats is None:
        source = "of all frames (no norm stats yet)"
    elif absolute:
        source = f"that training clips to (norm stats, chunk size {stats.chunk_size})"
    else:
        source = (
            "of the norm stats for the state, of all frames for the action (training sees it relative to the state)"
        )
    return Vectors(
        state=_dims("state", facts, facts.state, list(spec.state_desc), stats.state if stats else None),
        action=_dims("action", facts, facts.action, names, stats.action if stats and absolute else None)
        if facts.has_action
        else (),
        source=source,
    )


def _dims(
    key: str, facts: Facts, rows: NDArray[np.float32], words: list[str], stats: VectorStats | None
) -> tuple[Dim, ...]:
    there = ~np.isnan(rows[:, 0])
    course = _course(facts, rows)
    dims = []
    for number, word in enumerate(words):
        values = rows[there, number].astype(np.float64)
        low, high = (stats.q01[number], stats.q99[number]) if stats else np.quantile(values, (0.01, 0.99))
        dims.append(
            Dim(
                key=key,
                number=number,
                word="" if word == key else word,
                values=values,
                mean=float(values.mean()),
                std=float(values.std()),
                low=float(low),
                high=float(high),
                course=(course[0, :, number], course[1, :, number], course[2, :, number]),
            )
        )
    return tuple(dims)


def _course(facts: Facts, rows: NDArray[np.float32]) -> Float:
    """[3, STEPS, D]: percentiles 10, 50, 90 over the episodes that have values."""
    shares = np.linspace(0, 1, STEPS)
    picks = np.stack([e.start + np.rint(shares * (e.frames - 1)).astype(np.int64) for e in facts.episodes])
    taken = rows[picks].astype(np.float64)
    course: Float = np.percentile(taken[~np.isnan(taken[:, 0, 0])], (10, 50, 90), axis=0)
    return course
