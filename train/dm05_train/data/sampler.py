"""The order of samples: a pure function of (seed, epoch, position), with no list of it anywhere.

Positions are counted in samples over the whole run and all ranks: 0, 1, 2, ... Position p is sample number
`p % N` of epoch `p // N`; every epoch is another permutation of all N samples, and a batch may span two epochs. An
optimizer step at position p takes the next `ranks x batch x accumulation` positions, so what comes next depends on p
alone and a run continues exactly on another number of ranks, workers or another batch size.

The permutation is a keyed Feistel network over the smallest power of two that holds N, walked until it lands below N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dm05_train.errors import TrainError

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

ROUNDS = 8
STATE_VERSION = 1
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def order(seed: int, samples: int, positions: ArrayLike, *, shuffle: bool = True) -> Int64:
    """Sample numbers [...] at global positions [...].

    Args:
        seed: of the run.
        samples: N, number of samples of an epoch.
        positions: global positions, 0 or more.
        shuffle: False keeps the samples in their own order in every epoch.
    """
    at = np.asarray(positions, dtype=np.int64)
    epochs, inside = np.divmod(at, samples)
    if not shuffle:
        return inside
    result = np.empty_like(inside)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        result[chosen] = _permute(inside[chosen].astype(np.uint64), samples, _round_keys(seed, int(epoch)))
    return result


def uniform(seed: int, epochs: Int64, sample_ids: Int64, count: int) -> NDArray[np.float64]:
    """Uniform numbers [B, count] in [0, 1) for samples [B] in epochs [B]: a pure function of its arguments."""
    key = np.uint64(_mix_int(~seed & _MASK64))
    base = _finalise(_finalise(sample_ids.astype(np.uint64) + key) ^ (epochs.astype(np.uint64) * np.uint64(_GOLDEN)))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_finalise(base[:, None] + steps) >> np.uint64(11)).astype(np.float64) / 2.0**53


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Who takes which positions: rank r's micro-batch m of a step at p starts at `p + (m * ranks + r) * batch`.

    Raises:
        TrainError: an epoch has fewer samples than a step takes.
    """

    seed: int
    samples: int
    batch: int
    ranks: int = 1
    rank: int = 0
    accumulation: int = 1
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.samples < self.global_batch:
            raise TrainError(
                f"the dataset has {self.samples} samples, fewer than the {self.global_batch} of one step "
                f"({self.ranks} ranks x batch {self.batch} x accumulation {self.accumulation})",
                fix="Lower --trainer-config.per-device-train-batch-size or the number of GPUs",
            )

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.ranks * self.batch * self.accumulation

    def positions(self, start: int, micro_batch: int) -> Int64:
        """Positions [batch] of this rank's `micro_batch` (counted from 0), in a run that began at position `start`."""
        step, part = divmod(micro_batch, self.accumulation)
        first = start + step * self.global_batch + (part * self.ranks + self.rank) * self.batch
        return np.arange(first, first + self.batch, dtype=np.int64)

    def sample_ids(self, positions: Int64) -> Int64:
        """Sample numbers at `positions`."""
        return order(self.seed, self.samples, positions, shuffle=self.shuffle)

    def state(self, position: int) -> dict[str, int]:
        """What a checkpoint keeps: enough to go on at `position`."""
        return {"version": STATE_VERSION, "seed": self.seed, "samples": self.samples, "position": position}

    def restore(self, state: dict[str, Any]) -> int:
        """The position to go on at.

        Raises:
            TrainError: another version, seed or number of samples: the order would not be continued.
        """
        mine = self.state(0)
        for name in ("version", "seed", "samples"):
            if state.get(name) != mine[name]:
                raise TrainError(
                    f"the checkpoint's data order has {name} {state.get(name)}, this run {mine[name]}: it cannot go on "
                    "exactly where it stopped",
                    fix="Continue with the same dataset, held-out episodes and --trainer-config.seed",
                )
        return int(state["position"])


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    state = _mix_int(_mix_int(seed & _MASK64) ^ (epoch * _GOLDEN & _MASK64))
    return [np.uint64(_mix_int((state + i * _GOLDEN) & _MASK64)) for i in range(ROUNDS)]


def _mix_int(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _permute(values: UInt64, samples: int, keys: list[np.uint64]) -> Int64:
    bits = max(2, (samples - 1).bit_length())
    result = _feistel(values, bits, keys)
    while (outside := result >= samples).any():
        result[outside] = _feistel(result[outside], bits, keys)
    return result.astype(np.int64)


def _feistel(values: UInt64, bits: int, keys: list[np.uint64]) -> UInt64:
    """A bijection of [0, 2**bits): halves of unequal width take turns in being changed by the other."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
    for i, key in enumerate(keys):
        if i % 2 == 0:
            high = high ^ _mix(low, key, high_bits)
        else:
            low = low ^ _mix(high, key, low_bits)
    return (high << np.uint64(low_bits)) | low


def _mix(half: UInt64, key: np.uint64, bits: int) -> UInt64:
    return _finalise(half * np.uint64(_GOLDEN) + key) & np.uint64((1 << bits) - 1)


def _finalise(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
