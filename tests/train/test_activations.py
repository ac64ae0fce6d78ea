"""The count of what a backward pass keeps is what autograd keeps in a real one, for the plain and the fast model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dm05_train.activations import BatchShape, activation_bytes
from dm05_train.build import empty_model
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import freeze_untrained
from dm05_train.perf.restructure import restructure
from golden_run import GOLDEN
from safetensors.torch import load_file

FULL = Path(__file__).parent.parent / "golden" / "dm05_config.json"


def model(config: Path, device: str, dtype: torch.dtype = torch.float32) -> DM05:
    """The golden model, or the full one with a few of its layers."""
    settings = DM05Config.from_json(config)
    if config == FULL:
        towers = {
            name: replace(getattr(settings, name), num_layers=6, layer_types=getattr(settings, name).layer_types[:6])
            for name in ("text", "expert")
        }
        settings = replace(settings, vision=replace(settings.vision, num_layers=4), **towers)
    built = empty_model(settings, torch.device(device), dtype)
    freeze_untrained(built)
    return built


def test_the_count_is_what_autograd_keeps() -> None:
    """Against a real forward pass on the CPU, whose attention keeps the same: q, k, v, out, log-sum."""
    golden = load_file(GOLDEN / "batch.safetensors")
    shape = BatchShape(batch=3, cameras=2, prefix=golden["input_ids"].shape[1], chunk=10)
    real = model(GOLDEN, "cpu")
    mine = {p.untyped_storage().data_ptr() for p in real.parameters()}
    held: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        real.loss(golden, golden["noise"], golden["time"])
    assert activation_bytes(model(GOLDEN, "meta"), shape) == pytest.approx(sum(held.values()), rel=0.15)


def test_the_fast_model_keeps_less_and_the_count_leaves_no_trace() -> None:
    shape = BatchShape(batch=2, cameras=2, prefix=576, chunk=10)
    plain = model(FULL, "meta", torch.bfloat16)
    fast = model(FULL, "meta", torch.bfloat16)
    restructure(fast)
    merge = plain.merge_images
    assert activation_bytes(fast, shape) < 0.8 * activation_bytes(plain, shape)
    assert plain.merge_images == merge and not plain.language.checkpointing
    from dm05_train.perf.ops import common, rms

    assert rms.use_kernels is common.use_kernels and not rms.use_kernels(torch.ones(1))


@pytest.mark.parametrize("fast", [False, True])
def test_checkpointing_keeps_inputs_and_one_layer(fast: bool) -> None:
    shape = BatchShape(batch=1, cameras=2, prefix=576, chunk=10)
    built = model(FULL, "meta", torch.bfloat16)
    if fast:
        restructure(built)
    everything = activation_bytes(built, shape)
    checkpointed, half = (activation_bytes(built, shape, checkpointing=every) for every in (1, 2))
    assert everything / 10 < checkpointed < everything / 1.5
    assert half == pytest.approx((everything + checkpointed) / 2, rel=0.1)
