"""Metrics: one JSON row an optimizer step in ``OUTPUT/metrics.jsonl``, a progress bar, TensorBoard or W&B when asked.

A row: ``{"step": 12, "loss": 0.61, "lr": 2.5e-05, "grad_norm": 1.2, "samples": 480, "epoch": 0.01, "step_seconds":
0.25, "samples_per_second": 160.0}``; a skipped step has ``"skipped": true``, null for what is not finite, and
``"sample_ids"``.

The numbers are born on the device. ``StepLog`` keeps those of an interval there and reads them back together: at once,
or (asynchronously) one interval later, so that no step waits for the device.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from dm05_train.env import World
from dm05_train.errors import TrainError
from dm05_train.timing import Moment, moment, seconds_between


@dataclass(frozen=True)
class StepResult:
    """One optimizer step as read back from the device: rate, loss of the global batch, norm of all gradients, and the
    mean time of the steps it was read back with."""

    step: int
    lr: float
    loss: float
    grad_norm: float
    seconds: float

    @property
    def skipped(self) -> bool:
        """Whether the gradients were not finite, so that the step moved nothing."""
        return not math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class _Interval:
    """Numbers on their way to the host: (step, rate) of each step, their losses and norms [N, 2], and two moments."""

    steps: list[tuple[int, float]]
    rows: Tensor
    arrived: torch.cuda.Event | None
    began: Moment
    ended: Moment


class StepLog:
    """Loss and gradient norm of each step, kept on the device and averaged over ranks once an interval.

    Args:
        interval: steps between two read-backs.
        lag: hand out an interval's numbers only when the next one is full; no step then waits for the device.
    """

    def __init__(self, world: World, interval: int, *, lag: bool) -> None:
        self.world, self.interval, self.lag = world, interval, lag
        self._filling = torch.zeros(interval, 2, dtype=torch.float32, device=world.device)
        self._steps: list[tuple[int, float]] = []
        self._flight: _Interval | None = None
        self._moment = moment(world.device)

    def add(self, step: int, lr: float, loss: Tensor, grad_norm: Tensor) -> list[StepResult]:
        """Note a step; gives the results that have become readable, oldest first."""
        row = self._filling[len(self._steps)]
        row[0].copy_(loss)
        row[1].copy_(grad_norm)
        self._steps.append((step, lr))
        if len(self._steps) < self.interval:
            return []
        if not self.lag:
            return self.drain()
        ready = self._land()
        self._launch()
        return ready

    def drain(self) -> list[StepResult]:
        """Everything noted so far, waiting for the device."""
        ready = self._land()
        if self._steps:
            self._launch()
            ready += self._land()
        return ready

    def _launch(self) -> None:
        """Send the filled rows on their way: mean loss over ranks, then to the host, without waiting."""
        rows = self._filling[: len(self._steps)].clone()
        if self.world.size > 1:
            losses = rows[:, 0].contiguous()
            dist.all_reduce(losses, async_op=True).wait()  # on a GPU, wait() only orders the stream
            rows[:, 0] = losses / self.world.size
        arrived = None
        if rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            rows, arrived = host, torch.cuda.Event()
            arrived.record()
        began, self._moment = self._moment, moment(self.world.device)
        self._flight = _Interval(steps=self._steps, rows=rows, arrived=arrived, began=began, ended=self._moment)
        self._steps = []

    def _land(self) -> list[StepResult]:
        if self._flight is None:
            return []
        flight, self._flight = self._flight, None
        if flight.arrived is not None:
            flight.arrived.synchronize()
        seconds = seconds_between(flight.began, flight.ended) / len(flight.steps)
        pairs = zip(flight.steps, flight.rows.tolist(), strict=True)
        return [StepResult(step, lr, loss, norm, seconds) for (step, lr), (loss, norm) in pairs]


class Metrics:
    """Where rank 0 writes rows; on other ranks it does nothing.

    Args:
        output: the run's folder; ``metrics.jsonl`` in it is continued up to ``step`` and rewritten from there.
        step: steps already done (0 for a new run, which starts a new file; an earlier run's is put aside).
        total: steps of the whole run, for the bar.
        report_to: "tensorboard" and "wandb".
        config: the run's settings, for W&B.
        name: of the run, by which W&B continues it.
        advice: how to go on after a failure.
    """

    def __init__(
        self,
        world: World,
        output: Path,
        *,
        step: int,
        total: int,
        report_to: tuple[str, ...],
        config: Mapping[str, Any],
        name: str = "",
        advice: Callable[[], str] = lambda: "Then start again",
    ) -> None:
        self.output, self.advice = output, advice
        self._file = None
        if not world.is_main:
            return
        output.mkdir(parents=True, exist_ok=True)
        self.path = output / "metrics.jsonl"
        aside = put_aside(self.path) if step == 0 else None
        keep_rows(self.path, step)
        self._file = self.path.open("a", encoding="utf-8")
        self._bar = tqdm(
            total=total, initial=step, unit="step", desc="train", disable=not sys.stderr.isatty(), dynamic_ncols=True
        )
        if aside is not None:
            self.say(f"the metrics of an earlier run are now in {aside}")
        self._board = self._wandb = None
        if "tensorboard" in report_to:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(output / "tensorboard"), purge_step=step)
        if "wandb" in report_to:
            import wandb  # type: ignore[import-not-found, unused-ignore]

            self._wandb = wandb.init(
                project="dm05", dir=str(output), config=dict(config), id=name or None, resume="allow"
            )

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row (a crash loses at most the rows of one interval)."""
        if self._file is None:
            return
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with self._writing():
            self._file.write(json.dumps(plain) + "\n")
        numbers = {k: v for k, v in plain.items() if isinstance(v, int | float) and k != "step"}
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, plain["step"])
        if self._wandb is not None:
            self._wandb.log(numbers, step=plain["step"])

    def flush(self) -> None:
        """Hand all rows to the system, so that a checkpoint never knows of steps that the file does not.

        Raises:
            TrainError: they cannot be written (disk full).
        """
        if self._file is not None:
            with self._writing():
                self._file.flush()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            fix = f"Make room. {self.advice()}"
            raise TrainError(f"cannot write metrics: {error.strerror or error}", where=self.path, fix=fix) from None

    def show(self, step: int, **numbers: str) -> None:
        """Move the bar to ``step``; a run without a terminal gets a plain line instead."""
        if self._file is None:
            return
        self.flush()
        if self._bar.disable:
            print(f"step {step}/{self._bar.total}  " + "  ".join(f"{k} {v}" for k, v in numbers.items()), flush=True)
            return
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update(step - self._bar.n)

    def say(self, text: str) -> None:
        """A line of text that does not tear the bar."""
        if self._file is not None:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Close everything; rows that are worth an error were flushed before."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        self._bar.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def put_aside(path: Path) -> Path | None:
    """Rename the rows of another run to the first of ``metrics.1.jsonl``, ``metrics.2.jsonl`` ... that is free; None
    where there are none."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    free = next(name for name in names if not name.exists())
    return path.rename(free)


def keep_rows(path: Path, step: int) -> None:
    """Drop the rows after ``step`` (and a torn last one), so that a continued run writes each step once."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        try:
            if 0 < json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept), "utf-8")
    os.replace(temporary, path)
