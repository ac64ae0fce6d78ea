"""The model against transformers' Gemma 3 and SigLIP modules, at other shapes than the golden one."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from dm05_train.model.dm05 import DM05
from dm05_train.model.layers import KeysValues
from dm05_train.model.weights import released_tensors
from dm05_train.perf.restructure import restructure
from gemma3_peer import Peer, written_mask
from peer_shapes import FULL, SHAPES, SLIDING, Shape, make_batch, make_model
from torch import Tensor

TOLERANCE = 2e-5


@dataclass
class Case:
    """One shape with its model, peer and batch, and what the peer makes of its prefix."""

    shape: Shape

    @cached_property
    def model(self) -> DM05:
        return make_model(self.shape, seed=1)

    @cached_property
    def peer(self) -> Peer:
        return Peer(self.shape, self.model.state_dict())

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        return make_batch(self.shape, seed=2)

    @cached_property
    def peer_prefix(self) -> list[KeysValues]:
        masks = {SLIDING: written_mask(self.batch, self.shape.window), FULL: written_mask(self.batch, math.inf)}
        with torch.no_grad():
            return self.peer.prefix(self.batch, masks)


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.name)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def difference(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def assert_same_prefix(case: Case, got: list[KeysValues], want: list[KeysValues]) -> None:
    """Keys and values of every layer agree where the token is no padding, and are finite where it is."""
    real = case.batch["attention_mask"].bool()
    assert len(got) == len(want) == len(case.shape.layer_types)
    for i, pairs in enumerate(zip(got, want, strict=True)):
        for name, ours, theirs in zip(("keys", "values"), *pairs, strict=True):
            assert bool(ours.isfinite().all()), (i, name)
            ours, theirs = (tensor.transpose(1, 2)[real] for tensor in (ours, theirs))
            assert difference(ours, theirs) <= TOLERANCE, (i, name)


@torch.no_grad()
def test_vision_tower_and_projector(case: Case) -> None:
    pixels = case.batch["pixel_values"]
    patches = case.model.vision(pixels)
    want = case.peer.vlm.vision_tower(pixels).last_hidden_state
    assert difference(patches, want) <= TOLERANCE
    assert difference(case.model.projector(patches), case.peer.vlm.multi_modal_projector(want)) <= TOLERANCE


@torch.no_grad()
def test_keys_and_values_of_every_language_layer(case: Case) -> None:
    assert_same_prefix(case, case.model._prefix_of(case.batch), case.peer_prefix)


# Some releases of transformers hide an image's own tokens behind a narrower window; this model never does.
@pytest.mark.parametrize("case", [s for s in SHAPES if s.window >= s.tokens], ids=lambda s: s.name, indirect=True)
@torch.no_grad()
def test_keys_and_values_under_the_masks_of_transformers(case: Case) -> None:
    assert_same_prefix(case, case.model._prefix_of(case.batch), case.peer.prefix(case.batch, None))


@torch.no_grad()
def test_time_condition_velocity_and_loss(case: Case) -> None:
    batch, model = case.batch, case.model
    time, noise, action, mask = (batch[name] for name in ("time", "noise", "action", "action_mask"))
    assert difference(model.time_condition(time), case.peer.time_condition(time)) <= TOLERANCE
    t = time[:, None, None]
    x_t = (t * noise + (1 - t) * action) * mask
    want = case.peer.velocity(case.peer_prefix, batch, x_t)
    assert difference(model.velocity(model._prefix_of(batch), batch["attention_mask"], x_t, time), want) <= TOLERANCE
    # Every sample has the same number of masked elements here, so the mean over all is the mean of means.
    loss = (want - (noise - action))[mask.bool()].square().mean()
    assert difference(model.loss(batch, noise, time), loss) <= TOLERANCE


def gradients(model: DM05, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    loss = model.loss(batch, batch["noise"], batch["time"])
    model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), dict(released_tensors(grads, model.packed))


def test_restructured_model_has_the_same_loss_and_gradients(case: Case) -> None:
    fast = copy.deepcopy(case.model)
    restructure(fast)
    (loss, grads), (want_loss, want) = gradients(fast, case.batch), gradients(case.model, case.batch)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert grads.keys() == want.keys()
    largest = max(float(g.abs().max()) for g in want.values())
    for name, grad in want.items():
        assert float((grads[name] - grad).abs().max()) <= 2e-5 * float(grad.abs().max()) + 1e-8 * largest, name
