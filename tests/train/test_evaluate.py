"""``dm05-train eval``: what it measures is what it says, in the dataset's units, on the episodes that were held out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dm05_schemas.sample import denormalise
from dm05_schemas.workspace import Workspace
from dm05_train.config import DataConfig, ModelConfig, TrainerConfig
from dm05_train.data.dataset import held_out
from dm05_train.evaluate import EvalConfig, Setup, evaluate, predict, prepare, truth, usual
from training_runs import flags, run


@pytest.fixture(scope="module")
def trained(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a short run that kept two episodes out."""
    output = tmp_path_factory.mktemp("trained")
    done = run(flags(workspace, output, steps=3, save_at_end=True, data_config__val_episodes=2))
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def setup(workspace: Path, trained: Path) -> Setup:
    config = EvalConfig(
        workspace=workspace,
        trainer_config=TrainerConfig(output_dir=trained, dataloader_num_workers=0, per_device_train_batch_size=4),
        samples=10,
        sample_steps=4,
    )
    return prepare(config, Workspace(workspace))


def test_the_command_reports_on_held_out_episodes(workspace: Path, trained: Path) -> None:
    words = ["--workspace", workspace, "--trainer-config.output-dir", trained, "--samples", "6"]
    done = run(["eval", *map(str, words), "--trainer-config.dataloader-num-workers", "0"])
    assert done.returncode == 0, done.stderr
    assert "episodes    val, 6 samples" in done.stdout and "checkpoint-000003" in done.stdout
    report = json.loads((trained / "eval" / "eval.json").read_text())
    assert report["split"] == "val" and len(report["mean_absolute_error"]) == 7
    assert (trained / "eval" / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_held_out_follows_the_checkpoint(setup: Setup, workspace: Path) -> None:
    assert setup.config.data_config.val_episodes == 2 and setup.config.split == "val"
    every = setup.dataset.info.episodes
    assert set(setup.dataset.episodes) == held_out(every, 2)


def test_true_actions_are_the_targets_in_real_units(setup: Setup) -> None:
    """What the model is trained on, turned back, is the stored action wherever it was not clipped."""
    loader = setup.batches(size=8, start=0, shuffle=True)
    batch = next(loader)
    stats = setup.stats.action
    real = truth(setup, batch["sample_ids"].numpy())
    back = denormalise(batch["action"].numpy()[..., :7], stats.q01, stats.q99)
    inside = (real >= stats.q01) & (real <= stats.q99)
    assert inside.mean() > 0.8
    np.testing.assert_allclose(back[inside], real[inside], atol=1e-4)


def test_predictions_depend_on_the_sample_alone(setup: Setup) -> None:
    first = next(setup.batches(size=6, start=0, shuffle=False))
    later = next(setup.batches(size=3, start=3, shuffle=False))
    np.testing.assert_allclose(predict(setup, first)[3:], predict(setup, later), rtol=1e-4, atol=1e-5)


def test_the_report_adds_up(setup: Setup) -> None:
    report = evaluate(setup)
    again = evaluate(replace(setup, config=replace(setup.config, samples=10)))
    assert report.loss == again.loss and report.samples == 10
    assert (report.root_mean_square_error >= report.mean_absolute_error - 1e-6).all()
    assert report.ratio > 0


def test_relative_dims_get_their_state_back(setup: Setup) -> None:
    ids = np.array([0, 5])
    relative = replace(setup, relative_dims=(0, 1))
    states = np.stack([setup.dataset.stored(int(i))[0] for i in ids])
    moved = usual(relative, ids) - usual(setup, ids)
    np.testing.assert_allclose(moved[:, 0, :2], states[:, :2], rtol=1e-6)
    assert not moved[..., 2:].any()


def test_without_held_out_episodes_it_says_so(workspace: Path, tmp_path: Path) -> None:
    words = ["--workspace", workspace, "--trainer-config.output-dir", tmp_path, "--samples", "2", "--sample-steps", "1"]
    done = run(["eval", *map(str, words), "--trainer-config.dataloader-num-workers", "0"])
    assert done.returncode == 0, done.stderr
    assert "these were trained on" in done.stdout and str(workspace / "checkpoints" / "DM05") in done.stdout


def test_more_euler_steps_than_anyone_wants() -> None:
    done = run(["eval", "--sample-steps", "1000000000"])
    assert done.returncode == 2 and "--sample-steps" in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_checkpoint(tmp_path: Path, workspace: Path) -> None:
    words = ["--workspace", workspace, "--model-config.model-name-or-path", tmp_path / "none"]
    done = run(["eval", *map(str, words)])
    assert done.returncode == 1 and "no such folder" in done.stderr


def test_flags_of_a_training_run_are_taken(workspace: Path) -> None:
    config = EvalConfig(
        workspace=workspace,
        model_config=ModelConfig(model_name_or_path=workspace / "checkpoints" / "DM05", chunk_size=6),
        data_config=DataConfig(val_episodes=1, norm_stats_root=workspace / "stats6"),
        trainer_config=TrainerConfig(dataloader_num_workers=0),
    )
    setup = prepare(config, Workspace(workspace))
    assert truth(setup, np.array([0])).shape == (1, 6, 7)
