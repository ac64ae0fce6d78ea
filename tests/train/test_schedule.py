"""The learning rate: up a line, down a cosine, ending where it should."""

from __future__ import annotations

import pytest
from dm05_train.optim.schedule import learning_rate
from hypothesis import given
from hypothesis import strategies as st


def test_landmarks() -> None:
    rates = [learning_rate(step, peak=1.0, warmup=10, total=110) for step in range(110)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0 and rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)


def test_the_default_run_ends_on_its_warm_up() -> None:
    assert learning_rate(299, peak=2.5e-5, warmup=1000, total=300) == pytest.approx(2.5e-5 * 0.3)


def test_constant() -> None:
    assert {learning_rate(s, peak=2.0, warmup=0, total=5, shape="constant") for s in range(9)} == {2.0}


@given(st.integers(0, 500), st.integers(0, 50), st.integers(1, 300))
def test_never_above_the_peak_nor_below_zero(step: int, warmup: int, total: int) -> None:
    assert 0 < learning_rate(step, peak=3.0, warmup=warmup, total=total) <= 3.0
