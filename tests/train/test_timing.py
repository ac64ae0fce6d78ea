"""The breakdown of a step adds up to the time that passed."""

from __future__ import annotations

import time

import pytest
import torch
from dm05_train.timing import NoTimer, StepTimer


def test_parts_add_up_on_the_clock() -> None:
    timer = StepTimer(torch.device("cpu"))
    timer.mark("start")
    began = time.perf_counter()
    for _ in range(3):
        time.sleep(0.02)
        timer.mark("data")
        time.sleep(0.01)
        timer.mark("step")
    passed = time.perf_counter() - began
    found = timer.read()
    assert found["data"] > found["step"] >= 0.01 and 3 * sum(found.values()) == pytest.approx(passed, abs=0.01)
    time.sleep(0.01)
    timer.mark("data")
    assert list(timer.read()) == ["data"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_parts_of_a_gpu_are_read_one_reading_later() -> None:
    timer = StepTimer(torch.device("cuda"))
    timer.mark("start")
    torch.ones(1000, 1000, device="cuda").matmul(torch.ones(1000, 1000, device="cuda"))
    timer.mark("matmul")
    assert timer.read() == {}
    torch.cuda.synchronize()
    assert timer.read()["matmul"] > 0


def test_nothing_is_measured_unless_asked() -> None:
    timer = NoTimer()
    timer.mark("data")
    assert timer.read() == {}
