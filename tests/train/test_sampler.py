"""Order: permutations, disjoint ranks, and a run that continues on any other split of the work."""

from __future__ import annotations

import numpy as np
import pytest
from dm05_train.data.sampler import Schedule, order
from dm05_train.errors import TrainError
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(samples=st.integers(1, 3000), seed=st.integers(-(2**40), 2**70), epoch=st.integers(0, 5))
def test_every_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    ids = order(seed, samples, np.arange(epoch * samples, (epoch + 1) * samples))
    assert sorted(ids.tolist()) == list(range(samples))


def test_known_order() -> None:
    """The order is part of a checkpoint's meaning: it must never change between versions."""
    assert order(42, 10, np.arange(20)).tolist() == [5, 0, 7, 6, 1, 4, 2, 3, 9, 8, 0, 2, 4, 6, 8, 7, 1, 5, 3, 9]
    assert order(42, 273_000, [0, 1, 272_999, 273_000, 10**12]).tolist() == [48274, 91325, 96474, 68434, 5151]


def test_epochs_and_seeds_differ_and_positions_are_uniform() -> None:
    first, second = order(1, 1000, np.arange(1000)), order(1, 1000, np.arange(1000, 2000))
    assert (first == second).mean() < 0.02
    assert (first == order(2, 1000, np.arange(1000))).mean() < 0.02
    for samples in (5, 37, 1000):
        counts = np.zeros((samples,))
        for seed in range(2000):
            counts[order(seed, samples, [0])] += 1
        expected = 2000 / samples
        assert np.abs(counts - expected).max() < 6 * np.sqrt(expected) + 3
    assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.1


def test_unshuffled() -> None:
    assert order(1, 3, np.arange(7), shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]


splits = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))


@settings(deadline=None)
@given(before=splits, after=splits, steps=st.integers(0, 6), seed=st.integers(0, 99), spare=st.integers(0, 50))
def test_same_stream_on_any_split(
    before: tuple[int, int, int], after: tuple[int, int, int], steps: int, seed: int, spare: int
) -> None:
    samples = max(r * b * a for r, b, a in (before, after)) + spare

    def run(split: tuple[int, int, int], start: int, steps: int) -> tuple[list[int], dict[str, int]]:
        ranks, batch, accumulation = split
        seen: dict[int, int] = {}
        for rank in range(ranks):
            plan = Schedule(seed=seed, samples=samples, batch=batch, ranks=ranks, rank=rank, accumulation=accumulation)
            for micro in range(steps * accumulation):
                positions = plan.positions(start, micro)
                for position, sample in zip(positions.tolist(), plan.sample_ids(positions).tolist(), strict=True):
                    assert position not in seen
                    seen[position] = sample
        end = start + steps * plan.global_batch
        assert sorted(seen) == list(range(start, end))
        return [seen[p] for p in sorted(seen)], plan.state(end)

    first, state = run(before, 0, steps)
    resumed_plan = Schedule(seed=seed, samples=samples, batch=after[1], ranks=after[0], accumulation=after[2])
    start = resumed_plan.restore(state)
    second, _ = run(after, start, 2)
    whole = order(seed, samples, np.arange(len(first) + len(second))).tolist()
    assert first + second == whole


def test_refuses_fewer_samples_than_a_step() -> None:
    with pytest.raises(TrainError, match=r"23 samples, fewer than the 24 of one step \(2 ranks x batch 4 x acc.* 3\)"):
        Schedule(seed=0, samples=23, batch=4, ranks=2, accumulation=3)


def test_refuses_another_order() -> None:
    plan = Schedule(seed=1, samples=50, batch=2)
    for change in ({"seed": 2}, {"samples": 49}, {"version": 9}):
        with pytest.raises(TrainError, match=next(iter(change))):
            plan.restore({**plan.state(4), **change})
