"""Where a run starts: a new one or a continued one, by what the folders hold and the flags say."""

from __future__ import annotations

from pathlib import Path

import pytest
from dm05_schemas.workspace import Workspace
from dm05_train.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig
from dm05_train.errors import TrainError
from dm05_train.start import absolute, find_start, new_run_name, output_folder
from golden_run import GOLDEN
from test_checkpoint import make


def settings(path: Path | None, output: Path, resume: str = "path", **more: object) -> TrainConfig:
    return TrainConfig(
        data_config=DataConfig(dataset_name="d"),
        model_config=ModelConfig(model_name_or_path=path),
        optimizer_config=OptimizerConfig(**more),  # type: ignore[arg-type]
        trainer_config=TrainerConfig(output_dir=output, resume=resume, seed=1),  # type: ignore[arg-type]
    )


def test_released_weights_start_anew(tmp_path: Path) -> None:
    start = find_start(settings(GOLDEN, tmp_path / "out"), Workspace(tmp_path))
    assert start.state is None and start.folder == GOLDEN and "starting anew from released weights" in start.note


def test_a_checkpoint_continues_and_says_so(tmp_path: Path) -> None:
    folder = make(tmp_path / "out", 3)
    start = find_start(settings(folder, tmp_path / "out"), Workspace(tmp_path))
    assert start.state is not None and start.state.step == 3 and "continuing from" in start.note


def test_never_takes_its_weights_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "out", 3)
    start = find_start(settings(folder, tmp_path / "out", "never"), Workspace(tmp_path))
    assert start.state is None and "the weights of a checkpoint" in start.note


def test_latest_takes_the_newest_or_starts_anew(tmp_path: Path) -> None:
    output = tmp_path / "out"
    start = find_start(settings(GOLDEN, output, "latest"), Workspace(tmp_path))
    assert start.state is None
    make(output, 3)
    newest = make(output, 12)
    start = find_start(settings(GOLDEN, output, "latest"), Workspace(tmp_path))
    assert start.folder == newest
    start = find_start(settings(GOLDEN, output), Workspace(tmp_path))
    assert start.state is None and "already holds checkpoint-000012" in start.note


def test_another_dataset_cannot_be_continued(tmp_path: Path) -> None:
    folder = make(tmp_path / "out", 3)
    wrong = TrainConfig(model_config=ModelConfig(model_name_or_path=folder))
    with pytest.raises(TrainError, match="trained on d") as caught:
        find_start(wrong, Workspace(tmp_path))
    assert "--trainer-config.resume never" in str(caught.value)


def test_what_changes_is_said(tmp_path: Path) -> None:
    folder = make(tmp_path / "out", 3)
    changed = settings(folder, tmp_path / "out", optim="muon_adamw")
    note = find_start(changed, Workspace(tmp_path)).note
    assert "the optimizer changes from adamw to muon_adamw" in note


def test_output_beside_the_workspace(tmp_path: Path) -> None:
    assert output_folder(TrainConfig(), Workspace(tmp_path / "dm05")) == tmp_path / "outputs"
    assert absolute(Path("/a/../b")) == Path("/b")


def test_run_names_differ() -> None:
    assert new_run_name() != new_run_name()
