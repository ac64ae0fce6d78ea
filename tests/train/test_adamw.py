"""AdamW agrees with torch's, with the golden curve, and does nothing at all in a skipped step."""

from __future__ import annotations

import pytest
import torch
from dm05_train.optim import clip_scale
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.precision import Mode
from golden_run import GOLDEN, config, golden_run
from safetensors.torch import load_file


def test_golden_curve() -> None:
    """Five steps of the golden batch with its own noise and times."""
    batch, expected = load_file(GOLDEN / "batch.safetensors"), load_file(GOLDEN / "expected.safetensors")
    run = golden_run(config(batch=3))
    curve = []
    for _ in range(5):
        loss = run.model(batch, batch["noise"], batch["time"])
        loss.backward()
        _, scale = run.optimizer.clip_scale(1.0)
        run.optimizer.step(torch.tensor(1e-3), scale)
        for parameter in run.parameters:
            parameter.grad = None
        curve.append(loss.detach())
    torch.testing.assert_close(torch.stack(curve), expected["adamw_loss_curve"], rtol=2e-5, atol=0)


def test_agrees_with_torch() -> None:
    torch.manual_seed(0)
    mine = [torch.nn.Parameter(torch.randn(5, 7)), torch.nn.Parameter(torch.randn(3))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    optimizer = AdamW(
        [(str(i), p) for i, p in enumerate(mine)], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, mode="fp32"
    )
    peer = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for _ in range(20):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        _, scale = clip_scale(mine, 1.0)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step(torch.tensor(1e-2), scale)
        peer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16_compensated", "fp32_master"])
@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_a_skipped_step_changes_nothing(mode: Mode, scale: float) -> None:
    dtype = torch.float32 if mode == "fp32" else torch.bfloat16
    parameter = torch.nn.Parameter(torch.randn(9, dtype=torch.float32).to(dtype))
    optimizer = AdamW([("w", parameter)], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, mode=mode)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step(torch.tensor(1e-2), torch.tensor(1.0))
    before = [parameter.detach().clone(), *(t.clone() for t in optimizer.state[parameter].values())]
    parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step(torch.tensor(1e-2), torch.tensor(scale))
    after = [parameter.detach(), *optimizer.state[parameter].values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.steps.item() == 1


def test_norm_that_is_not_finite_gives_scale_zero() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    norm, scale = clip_scale(parameters, 1.0)
    assert norm.item() == 5.0 and scale.item() == pytest.approx(0.2, rel=1e-5)
    parameters[0].grad = torch.tensor([float("inf"), 0.0])
    assert clip_scale(parameters, 1.0)[1].item() == 0.0
