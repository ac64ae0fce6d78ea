"""The accelerated model pinned to the plain one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import load_weights, released_tensors, state_for_saving
from dm05_train.perf.merge import remove_syncs
from dm05_train.perf.restructure import restructure

TINY = Path(__file__).parent.parent / "golden" / "tiny_dm05"


def gradients(model: DM05, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model.loss(batch, batch["noise"], batch["time"])
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), dict(released_tensors(grads, model.packed))


def test_restructured_model_has_the_same_loss_and_gradients(model: DM05, batch: dict[str, torch.Tensor]) -> None:
    fast = copy.deepcopy(model)
    restructure(fast)
    loss, grads = gradients(fast, batch)
    want_loss, want = gradients(model, batch)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert grads.keys() == want.keys()
    largest = max(float(g.abs().max()) for g in want.values())
    for name, grad in want.items():
        assert float((grads[name] - grad).abs().max()) <= 2e-5 * float(grad.abs().max()) + 1e-8 * largest, name


def test_restructured_model_saves_the_released_tensors(model: DM05) -> None:
    fast = copy.deepcopy(model)
    restructure(fast)
    want, got = state_for_saving(model), state_for_saving(fast)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_restructured_model_loads_the_released_tensors(model: DM05) -> None:
    fast = DM05(model.config)
    restructure(fast)
    load_weights(fast, TINY)
    want, got = state_for_saving(model), state_for_saving(fast)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_restructured_model_samples_the_same(model: DM05, batch: dict[str, torch.Tensor]) -> None:
    fast = copy.deepcopy(model)
    restructure(fast)
    got, want = (m.sample(batch, batch["noise"], steps=3) for m in (fast, model))
    assert float((got - want).abs().max() / want.abs().max()) <= 2e-5


def test_images_merge_on_the_device_as_on_the_host(model: DM05, batch: dict[str, torch.Tensor]) -> None:
    fast = copy.deepcopy(model)
    remove_syncs(fast)
    (loss, grads), (want_loss, want) = gradients(fast, batch), gradients(model, batch)
    assert loss == want_loss
    assert all(torch.equal(grads[name], want[name]) for name in want)
