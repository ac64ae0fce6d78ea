"""Whole runs of ``dm05-train`` on a real dataset: what they write, how they go on, what they say when they cannot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from dm05_train.train import is_out_of_memory
from training_runs import finish, flags, losses, rows, run, start

SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def unbroken(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of 6 steps with a checkpoint every 2, nothing going wrong."""
    output = tmp_path_factory.mktemp("unbroken") / "outputs"
    done = run(flags(workspace, output, **SAVING))
    assert done.returncode == 0, done.stderr
    return output


def test_a_run_writes_metrics_and_checkpoints(unbroken: Path) -> None:
    found = rows(unbroken)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["samples"] for row in found] == [2, 4, 6, 8, 10, 12]
    assert all(0 < row["loss"] < 5 and row["grad_norm"] > 0 for row in found)
    assert sorted(path.name for path in unbroken.glob("checkpoint-*")) == [f"checkpoint-00000{n}" for n in (2, 4, 6)]
    assert not list(unbroken.glob(".*"))
    assert {path.name for path in (unbroken / "checkpoint-000006").iterdir()} >= {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "norm_stats",
        "training",
    }


def test_the_start_says_what_is_run(workspace: Path, tmp_path: Path) -> None:
    done = run(flags(workspace, tmp_path, steps=1, gradient_accumulation_steps=3), PER_DEVICE_BATCH="5")
    assert done.returncode == 0, done.stderr
    assert "starting anew from released weights" in done.stdout
    assert "global batch  6 = 1 machines x 1 GPUs x 2 a GPU x 3 accumulated" in done.stdout
    assert "PER_DEVICE_BATCH=5" in done.stdout and "parameters" in done.stdout and "memory" in done.stdout
    assert "step 1/1  loss" in done.stdout
    assert "nothing was saved (--trainer-config.save-at-end" in done.stdout.splitlines()[-1]


def test_memory_that_runs_out_is_known_as_such() -> None:
    """A real refusal of each allocator; an error of another kind is none."""
    for allocate in (lambda: torch.empty(2**50, dtype=torch.uint8), lambda: np.empty(2**50, dtype=np.uint8)):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))


def test_an_unknown_switch_is_one_line(workspace: Path, tmp_path: Path) -> None:
    done = finish(start(flags(workspace, tmp_path, steps=1), DM05_PERF_R18="1"))
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "dm05-train: warning: DM05_PERF_R18 is not a switch of dm05-train and does nothing; "
        "did you mean DM05_PERF_R18_CUDA_GRAPH?"
    ]


def test_another_split_cannot_be_continued(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    path = unbroken / "checkpoint-000002"
    done = run(flags(workspace, tmp_path, model_config__model_name_or_path=path, data_config__val_episodes=1))
    fails(done, "samples an epoch", "--data-config.val-episodes", "resume never")


def test_resumed_to_the_bit(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    """A checkpoint given by name continues optimizer, schedule and data; the rows after it are written again."""
    output = shutil.copytree(unbroken, tmp_path / "outputs")
    done = run(flags(workspace, output, model_config__model_name_or_path=output / "checkpoint-000002", **SAVING))
    assert done.returncode == 0, done.stderr
    assert "continuing from" in done.stdout and "2 steps and 4 samples done" in done.stdout
    assert losses(output) == losses(unbroken)
    for name in ("model.safetensors", "training/optimizer-00000-of-00001.safetensors"):
        again, first = ((folder / "checkpoint-000006" / name).read_bytes() for folder in (output, unbroken))
        assert again == first


def test_weights_of_a_checkpoint_alone_start_anew(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    path = unbroken / "checkpoint-000002"
    done = run(flags(workspace, tmp_path, steps=1, model_config__model_name_or_path=path, resume="never"))
    assert done.returncode == 0, done.stderr
    assert "starting anew from the weights of a checkpoint" in done.stdout
    assert [row["step"] for row in rows(tmp_path)] == [1]
    assert losses(tmp_path)[0] != losses(unbroken)[2]


def test_another_batch_size_goes_on_at_the_same_sample(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    path = unbroken / "checkpoint-000004"
    more = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    done = run(flags(workspace, tmp_path, model_config__model_name_or_path=path, **more))
    assert done.returncode == 0, done.stderr
    for (_, loss, norm), (_, other, other_norm) in zip(losses(tmp_path), losses(unbroken)[4:], strict=True):
        assert loss == pytest.approx(other, rel=1e-5) and norm == pytest.approx(other_norm, rel=1e-4)


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_is_the_same_curve(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    """kill -9 again and again; the same command with `resume latest` ends with the uninterrupted curve to the bit."""
    command = flags(workspace, tmp_path, resume="latest", **SAVING)
    for delay in (0.0, 0.2, 0.5):
        process = start(command)
        while (
            process.poll() is None
            and not list(tmp_path.glob("checkpoint-*"))
            and not (tmp_path / "metrics.jsonl").exists()
        ):
            time.sleep(0.05)
        time.sleep(delay)
        process.kill()
        process.communicate()
    assert run(command).returncode == 0
    assert losses(tmp_path) == losses(unbroken)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_told_to_stop_saves_and_ends_well(workspace: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(flags(workspace, tmp_path, steps=500))
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()) and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "told to stop: saved after step" in out
    state = json.loads(next(tmp_path.glob("checkpoint-*/training/state.json")).read_text())
    assert state["step"] == rows(tmp_path)[-1]["step"]


def test_rotation_keeps_the_newest(workspace: Path, tmp_path: Path) -> None:
    done = run(flags(workspace, tmp_path, steps=4, save_strategy="steps", save_steps=1, save_total_limit=2))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*check*")) == ["checkpoint-000003", "checkpoint-000004"]


def fails(done: subprocess.CompletedProcess[str], *words: str, code: int = 1) -> None:
    """One line, this exit code, these words."""
    assert done.returncode == code, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dm05-train: error: ") and "Traceback" not in done.stderr
    for word in words:
        assert word in last


def test_no_weights(workspace: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no-such"
    done = run(flags(workspace, tmp_path / "out", model_config__model_name_or_path=missing))
    fails(done, str(missing), "no such folder", "dm05-prep model")
    assert not (tmp_path / "out").exists()


def test_unknown_dataset(workspace: Path, tmp_path: Path) -> None:
    done = run(flags(workspace, tmp_path, data_config__dataset_name="libero_pi0_al"))
    fails(done, "libero_pi0_all")


def test_a_checkpoint_that_was_cut_short(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(unbroken / "checkpoint-000004", tmp_path / "checkpoint-000004")
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    done = run(flags(workspace, tmp_path / "out", model_config__model_name_or_path=broken))
    fails(done, "model.safetensors", "cut to 1000 of")


DAMAGED = {
    "config.json": "config.json: cannot read the model's configuration",
    "training/rng.safetensors": "rng.safetensors: damaged",
    "training/optimizer-00000-of-00001.safetensors": "of-00001.safetensors: damaged",
    "model.safetensors": "is not a safetensors file",
}


@pytest.mark.parametrize("name", list(DAMAGED))
def test_a_checkpoint_damaged_at_its_right_size(workspace: Path, unbroken: Path, tmp_path: Path, name: str) -> None:
    broken = shutil.copytree(unbroken / "checkpoint-000004", tmp_path / "checkpoint-000004")
    (broken / name).write_bytes(bytes((broken / name).stat().st_size))
    done = run(flags(workspace, tmp_path / "out", model_config__model_name_or_path=broken))
    fails(done, str(broken), DAMAGED[name])
    assert "bug" not in done.stderr


def test_latest_passes_over_an_incomplete_one(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    output = shutil.copytree(unbroken, tmp_path / "outputs")
    (output / "checkpoint-000006" / "training" / "state.json").unlink()
    done = run(flags(workspace, output, resume="latest"))
    assert done.returncode == 0 and "checkpoint-000004: 4 steps" in done.stdout
    assert losses(output) == losses(unbroken)


def test_weights_of_another_model(workspace: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(workspace / "checkpoints" / "DM05", tmp_path / "DM05")
    settings = json.loads((folder / "config.json").read_text())
    settings["action_dim"] = 16
    (folder / "config.json").write_text(json.dumps(settings))
    done = run(flags(workspace, tmp_path / "out", model_config__model_name_or_path=folder))
    fails(done, "of another shape", "action_in_proj")


def test_no_room_for_a_checkpoint(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    """It ends the run soon, the last good one stays and is named, and nothing half written is left."""
    output = shutil.copytree(unbroken, tmp_path / "outputs")
    (output / "checkpoint-000006").rename(output / ".checkpoint-000006.left-by-kill-9")
    process = start(
        flags(workspace, output, steps=9000, save_strategy="steps", save_steps=6, resume="latest"), file_kb=1000
    )
    fails(
        finish(process), "cannot write a checkpoint: File too large", "The last good checkpoint is", "checkpoint-000004"
    )
    assert sorted(p.name for p in output.glob("*check*")) == ["checkpoint-000002", "checkpoint-000004"]


def test_three_steps_without_finite_gradients(workspace: Path, tmp_path: Path) -> None:
    done = run(flags(workspace, tmp_path, steps=9, optimizer_config__base_lr=1e30, save_strategy="steps", save_steps=1))
    fails(done, "3 steps in a row", "The last good checkpoint is", "base-lr")
    skipped = [row for row in rows(tmp_path) if row.get("skipped")]
    assert len(skipped) == 3 and all(len(row["sample_ids"]) == 2 and row["grad_norm"] is None for row in skipped)
