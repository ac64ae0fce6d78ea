"""The one-pass optimizer step pinned to the reference step, in Triton's interpreter (no GPU needed)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from dm05_train.optim import clip_scale
from dm05_train.optim.adamw import AdamW
from dm05_train.perf.fused_adamw import FusedAdamW

OPTIONS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(3, 5), (33000,), (1,), (64, 32), (8,)]


def parameters(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    return [(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype))) for i, shape in enumerate(SHAPES)]


def assert_near(got: torch.Tensor, want: torch.Tensor, mode: str) -> None:
    """Equal to rounding. The interpreter truncates where the GPU rounds: up to a last bit of BF16 in each step."""
    tolerance = 1e-6 if mode == "fp32" else 3 * 2**-7
    assert float((got.float() - want.float()).abs().max()) <= tolerance * float(want.float().abs().max())


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16_compensated"])
def test_fused_steps_agree_with_the_reference(mode: str, blocks: int | None) -> None:
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    plain, fused = parameters(dtype), parameters(dtype)
    reference, fast = AdamW(plain, mode=mode, **OPTIONS), FusedAdamW(fused, mode=mode, **OPTIONS)  # type: ignore[arg-type]
    fast.blocks = blocks
    for step in range(3):
        for (_, a), (_, b) in zip(plain, fused, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        plain[4][1].grad = fused[4][1].grad = None
        lr = torch.tensor(1e-2)
        norm, scale = clip_scale([p for _, p in plain], 1.0)
        fast_norm, fast_scale = fast.clip_scale(1.0)
        torch.testing.assert_close(fast_norm, norm, rtol=1e-5, atol=0)
        torch.testing.assert_close(fast_scale, scale, rtol=1e-5, atol=0)
        if step == 1:
            scale = fast_scale = torch.tensor(float("nan"))
        reference.step(lr, scale)
        fast.step(lr, fast_scale)
        for (_, a), (_, b) in zip(plain, fused, strict=True):
            assert_near(b, a, mode)
            for key, value in reference.state[a].items():
                if key != "remainder":
                    assert_near(fast.state[b][key], value, mode)
        assert fast.steps == reference.steps


def test_a_gradient_that_is_not_finite_stops_the_step() -> None:
    fused = parameters(torch.bfloat16)
    fast = FusedAdamW(fused, mode="bf16", **OPTIONS)  # type: ignore[arg-type]
    before = [p.detach().clone() for _, p in fused]
    for _, p in fused:
        p.grad = torch.ones_like(p)
    fused[0][1].grad[0, 0] = float("inf")  # type: ignore[index]
    norm, scale = fast.clip_scale(1.0)
    fast.step(torch.tensor(1e-2), scale)
    assert not torch.isfinite(norm)
    assert all(torch.equal(p, old) for (_, p), old in zip(fused, before, strict=True))
    assert fast.steps == 0
