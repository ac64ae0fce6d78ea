"""The step: what it moves, what it skips, and what the rows say of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from dm05_train.env import World
from dm05_train.errors import TrainError
from dm05_train.loop import Run, run_steps, train_step
from dm05_train.metrics import Metrics
from dm05_train.model.weights import EMBEDDING, dead_parameters
from dm05_train.saver import Saver
from dm05_train.signals import StopSignal
from golden_run import config, golden_run
from torch import Tensor


def poisoned(batches: Iterator[Mapping[str, Tensor]], steps: set[int]) -> Iterator[Mapping[str, Tensor]]:
    """Batches of which some hold a NaN."""
    for number, batch in enumerate(batches, start=1):
        yield {**batch, "action": batch["action"] * math.nan} if number in steps else batch


def weights(run: Run) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def go(run: Run, output: Path) -> list[dict[str, object]]:
    """All steps of a run; its rows."""
    metrics = Metrics(World(), output, step=0, total=run.config.trainer_config.num_train_steps, report_to=(), config={})
    saver = Saver(World(), output, extras={}, keep=None, say=metrics.say)
    try:
        with StopSignal(World()) as stop:
            run_steps(run, saver, metrics, stop)
    finally:
        metrics.close()
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_step_moves_what_is_trained_and_nothing_else() -> None:
    run = golden_run(config(batch=3))
    before = weights(run)
    loss, norm = train_step(run)
    assert loss.item() > 0 and norm.item() > 0
    frozen = dead_parameters(run.model.config) | {EMBEDDING}
    for name, weight in weights(run).items():
        assert torch.equal(weight, before[name]) == (name in frozen), name
    assert all(parameter.grad is None for parameter in run.parameters)
    assert (run.step, run.samples) == (1, 3)


def test_a_step_that_is_not_finite_moves_nothing_but_the_data(tmp_path: Path) -> None:
    run = golden_run(config(batch=3, steps=3))
    run.batches = poisoned(run.batches, {2})
    rows = go(run, tmp_path)
    assert [row.get("skipped", False) for row in rows] == [False, True, False]
    assert rows[1]["loss"] is None and rows[1]["sample_ids"] == [3, 4, 5] and rows[1]["samples"] == 6
    assert run.optimizer.steps.item() == 2
    assert all(torch.isfinite(weight).all() for weight in weights(run).values())


@pytest.mark.parametrize("late", [False, True])
def test_three_in_a_row_end_the_run_with_the_last_good_checkpoint(tmp_path: Path, late: bool) -> None:
    """Also when results are read an interval later: the weights are not touched in between."""
    run = golden_run(config(batch=3, steps=30, save_strategy="steps", save_steps=2, logging_steps=2))
    run.async_loss = late
    run.batches = poisoned(run.batches, {5, 7, 8, 9, 10, 11, 12})
    with pytest.raises(TrainError, match="3 steps in a row, up to step 9") as caught:
        go(run, tmp_path)
    good = tmp_path / "checkpoint-000008"
    assert str(good) in str(caught.value) and good.is_dir()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("skipped")] == [5, 7, 8, 9]


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    whole, parts = golden_run(config(batch=6)), golden_run(config(batch=2, accumulation=3))
    for _ in range(2):
        for a, b in zip(train_step(whole), train_step(parts), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


def test_rows_are_the_same_when_read_late(tmp_path: Path) -> None:
    rows = []
    for late in (False, True):
        run = golden_run(config(batch=3, steps=7, logging_steps=3))
        run.async_loss = late
        rows.append(
            [(r["step"], r["loss"], r["grad_norm"], r["lr"], r["samples"]) for r in go(run, tmp_path / str(late))]
        )
    assert rows[0] == rows[1] and len(rows[0]) == 7


def test_an_interval_longer_than_the_run_costs_nothing(tmp_path: Path) -> None:
    run = golden_run(config(batch=3, steps=2, logging_steps=10**12))
    run.async_loss = True
    assert len(go(run, tmp_path)) == 2


def test_a_run_that_is_done_has_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = golden_run(config(batch=3, steps=2))
    run.step = 2
    assert go(run, tmp_path) == []
    assert "nothing to do: 2 of 2 steps are done" in capsys.readouterr().out
