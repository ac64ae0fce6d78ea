"""The memory estimate: counted from the model, moved by what moves memory, and able to say what would fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dm05_train.build import empty_model
from dm05_train.memory import GIB, Memory, Shape, activation_bytes, advice, estimate, merge_images
from dm05_train.model.config import DM05Config
from dm05_train.model.weights import freeze_untrained
from dm05_train.perf.switches import Switches
from golden_run import GOLDEN
from safetensors.torch import load_file
from training_runs import run

FULL = Path(__file__).parent.parent / "golden" / "dm05_config.json"


@pytest.fixture(scope="module")
def full() -> DM05Config:
    return DM05Config.from_json(FULL)


SHAPE = Shape(batch=2, cameras=2, prefix=576, chunk=10, mode="bf16")


def test_parameters_are_counted(full: DM05Config) -> None:
    """Released weights: 11,658,431,136 bytes of file hold the embedding twice; the model holds it once."""
    need = estimate(full, SHAPE)
    assert need.weights == pytest.approx(11_658_431_136 - 2 * 262_208 * 2560, rel=1e-4)
    assert 4.3e9 < need.optimizer / 4 < 4.5e9  # two BF16 moments of all but the embedding and what feeds nothing
    assert estimate(full, replace(SHAPE, mode="bf16_compensated")).optimizer == pytest.approx(1.5 * need.optimizer)
    assert estimate(full, replace(SHAPE, mode="fp32_master")).optimizer == pytest.approx(3 * need.optimizer)


def test_activations_grow_with_batch_and_length_and_shrink_with_checkpointing(full: DM05Config) -> None:
    need = estimate(full, SHAPE).activations
    assert estimate(full, replace(SHAPE, batch=4)).activations == pytest.approx(2 * need, rel=0.02)
    assert estimate(full, replace(SHAPE, prefix=1024)).activations > 1.2 * need
    assert estimate(full, replace(SHAPE, checkpointing=True)).activations < 0.3 * need


def test_shards_divide_what_is_sharded(full: DM05Config) -> None:
    whole = estimate(full, replace(SHAPE, gpus=8))
    shards = estimate(full, replace(SHAPE, gpus=8, parallel="fsdp"))
    assert shards.optimizer == pytest.approx(whole.optimizer / 8)
    assert shards.total < 0.6 * whole.total


def test_the_count_is_what_autograd_keeps() -> None:
    """Against a real forward pass on the CPU, whose attention keeps the same: q, k, v, out, log-sum."""
    config = DM05Config.from_json(GOLDEN)
    golden = load_file(GOLDEN / "batch.safetensors")
    shape = Shape(batch=3, cameras=2, prefix=golden["input_ids"].shape[1], chunk=10, mode="fp32")
    meta = empty_model(config, torch.device("meta"), torch.float32)
    freeze_untrained(meta)
    meta.merge_images = merge_images  # type: ignore[method-assign]
    counted = activation_bytes(meta, shape)
    model = empty_model(config, torch.device("cpu"), torch.float32)
    freeze_untrained(model)
    held: dict[int, int] = {}
    alive = []
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model.loss(golden, golden["noise"], golden["time"])
    assert counted == pytest.approx(sum(held.values()), rel=0.15)


def test_advice_is_computed(full: DM05Config) -> None:
    lines = advice(full, replace(SHAPE, batch=8, prefix=1024), Switches())
    assert lines[0].startswith(
        "PER_DEVICE_BATCH=4 --trainer-config.gradient-accumulation-steps 2 (same global batch): "
    )
    now = estimate(full, replace(SHAPE, batch=8, prefix=1024)).total / GIB
    assert all(float(line.split()[-2]) < now for line in lines)
    on = advice(full, SHAPE, Switches(enable=True))
    assert any("DM05_PERF_R18_CUDA_GRAPH=0" in line for line in on)
    several = advice(full, replace(SHAPE, gpus=4), Switches())
    assert any("--trainer-config.parallel fsdp" in line for line in several)


def test_parts_add_up() -> None:
    assert Memory(weights=1, gradients=2, optimizer=3, activations=4, rest=5).total == 15


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(FULL.read_text())
    words = ["--model-config.model-name-or-path", str(tmp_path), "--workspace", str(tmp_path), "--gpu-gib", "24"]
    done = run(["memory", *words], PER_DEVICE_BATCH="8")
    assert done.returncode == 0, done.stderr
    assert "does not fit a GPU of 24 GiB" in done.stdout and "PER_DEVICE_BATCH=4" in done.stdout
    done = run(["memory", "--workspace", str(tmp_path)])
    assert done.returncode == 1 and "dm05-prep model" in done.stderr
