"""Metrics: every step gets its row, in order, whatever the interval; a continued file has each step once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from dm05_train.env import World
from dm05_train.errors import TrainError
from dm05_train.metrics import Metrics, StepLog, StepResult, keep_rows


@pytest.mark.parametrize(("interval", "lag"), [(1, False), (3, False), (1, True), (3, True), (10, True)])
def test_every_step_once_in_order_and_late_by_one_interval_at_most(interval: int, lag: bool) -> None:
    log = StepLog(World(), interval, lag=lag)
    found: list[StepResult] = []
    for step in range(1, 12):
        found += log.add(step, step / 10, torch.tensor(float(step)), torch.tensor(step + 0.5))
        assert len(found) > step - 2 * interval
        if not lag:
            assert len(found) == step - step % interval
    found += log.drain()
    assert [(r.step, r.lr, r.loss, r.grad_norm) for r in found] == [(s, s / 10, s, s + 0.5) for s in range(1, 12)]
    assert all(0 < r.seconds < 1 for r in found)
    assert log.drain() == []


def test_a_norm_that_is_not_finite_is_a_skipped_step() -> None:
    assert StepResult(1, 0.1, 2.0, math.nan, 1.0).skipped and StepResult(1, 0.1, 2.0, math.inf, 1.0).skipped
    assert not StepResult(1, 0.1, math.nan, 1.0, 1.0).skipped


def test_rows_are_strict_json(tmp_path: Path) -> None:
    metrics = Metrics(World(), tmp_path, step=0, total=2, report_to=(), config={})
    metrics.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    metrics.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "lr": 0.1,
    }


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    more = {"report_to": (), "config": {}, "advice": lambda: "Go on so"}
    metrics = Metrics(World(), tmp_path, step=0, total=2, **more)  # type: ignore[arg-type]
    with open("/dev/full", "w", encoding="utf-8") as full:
        metrics._file = full
        metrics.write({"step": 1})
        with pytest.raises(
            TrainError, match=r"metrics\.jsonl: cannot write metrics: No space left.*Make room. Go on so"
        ):
            metrics.flush()
        metrics.close()  # an error on its way out is not replaced by another


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    metrics = Metrics(World(rank=1, size=2), tmp_path / "out", step=0, total=2, report_to=(), config={})
    metrics.write({"step": 1})
    metrics.show(1, loss="1")
    metrics.close()
    assert not (tmp_path / "out").exists()


def test_a_continued_file_drops_later_and_torn_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": s / 2}) + "\n" for s in range(1, 6)) + '{"step": 6, "lo')
    keep_rows(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    keep_rows(path, 0)
    assert path.read_text() == ""
    keep_rows(tmp_path / "none", 3)


def test_a_new_run_puts_the_rows_of_earlier_ones_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        metrics = Metrics(World(), tmp_path, step=0, total=9, report_to=(), config={})
        metrics.write({"step": step})
        metrics.close()
    kept = {path.name: json.loads(path.read_text())["step"] for path in tmp_path.iterdir()}
    assert kept == {"metrics.1.jsonl": 1, "metrics.2.jsonl": 2, "metrics.jsonl": 3}
    assert f"now in {tmp_path / 'metrics.2.jsonl'}" in capsys.readouterr().out
    Metrics(World(), tmp_path, step=3, total=9, report_to=(), config={}).close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3}


def test_tensorboard_and_wandb_are_refused_when_missing_and_used_when_there(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    metrics = Metrics(World(), tmp_path, step=0, total=2, report_to=("tensorboard",), config={})
    metrics.write({"step": 1, "loss": 0.5})
    metrics.close()
    assert list((tmp_path / "tensorboard").glob("events*"))
