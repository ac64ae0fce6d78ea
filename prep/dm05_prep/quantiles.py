"""Exact order statistics of a column too long to sort: selection by the bits of its float32 values.

A float32 and its bits taken as an integer (mirrored for negative numbers) have the same order. One pass counts the
upper 16 bits of every value, which tells in which of 65,536 intervals an order statistic lies; a second pass counts
the lower 16 bits of the values in just those intervals and so finds it exactly. Counts are integers, so neither the
order of the values nor how they are cut into blocks matters, and memory does not grow with the column.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BINS = 1 << 16

Keys = NDArray[np.uint32]


def ordered_keys(values: NDArray[np.float32]) -> Keys:
    """Integers in the order of ``values`` (float32 [n], finite, -0 counts as 0)."""
    bits: Keys = (values + np.float32(0)).view(np.uint32)
    flip = (bits.view(np.int32) >> 31).view(np.uint32) | np.uint32(1 << 31)
    return bits ^ flip


def key_value(key: int) -> float:
    """The float32 that :func:`ordered_keys` maps to ``key``."""
    bits = key ^ (1 << 31) if key >> 31 else key ^ 0xFFFFFFFF
    return float(np.array(bits, dtype=np.uint32).view(np.float32))


def rank_of(quantile: float, count: int) -> tuple[int, int, float]:
    """The two neighbouring ranks (from 0) and the weight of the upper one, as NumPy's linear method has them."""
    position = quantile * (count - 1)
    low = int(np.floor(position))
    return low, min(low + 1, count - 1), position - low


def between(low: float, high: float, weight: float) -> float:
    """Linear interpolation, from the nearer end, as NumPy does it."""
    return high - (high - low) * (1 - weight) if weight >= 0.5 else low + (high - low) * weight


class Selection:
    """Finds the values at some ranks of a weighted column in two passes over its blocks.

    ``first(block)`` for every block, then :meth:`narrow` with the ranks, then ``second(block)`` for every block again,
    then :meth:`values`.
    """

    def __init__(self) -> None:
        self.upper = np.zeros(_BINS, dtype=np.int64)
        self.lower: dict[int, NDArray[np.int64]] = {}
        self.ranks: Sequence[int] = ()

    def first(self, keys: Keys, weights: NDArray[np.int64] | None) -> None:
        """Count one block; ``weights`` says how often each value stands in the column (None: once)."""
        self.upper += _histogram(keys >> np.uint32(16), weights)

    def narrow(self, ranks: Sequence[int]) -> None:
        """Choose the ranks (from 0) that are looked for."""
        self.ranks = ranks
        self.ends = np.cumsum(self.upper)
        self.lower = {self._bin(rank): np.zeros(_BINS, dtype=np.int64) for rank in ranks}

    def second(self, keys: Keys, weights: NDArray[np.int64] | None) -> None:
        """Look at one block again."""
        upper = keys >> np.uint32(16)
        for chosen, counts in self.lower.items():
            inside = np.flatnonzero(upper == chosen)
            if len(inside):
                counts += _histogram(keys[inside] & np.uint32(0xFFFF), None if weights is None else weights[inside])

    def values(self) -> list[float]:
        """The value at each rank."""
        found = []
        for rank in self.ranks:
            chosen = self._bin(rank)
            before = int(self.ends[chosen] - self.upper[chosen])
            low = int(np.searchsorted(np.cumsum(self.lower[chosen]), rank - before, side="right"))
            found.append(key_value(chosen << 16 | low))
        return found

    def _bin(self, rank: int) -> int:
        return int(np.searchsorted(self.ends, rank, side="right"))


def _histogram(bins: Keys, weights: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Weighted counts of 16-bit numbers; exact, as float64 holds every count up to 2**53."""
    counts: NDArray[np.int64] = np.bincount(bins, weights, minlength=_BINS).astype(np.int64)
    return counts
