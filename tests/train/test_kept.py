"""What a failed run says about going on: the truth of the moment, whatever the folder held before."""

from __future__ import annotations

from pathlib import Path

from dm05_train.config import TrainConfig, TrainerConfig
from dm05_train.kept import Kept
from test_checkpoint import make


def kept(output: Path, resume: str = "path") -> Kept:
    config = TrainConfig(trainer_config=TrainerConfig(resume=resume))  # type: ignore[arg-type]
    return Kept.now(config, output)


def test_nothing_was_saved(tmp_path: Path) -> None:
    advice = kept(tmp_path / "out").advice()
    assert "No checkpoint of this run is in" in advice and "start again with the same command" in advice


def test_an_earlier_runs_checkpoint_is_not_this_ones(tmp_path: Path) -> None:
    make(tmp_path, 8, saved=1.0)
    assert "No checkpoint of this run" in kept(tmp_path).advice()


def test_what_was_saved_since_is_named_with_the_flag_that_works(tmp_path: Path) -> None:
    make(tmp_path, 8, saved=1.0)
    runs = {resume: kept(tmp_path, resume) for resume in ("path", "latest", "never")}
    folder = make(tmp_path, 4, saved=2.0)
    path, latest, never = (run.advice() for run in runs.values())
    assert path.endswith(f"go on from there with --model-config.model-name-or-path {folder}")
    assert "the same command goes on from there" in latest and str(folder) in latest
    assert never.endswith("in place of --trainer-config.resume never")


def test_the_same_step_saved_again_counts(tmp_path: Path) -> None:
    make(tmp_path, 4, saved=1.0)
    run = kept(tmp_path, "latest")
    make(tmp_path, 4, saved=2.0)
    assert "was saved" in run.advice()
