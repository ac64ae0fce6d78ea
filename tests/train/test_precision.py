"""The float32 value of a weight survives between steps in the way each precision mode promises."""

from __future__ import annotations

import pytest
import torch
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.precision import Mode, join16, read_master, split16, weight_dtype, write_master
from hypothesis import given
from hypothesis import strategies as st

MODES: tuple[Mode, ...] = ("fp32", "bf16", "bf16_compensated", "fp32_master")


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1))
def test_weight_and_remainder_are_the_master_to_the_last_bit(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    weight, remainder = split16(master)
    assert torch.equal(join16(weight, remainder).view(torch.int32), master.view(torch.int32))


def test_every_pattern_of_the_low_half_survives() -> None:
    bits = torch.arange(2**16, dtype=torch.int32)
    for upper in (0x3F80, 0x3FFF, 0x0001, 0x7F00):
        master = ((upper << 16) + bits).view(torch.float32)
        for signed in (master, -master):
            weight, remainder = split16(signed)
            assert torch.equal(join16(weight, remainder), signed)
            nearest = signed.bfloat16()
            tie = bits == 0x8000
            assert torch.equal(weight[~tie], nearest[~tie])


@pytest.mark.parametrize("mode", MODES)
def test_written_values_are_read_back(mode: Mode) -> None:
    weight = torch.randn(50).to(weight_dtype(mode))
    state = {
        "bf16_compensated": {"remainder": torch.zeros(50, dtype=torch.int16)},
        "fp32_master": {"master": weight.float()},
    }
    extra = state.get(mode, {})
    new = torch.randn(50)
    write_master(weight, extra, new)
    assert torch.equal(read_master(weight, extra), new if mode != "bf16" else new.bfloat16().float())


def distance_after(mode: Mode, steps: int = 400) -> tuple[float, float]:
    """How far weights of size 1 get on a constant gradient at the default rate, as a share of what float32 gets."""
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=weight_dtype(mode)))
    optimizer = AdamW([("w", parameter)], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, mode=mode)
    lr, scale = torch.tensor(2.5e-5), torch.tensor(1.0)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step(lr, scale)
    value = read_master(parameter.detach(), optimizer.state[parameter])
    return float(1 - value.mean()) / (steps * 2.5e-5), float(1 - parameter.detach().float().mean()) / (steps * 2.5e-5)


def test_plain_bf16_loses_updates_at_the_default_rate_and_the_others_do_not() -> None:
    assert distance_after("bf16") == (0.0, 0.0)
    for mode in ("fp32", "bf16_compensated", "fp32_master"):
        kept, used = distance_after(mode)
        assert kept == pytest.approx(1.0, abs=0.01)
        assert used == pytest.approx(1.0, abs=0.4)  # the weight itself is the kept value rounded to 8 bits


def test_compensated_and_master_agree_bit_by_bit_when_moments_do() -> None:
    """Both keep float32 values; only the rounding of moments tells them apart, and without decay there is none."""
    values = []
    for mode in ("bf16_compensated", "fp32_master"):
        parameter = torch.nn.Parameter(torch.linspace(-2, 2, 101).to(torch.bfloat16))
        optimizer = AdamW([("w", parameter)], betas=(0.0, 0.0), eps=1e-8, weight_decay=1e-2, mode=mode)
        for step in range(30):
            parameter.grad = torch.full_like(parameter, 0.5 if step % 3 else -0.25)
            optimizer.step(torch.tensor(1e-4), torch.tensor(1.0))
        values.append(read_master(parameter.detach(), optimizer.state[parameter]))
    assert torch.equal(values[0], values[1])
