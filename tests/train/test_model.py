"""The model against the golden numbers of a tiny DM05, and its names against the released ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dm05_train.checkpoint import write_tensors
from dm05_train.errors import TrainError
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import (
    EMBEDDING,
    LM_HEAD,
    dead_parameters,
    freeze_untrained,
    load_weights,
    state_for_saving,
)
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent.parent / "golden"
TINY = GOLDEN / "tiny_dm05"
TOLERANCE = 2e-5


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(TINY / "expected.safetensors")


def test_every_released_tensor_is_created_and_nothing_else() -> None:
    golden = json.loads((GOLDEN / "checkpoint_tensors.json").read_text())["tensors"]
    with torch.device("meta"):
        model = DM05(DM05Config.from_json(GOLDEN / "dm05_config.json"))
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    shapes[LM_HEAD] = shapes[EMBEDDING]
    assert shapes == golden
    assert not list(model.buffers())


def test_forward_agrees_with_golden(model: DM05, batch: dict, expected: dict) -> None:
    with torch.no_grad():
        prefix = model._prefix_of(batch)
        t = batch["time"][:, None, None]
        x_t = (t * batch["noise"] + (1 - t) * batch["action"]) * batch["action_mask"]
        got = {
            "x_t": x_t,
            "time_condition": model.time_condition(batch["time"]),
            "velocity": model.velocity(prefix, batch["attention_mask"], x_t, batch["time"]),
            "loss": model.loss(batch, batch["noise"], batch["time"])[None],
            "sampled_action_10_steps": model.sample(batch, batch["noise"], steps=10),
        }
        for layer in (0, 5, 6):
            got[f"prefix_key.{layer}"], got[f"prefix_value.{layer}"] = prefix[layer]
    for name, tensor in got.items():
        assert difference(tensor, expected[name]) <= TOLERANCE, name
    assert set(got) == set(expected) - {"adamw_loss_curve"}


def test_gradients_agree_with_golden(model: DM05, batch: dict) -> None:
    golden = json.loads((TINY / "grads.json").read_text())
    model.loss(batch, batch["noise"], batch["time"]).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == set(golden["no_grad"]) == dead_parameters(model.config)
    norms = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    assert norms.keys() == golden["grad_norms"].keys()
    for name, want in golden["grad_norms"].items():
        if "vision_tower" in name and name.endswith("k_proj.bias"):
            continue  # zero in exact arithmetic
        assert norms[name] == pytest.approx(want, rel=TOLERANCE), name


def test_adamw_curve_agrees_with_golden(model: DM05, batch: dict, expected: dict) -> None:
    freeze_untrained(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=1e-10)
    losses = []
    for _ in range(5):
        loss = model.loss(batch, batch["noise"], batch["time"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert difference(torch.tensor(losses), expected["adamw_loss_curve"]) <= TOLERANCE


def test_checkpointing_changes_nothing(model: DM05, batch: dict) -> None:
    grads = []
    for every in (0, 1, 2):
        model.set_checkpointing(every)
        model.zero_grad()
        model.loss(batch, batch["noise"], batch["time"]).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert all(torch.equal(grads[0][name], other[name]) for other in grads[1:] for name in grads[0])


def test_weights_make_the_round_trip(model: DM05, tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", state_for_saving(model), {LM_HEAD: EMBEDDING})
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(TINY / "model.safetensors")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)


def test_a_checkpoint_of_another_model_is_named(model: DM05, tmp_path: Path) -> None:
    tensors = state_for_saving(model)
    first = tensors.pop("model.action_in_proj.bias")
    tensors["model.stranger"] = first
    tensors["model.time_mlp_in.bias"] = torch.zeros(3)
    write_tensors(tmp_path / "model.safetensors", tensors, {LM_HEAD: EMBEDDING})
    with pytest.raises(
        TrainError, match=r"1 missing \(model.action_in_proj.bias\); 1 unknown \(model.stranger\); 1 of another"
    ):
        load_weights(model, tmp_path)


def test_a_missing_image_is_refused(model: DM05, batch: dict) -> None:
    with pytest.raises(TrainError, match="image tokens"):
        model.loss({**batch, "pixel_values": batch["pixel_values"][:-1]}, batch["noise"], batch["time"])
