"""Where a run starts: a new one or a continued one, by what the folders hold and the flags say."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from dm05_schemas.workspace import Workspace
from dm05_train.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig, as_plain
from dm05_train.errors import TrainError
from dm05_train.start import (
    absolute,
    changed_settings,
    check_folder,
    check_output,
    check_position,
    find_start,
    new_run_name,
    output_folder,
)
from golden_run import GOLDEN
from test_checkpoint import make as publish_one


def make(output: Path, step: int) -> Path:
    """A checkpoint of a run."""
    folder = publish_one(output, step)
    (folder / "config.json").write_text("{}")
    return folder


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


@pytest.mark.parametrize("lost", ["training", "training/state.json"])
def test_half_a_checkpoint_is_not_taken_for_released_weights(tmp_path: Path, lost: str) -> None:
    """A copy that broke off: to start anew from it unasked would lose the run."""
    folder = make(tmp_path / "out", 3)
    (folder / lost).unlink() if lost.endswith("json") else shutil.rmtree(folder / lost)
    with pytest.raises(TrainError, match=r"incomplete: training/state\.json is missing"):
        find_start(settings(folder, tmp_path / "out"), Workspace(tmp_path))
    assert find_start(settings(folder, tmp_path / "out", "never"), Workspace(tmp_path)).state is None


def test_a_checkpoint_that_is_gone_names_the_newest_beside_it(tmp_path: Path) -> None:
    make(tmp_path / "out", 3)
    gone = tmp_path / "out" / "checkpoint-000001"
    with pytest.raises(TrainError, match=r"no such folder .* is checkpoint-000003; --trainer-config\.resume latest"):
        find_start(settings(gone, tmp_path / "elsewhere"), Workspace(tmp_path))


def test_rank_0_can_send_only_what_it_has(tmp_path: Path) -> None:
    """To the one process that decides, sending is not offered; to another machine's ranks it is."""
    workspace = Workspace(tmp_path)
    with pytest.raises(TrainError) as caught:
        find_start(settings(None, tmp_path / "out"), workspace)
    assert caught.value.fix is not None and "broadcast" not in caught.value.fix
    assert caught.value.fix.startswith(f"Run dm05-prep model {workspace.flag}, or name a checkpoint")
    with pytest.raises(TrainError, match=r"Rank 0 has it.*--model-config\.load broadcast"):
        check_folder(workspace.checkpoint_dir, workspace, rank_0_has_it=True)


def test_a_wrong_name_is_not_mended_by_fetching_alone(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"Name a checkpoint with --model-\S+, or leave that out"):
        find_start(settings(tmp_path / "none", tmp_path / "out"), Workspace(tmp_path))


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"holds no checkpoint.*dm05-prep model"):
        find_start(settings(tmp_path, tmp_path / "out"), Workspace(tmp_path))


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Said before anything is loaded, and nothing is made on the way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"file: this is no folder.*--trainer-config\.output-dir"):
        check_output(tmp_path / "file" / "out")
    check_output(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(TrainError, match="nothing can be written here"):
            check_output(tmp_path / "a" / "b")
        tmp_path.chmod(0o700)


def test_another_length_of_the_dataset_cannot_be_continued(tmp_path: Path) -> None:
    folder = make(tmp_path / "out", 3)
    start = find_start(settings(folder, tmp_path / "out"), Workspace(tmp_path))
    check_position(start, 80)
    with pytest.raises(TrainError, match=r"80 samples an epoch and the dataset now has 79.*resume never"):
        check_position(start, 79)


def test_settings_that_change_the_curve_are_said() -> None:
    before = as_plain(TrainConfig())
    now = as_plain(
        TrainConfig(
            model_config=ModelConfig(chunk_size=5),
            optimizer_config=OptimizerConfig(base_lr=1e-3),
            trainer_config=TrainerConfig(save_steps=3, output_dir=Path("o")),
        )
    )
    assert changed_settings(before, now) == ["chunk-size 10 -> 5", "base-lr 2.5e-05 -> 0.001"]
    assert changed_settings(json.loads(json.dumps(now)), now) == []
    assert changed_settings({}, now) == []


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
