"""The vectors of a dataset as columns on disk, and the statistics of one column.

::

    columns.f32   for every batch of R frames, back to back:
                  S state columns of R float32, then A target columns of R float32 (actions, or states where none)

A batch is a run of episode files cut by size alone, so that results do not depend on the number of processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dm05_prep.quantiles import Selection, between, ordered_keys, rank_of

QUANTILES = (0.01, 0.99)
# Values of relative chunks that are made at a time.
_BLOCK_VALUES = 1 << 18

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Where the columns of some episodes lie: byte offset, frames of each episode, whether its targets are states."""

    offset: int
    lengths: Int64
    from_states: NDArray[np.bool_]

    @property
    def rows(self) -> int:
        """R, the frames of all its episodes."""
        return int(self.lengths.sum())


@dataclass(frozen=True, kw_only=True)
class Column:
    """One dim to summarise.

    ``target`` None: the state of every sample. Else the target of every row of every chunk, minus the current state
    when ``relative``.
    """

    file: Path
    batches: Sequence[Batch]
    state: int | None
    target: int | None
    relative: bool
    chunk_size: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of one column."""

    mean: float
    std: float
    q01: float
    q99: float
    min: float
    max: float
    count: int


def summarise(column: Column) -> Summary:
    """Exact statistics of one column in two passes over its blocks, float64 sums."""
    selection = Selection()
    sums: list[float] = []
    count, low, high = 0, math.inf, -math.inf
    for values, weights in _blocks(column):
        selection.first(ordered_keys(values), weights)
        doubles = values.astype(np.float64)
        sums.append(float(np.add.reduce(doubles if weights is None else doubles * weights)))
        count += len(values) if weights is None else int(weights.sum())
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    mean = math.fsum(sums) / count
    ends = [rank_of(quantile, count) for quantile in QUANTILES]
    selection.narrow([rank for below, above, _ in ends for rank in (below, above)])
    squares: list[float] = []
    for values, weights in _blocks(column):
        selection.second(ordered_keys(values), weights)
        apart = (values.astype(np.float64) - mean) ** 2
        squares.append(float(np.add.reduce(apart if weights is None else apart * weights)))
    found = selection.values()
    q01, q99 = (between(found[2 * i], found[2 * i + 1], weight) for i, (_, _, weight) in enumerate(ends))
    return Summary(
        mean=mean,
        std=math.sqrt(math.fsum(squares) / count),
        q01=q01,
        q99=q99,
        min=low + 0.0,
        max=high + 0.0,
        count=count,
    )


def frame_weights(lengths: Int64, from_states: NDArray[np.bool_], chunk_size: int) -> Int64:
    """How often each frame stands in the chunks of its episode, for the frames of all episodes in a row.

    Sample t holds the targets t .. t+H-1 (one later when they are states), past the end the last. So a frame counts
    once for each of up to H samples, and the last frame takes what is left of the H * (n - 1) rows.
    """
    place = _place(lengths)
    weights = np.minimum(place + np.where(from_states, 0, 1).repeat(lengths), chunk_size)
    last = np.cumsum(lengths) - 1
    weights[last] = 0
    weights[last] = chunk_size * (lengths - 1) - np.add.reduceat(weights, last - lengths + 1)
    return weights


def _place(lengths: Int64) -> Int64:
    """Number of each frame in its episode."""
    starts = np.cumsum(lengths) - lengths
    place: Int64 = np.arange(int(lengths.sum()), dtype=np.int64) - starts.repeat(lengths)
    return place


def _blocks(column: Column) -> Iterator[tuple[Float32, Int64 | None]]:
    """The values of a column, block by block, with how often each counts (None: once)."""
    with column.file.open("rb") as file:
        for batch in column.batches:
            state = None if column.state is None else _load(file.fileno(), batch, column.state)
            target = None if column.target is None else _load(file.fileno(), batch, column.target)
            samples = np.ones(batch.rows, dtype=np.bool_)
            samples[np.cumsum(batch.lengths) - 1] = False
            if target is None:
                assert state is not None
                yield state[samples], None
            elif state is None or not column.relative:
                weights = frame_weights(batch.lengths, batch.from_states, column.chunk_size)
                held = weights > 0
                yield target[held], weights[held]
            else:
                yield from _differences(target, state, samples, batch, column.chunk_size)


def _differences(
    target: Float32, state: Float32, samples: NDArray[np.bool_], batch: Batch, chunk_size: int
) -> Iterator[tuple[Float32, None]]:
    """Rows of all chunks of the batch minus the current state, some steps of all chunks at a time."""
    current = np.flatnonzero(samples)
    last = (np.cumsum(batch.lengths) - 1).repeat(batch.lengths)[current]
    first = current + batch.from_states.repeat(batch.lengths)[current]
    base = state[current]
    steps = max(1, _BLOCK_VALUES // len(current))
    for start in range(0, chunk_size, steps):
        step = np.arange(start, min(start + steps, chunk_size))[:, None]
        yield (target[np.minimum(first + step, last)] - base).reshape(-1), None


def _load(handle: int, batch: Batch, column: int) -> Float32:
    size = 4 * batch.rows
    return np.frombuffer(os.pread(handle, size, batch.offset + column * size), dtype=np.float32)
