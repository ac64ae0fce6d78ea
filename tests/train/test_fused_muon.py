"""Muon's fused passes pinned to the reference, in Triton's interpreter (no GPU needed)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from dm05_train.optim.muon import Muon
from dm05_train.optim.precision import Mode, read_master
from dm05_train.perf.fused_muon import FusedMuon

SHAPES = [(16, 24), (24, 16), (200, 100), (7, 9)]
SPLITS = {"w1": (8, 12, 4)}
LR = torch.tensor(0.02)


def parameters(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [(f"w{i}", nn.Parameter(torch.randn(shape).to(dtype))) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16_compensated", "fp32_master"])
def test_fused_passes_agree_with_the_reference(mode: Mode, nesterov: bool, batched: bool) -> None:
    """Steps with a clip, a skipped one, a missing gradient and one that is not contiguous."""
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    plain, fused = parameters(dtype), parameters(dtype)
    start = [p.detach().float().clone() for _, p in plain]
    options = {"weight_decay": 0.1, "nesterov": nesterov, "mode": mode, "batched": batched, "splits": SPLITS}
    reference, fast = Muon(plain, **options), FusedMuon(fused, **options)  # type: ignore[arg-type]
    for step, scale in enumerate([1.0, 0.25, float("inf"), 1.0]):
        for (_, a), (_, b) in zip(plain, fused, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        if step == 1:
            plain[0][1].grad = fused[0][1].grad = None
        if step == 3:
            fused[2][1].grad = fused[2][1].grad.T.contiguous().T  # type: ignore[union-attr]
        reference.step(LR, torch.tensor(scale))
        fast.step(LR, torch.tensor(scale))
    assert fast.steps == reference.steps == 3
    for (_, a), (_, b), before in zip(plain, fused, start, strict=True):
        x, y = reference.state[a], fast.state[b]
        # The interpreter truncates to BF16 where the GPU rounds: an error of one last bit a step.
        tolerance = 1e-6 if mode in ("fp32", "fp32_master") else 2**-5
        torch.testing.assert_close(y["momentum_buffer"], x["momentum_buffer"], rtol=tolerance, atol=tolerance * 0.1)
        old, new = read_master(a.detach(), x), read_master(b.detach(), y)
        if mode != "bf16":
            assert (new - old).norm() / (old - before).norm() < 0.05
        else:
            torch.testing.assert_close(b, a, rtol=2**-5, atol=1e-3)


def test_a_matrix_without_its_gradient_on_another_rank_stays() -> None:
    """``ready`` is per matrix: one that does not move keeps its bits, whatever its gradient holds."""
    named = parameters(torch.bfloat16)
    fast = FusedMuon(named, mode="bf16_compensated", splits=SPLITS)
    for _, p in named:
        p.grad = torch.full_like(p, float("nan"))
    before = [p.detach().clone() for _, p in named]
    ready = torch.zeros(len(fast.matrices), dtype=torch.bool)
    targets = [torch.full(m.shape, 7.0, dtype=torch.bfloat16) for m in fast.matrices]
    fast.direct(fast.matrices, ready, torch.tensor(1.0), targets)
    assert all((target == 0).all() for target in targets)  # the momentum so far
    fast.move(fast.matrices, ready, [torch.full_like(t, float("nan")) for t in targets], LR)
    assert all(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True))
