"""The memory estimate: counted from the model, moved by what moves memory, and able to say what would fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from dm05_train.memory import GIB, Memory, Shape, advice, checkpoints_line, estimate, snapshot_bytes
from dm05_train.model.config import DM05Config
from dm05_train.optim.precision import Mode
from dm05_train.optim.state import state_tensors
from dm05_train.perf.switches import Switches
from golden_run import config as golden_settings
from golden_run import golden_run
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
    half, least = (estimate(short, replace(SHAPE, checkpointing=every)).activations for every in (2, 1))
    assert least < 0.5 * need and least < half < 0.8 * need
    fast = replace(SHAPE, trimmed=True)
    need, fp8 = (estimate(short, shape).activations for shape in (fast, replace(fast, fp8=True)))
    assert need < 0.8 * estimate(short, SHAPE).activations
    text = short.text
    weights = 3 * text.hidden_size * text.intermediate_size * (text.num_layers - 1)
    assert fp8 == pytest.approx(need + weights, rel=0.02)  # eight bits of each weight


def test_shards_divide_what_is_sharded(short: DM05Config) -> None:
    whole = estimate(short, replace(SHAPE, gpus=8))
    shards = estimate(short, replace(SHAPE, gpus=8, parallel="fsdp"))
    assert shards.optimizer == pytest.approx(whole.optimizer / 8)
    assert whole.gradients == pytest.approx(2 * 8 * shards.gradients)  # DDP's buckets
    assert shards.total < 0.8 * whole.total


def test_advice_is_computed(short: DM05Config) -> None:
    """Every line states what it would need, and that is less than now."""
    several = replace(SHAPE, batch=8, prefix=1024, gpus=4)
    lines = advice(short, several, Switches())
    assert lines[0].startswith(
        "PER_DEVICE_BATCH=4 --trainer-config.gradient-accumulation-steps 2 (same global batch): "
    )
    assert len(lines) == 5 and "--trainer-config.parallel fsdp: " in lines[4]
    now = estimate(short, several).total / GIB
    assert all(float(line.split()[-2]) < now for line in lines)
    on = replace(SHAPE, batch=1, trimmed=True, graphs=True)
    assert advice(short, on, Switches(enable=True))[-1].startswith("DM05_PERF_R18_CUDA_GRAPH=0")
    assert not any("R18" in line for line in advice(short, replace(on, graphs=False), Switches(enable=True)))


def test_graphs_hold_the_batch_once_more(short: DM05Config) -> None:
    pixels = 4 * 2 * 2 * 3 * 448 * 448
    assert estimate(short, SHAPE).graphs == 0
    assert estimate(short, replace(SHAPE, graphs=True)).graphs == pytest.approx(pixels, rel=0.02)


def test_a_snapshot_is_weights_and_state_once_more(short: DM05Config) -> None:
    """As large as what a run of the golden model copies; shared by the GPUs of a machine, and on the host of shards."""
    alone = replace(SHAPE, mode="bf16_compensated")
    need, copy = estimate(short, alone), snapshot_bytes(short, alone)
    assert copy == need.weights + need.optimizer
    assert snapshot_bytes(short, replace(alone, gpus=2)) == max(copy / 2, need.weights)
    assert snapshot_bytes(short, replace(alone, gpus=8)) == need.weights
    assert snapshot_bytes(short, replace(alone, gpus=8, parallel="fsdp")) == 0
    run = golden_run(golden_settings(batch=3))
    tensors = [*run.model.parameters(), *state_tensors(run.optimizer).values()]
    golden = replace(SHAPE, mode=run.precision)
    copied = sum(t.numel() * t.element_size() for t in tensors)
    assert snapshot_bytes(run.model.config, golden) == pytest.approx(copied, abs=64)  # counters beside the tensors


def test_where_a_checkpoint_is_copied_to() -> None:
    need = Memory(weights=1, gradients=0, optimizer=0, activations=0, graphs=0, rest=9 * GIB)
    assert "copied on the GPU, 4.00 GiB more" in checkpoints_line(4 * GIB, need, 17.0)
    assert "page-locked memory of the host, 4.00 GiB there" in checkpoints_line(4 * GIB, need, 15.0)
    assert "where a GPU has 16.0 GiB in all; else" in checkpoints_line(4 * GIB, need, None)
    assert "gathered on the host" in checkpoints_line(0.0, need, 15.0)


def test_parts_add_up() -> None:
    assert Memory(weights=1, gradients=2, optimizer=3, activations=4, graphs=6, rest=5).total == 21


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
    assert "checkpoints: copied to page-locked memory of the host" in done.stdout


def test_before_the_weights_are_there_it_is_the_released_model(tmp_path: Path) -> None:
    words = ["memory", "--gpu-gib", "48"]
    done = run([*words, "--workspace", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    said, *numbers = done.stdout.splitlines()
    assert said == f"{tmp_path}/checkpoints/DM05 holds no checkpoint yet: these are the numbers of the released model"
    golden = ["--model-config.model-name-or-path", str(FULL), "--workspace", str(tmp_path)]
    assert run([*words, *golden]).stdout.splitlines() == numbers
    none = ["--model-config.model-name-or-path", str(tmp_path / "none"), "--workspace", str(tmp_path)]
    done = run([*words, *none])
    assert done.returncode == 1 and f"dm05-prep model --workspace {tmp_path}, or name" in done.stderr
