"""The training loop: one step on one screen, and what happens between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from dm05_train.checkpoint import checkpoint_name
from dm05_train.config import TrainConfig
from dm05_train.env import World, together
from dm05_train.metrics import Metrics, StepLog
from dm05_train.model.dm05 import DM05
from dm05_train.model.noise import draw
from dm05_train.optim import Optimizer
from dm05_train.optim.precision import Mode
from dm05_train.optim.schedule import learning_rate
from dm05_train.parallel import gradient_sync
from dm05_train.saver import Saver
from dm05_train.signals import StopSignal
from dm05_train.snapshot import Buffers, HostCopy, take_snapshot
from dm05_train.timing import NoTimer, Timer
from dm05_train.watch import Watch


class Backward(Protocol):
    """Forward and backward of one batch: gives its part of the loss; ``first`` of a step starts gradients from zero."""

    def __call__(self, batch: Mapping[str, Tensor], positions: Tensor, *, first: bool) -> Tensor: ...


@dataclass(kw_only=True)
class Run:
    """The parts of a run, built and ready, and how far it is."""

    config: TrainConfig
    world: World
    model: DM05
    wrapped: nn.Module
    """The model inside DDP or FSDP, which is what the step calls."""
    optimizer: Optimizer
    batches: Iterator[Mapping[str, Tensor]]
    dataset_size: int
    seed: int
    name: str
    precision: Mode
    step: int = 0
    samples: int = 0
    async_loss: bool = False
    timer: Timer = field(default_factory=NoTimer)
    copying: HostCopy | None = None
    """A snapshot's copy under way, which the weights must not change under."""
    buffers: Buffers = field(default_factory=Buffers)
    recent: deque[tuple[int, list[int]]] = field(default_factory=lambda: deque(maxlen=1024))
    """Sample ids this rank took in the last steps, for the report of a skipped one."""

    def __post_init__(self) -> None:
        self.parameters = list(self.optimizer.names)
        self.lr = torch.zeros((), device=self.world.device)
        self.backward: Backward = self.eager_backward

    def loss_of(self, batch: Mapping[str, Tensor], positions: Tensor) -> Tensor:
        """This batch's part of the step's loss, with the noise and times that belong to its positions."""
        noise, times = draw(self.seed, positions, batch["action"].shape[1], self.model.config.action_dim)
        loss: Tensor = self.wrapped(batch, noise, times)
        return loss / self.config.trainer_config.gradient_accumulation_steps

    def eager_backward(self, batch: Mapping[str, Tensor], positions: Tensor, *, first: bool) -> Tensor:
        """Forward and backward of one batch; gradients add up. A captured graph may take this one's place."""
        loss = self.loss_of(batch, positions)
        loss.backward()
        return loss.detach()

    def rate(self) -> float:
        """The learning rate of the step about to be made."""
        optimizer, total = self.config.optimizer_config, self.config.trainer_config.num_train_steps
        return learning_rate(
            self.step,
            peak=optimizer.base_lr,
            warmup=optimizer.warmup_steps,
            total=total,
            shape=optimizer.lr_scheduler,
            floor=optimizer.min_lr_ratio,
        )


def train_step(run: Run) -> tuple[Tensor, Tensor]:
    """One optimizer step. Nothing in it waits for the device.

    Returns:
        (loss, norm) scalars on the device: this rank's mean loss, and the norm of all gradients (not finite: nothing
        moved).
    """
    trainer = run.config.trainer_config
    accumulation = trainer.gradient_accumulation_steps
    loss, ids = torch.zeros((), device=run.world.device), []
    for micro in range(accumulation):
        batch = next(run.batches)
        run.timer.mark("data")
        positions = torch.arange(len(batch["action"]), device=run.world.device) + int(batch["position"])
        with gradient_sync(run.wrapped, last=micro == accumulation - 1):
            loss += run.backward(batch, positions, first=micro == 0)
        run.timer.mark("forward and backward")
        ids += batch["sample_ids"].tolist()
    norm, scale = run.optimizer.clip_scale(trainer.max_grad_norm)
    run.lr.fill_(run.rate())
    if run.copying is not None:  # the weights are still on their way into a checkpoint
        run.copying.before_update()
        run.copying = None
    run.optimizer.step(run.lr, scale)
    for parameter in run.parameters:
        parameter.grad = None
    run.timer.mark("clip and optimizer")
    run.step += 1
    run.samples += run.config.global_batch(run.world.size)
    run.recent.append((run.step, ids))
    return loss, norm


def run_steps(run: Run, saver: Saver, metrics: Metrics, stop: StopSignal) -> None:
    """Step until the last step or a signal; save, log and watch on the way.

    Raises:
        TrainError: three steps in a row had gradients that are not finite, or a checkpoint could not be written.
    """
    trainer = run.config.trainer_config
    interval = min(trainer.logging_steps, trainer.num_train_steps) if run.async_loss else 1
    log = StepLog(run.world, interval, lag=run.async_loss)
    watch = Watch(run, saver, metrics)
    if run.step >= trainer.num_train_steps:
        metrics.say(f"nothing to do: {run.step} of {trainer.num_train_steps} steps are done")
    if stop.before_start():
        metrics.say("told to stop before the first step: nothing to save")
        return
    while run.step < trainer.num_train_steps:
        rate = run.rate()
        loss, norm = train_step(run)
        watch.account(log.add(run.step, rate, loss, norm))
        stopping = stop.agreed(failed=saver.failed)  # no step is worth making for a checkpoint that cannot be written
        last = run.step == trainer.num_train_steps
        due = trainer.save_strategy == "steps" and run.step % trainer.save_steps == 0
        if stopping or due or (last and trainer.save_at_end):
            watch.account(log.drain())
            metrics.flush()
            together(run.world, saver.wait)  # the snapshot before is read from the memory that this one is written to
            saver.save(take_snapshot(run))
        if stopping:
            together(run.world, saver.wait)
            metrics.say(f"told to stop: saved after step {run.step}. Continue from {saver.last}")
            return
    watch.account(log.drain())
    metrics.flush()
    together(run.world, saver.wait)
    metrics.say(f"done: {run.step} steps, metrics in {metrics.output / 'metrics.jsonl'}; {_kept(run, saver)}")


def _kept(run: Run, saver: Saver) -> str:
    """What is kept of a run that has ended."""
    if saver.last is not None and saver.last.name == checkpoint_name(run.step):
        return f"saved as {saver.last}"
    before = f" since {saver.last}" if saver.last else ""
    return f"nothing was saved{before} (--trainer-config.save-at-end saves the last step)"
