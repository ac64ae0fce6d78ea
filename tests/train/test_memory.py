"""The memory estimate: counted from the model, moved by what moves memory, and able to say what would fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dm05_train.memory import GIB, Memory, Shape, advice, estimate
from dm05_train.model.config import DM05Config
from dm05_train.optim.precision import Mode
from dm05_train.perf.switches import Switches
from training_runs import run

MODES: tuple[Mode, ...] = ("bf16", "bf16_compensated", "fp32_master")
FULL = Path(__file__).parent.parent / "golden" / "dm05_config.json"


@pytest.fixture(scope="module")
def full() -> DM05Config:
    return DM05Config.from_json(FULL)


@pytest.fixture(scope="module")
def short(full: DM05Config) -> DM05Config:
    """The full model with a few of its layers, which is counted sooner."""
    towers = {
        name: replace(getattr(full, name), num_layers=6, layer_types=getattr(full, name).layer_types[:6])
        for name in ("text", "expert")
    }
    return replace(full, vision=replace(full.vision, num_layers=4), **towers)


SHAPE = Shape(batch=2, cameras=2, prefix=576, chunk=10, mode="bf16")


def test_parameters_are_counted(full: DM05Config, short: DM05Config) -> None:
    """Released weights: 11,658,431,136 bytes of file hold the embedding twice; the model holds it once."""
    need = estimate(full, SHAPE)
    assert need.weights == pytest.approx(11_658_431_136 - 2 * 262_208 * 2560, rel=1e-4)
    assert 4.3e9 < need.optimizer / 4 < 4.5e9  # two BF16 moments of all but the embedding and what feeds nothing
    plain, kept, master = (estimate(short, replace(SHAPE, mode=mode)).optimizer for mode in MODES)
    assert kept == pytest.approx(1.5 * plain) and master == pytest.approx(3 * plain)


def test_activations_grow_with_batch_and_length_and_shrink_with_checkpointing(short: DM05Config) -> None:
    need = estimate(short, SHAPE).activations
    assert estimate(short, replace(SHAPE, batch=4)).activations == pytest.approx(2 * need, rel=0.02)
    assert estimate(short, replace(SHAPE, prefix=1024)).activations > 1.2 * need
    assert estimate(short, replace(SHAPE, checkpointing=True)).activations < 0.5 * need
    assert estimate(short, replace(SHAPE, trimmed=True)).activations < 0.8 * need


def test_shards_divide_what_is_sharded(short: DM05Config) -> None:
    whole = estimate(short, replace(SHAPE, gpus=8))
    shards = estimate(short, replace(SHAPE, gpus=8, parallel="fsdp"))
    assert shards.optimizer == pytest.approx(whole.optimizer / 8)
    assert shards.total < 0.8 * whole.total


def test_advice_is_computed(short: DM05Config) -> None:
    """Every line states what it would need, and that is less than now."""
    several = replace(SHAPE, batch=8, prefix=1024, gpus=4)
    lines = advice(short, several, Switches())
    assert lines[0].startswith(
        "PER_DEVICE_BATCH=4 --trainer-config.gradient-accumulation-steps 2 (same global batch): "
    )
    assert len(lines) == 4 and "--trainer-config.parallel fsdp: " in lines[3]
    now = estimate(short, several).total / GIB
    assert all(float(line.split()[-2]) < now for line in lines)
    on = advice(short, replace(SHAPE, batch=1, trimmed=True), Switches(enable=True))
    assert "DM05_PERF_R18_CUDA_GRAPH=0" in on[-1]


def test_parts_add_up() -> None:
    assert Memory(weights=1, gradients=2, optimizer=3, activations=4, rest=5).total == 15


@pytest.mark.parametrize("wrong", ["--gpus 0", "--gpu-gib nan", "--gpu-gib -4"])
def test_numbers_that_cannot_be_are_refused(wrong: str) -> None:
    done = run(["memory", *wrong.split()])
    assert done.returncode == 2 and wrong.split()[0] in done.stderr and done.stderr.count("\n") == 1


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(FULL.read_text())
    words = ["--model-config.model-name-or-path", str(tmp_path), "--workspace", str(tmp_path), "--gpu-gib", "24"]
    done = run(["memory", *words], PER_DEVICE_BATCH="8")
    assert done.returncode == 0, done.stderr
    assert "does not fit a GPU of 24 GiB" in done.stdout and "PER_DEVICE_BATCH=4" in done.stdout
    done = run(["memory", "--workspace", str(tmp_path)])
    assert done.returncode == 1 and "dm05-prep model" in done.stderr
