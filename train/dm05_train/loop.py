"""The training run: one step on one screen, and the story around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace
from torch import Tensor, nn

from dm05_train.build import (
    load_model,
    precision_mode,
    share_small_files,
    small_files,
)
from dm05_train.config import TrainConfig, as_plain
from dm05_train.env import World, broadcast, join, leave, lost_peers, together
from dm05_train.inputs import prompt_builder, statistics, training_data, training_loader
from dm05_train.metrics import Metrics, StepLog
from dm05_train.model.dm05 import DM05
from dm05_train.model.noise import draw
from dm05_train.optim import Optimizer, build_optimizer
from dm05_train.optim.schedule import learning_rate
from dm05_train.parallel import gradient_sync, wrap
from dm05_train.perf.switches import Switches
from dm05_train.saver import Saver
from dm05_train.signals import StopSignal
from dm05_train.snapshot import take_snapshot
from dm05_train.start import agree_on_start, new_run_name, output_folder, restore_optimizer
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
    precision: str
    step: int = 0
    samples: int = 0
    async_loss: bool = False
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
        positions = torch.arange(len(batch["action"]), device=run.world.device) + int(batch["position"])
        with gradient_sync(run.wrapped, last=micro == accumulation - 1):
            loss += run.backward(batch, positions, first=micro == 0)
        ids += batch["sample_ids"].tolist()
    norm, scale = run.optimizer.clip_scale(trainer.max_grad_norm)
    run.lr.fill_(run.rate())
    run.optimizer.step(run.lr, scale)
    for parameter in run.parameters:
        parameter.grad = None
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
    log = StepLog(run.world, trainer.logging_steps if run.async_loss else 1, lag=run.async_loss)
    watch = Watch(run, saver, metrics)
    while run.step < trainer.num_train_steps:
        rate = run.rate()
        loss, norm = train_step(run)
        watch.account(log.add(run.step, rate, loss, norm))
        stopping = stop.agreed()
        last = run.step == trainer.num_train_steps
        due = trainer.save_strategy == "steps" and run.step % trainer.save_steps == 0
        if stopping or due or (last and trainer.save_at_end):
            watch.account(log.drain())
            metrics.flush()
            saver.save(take_snapshot(run))
        if stopping:
            saver.wait()
            metrics.say(f"told to stop: saved after step {run.step}. Continue from {saver.last}")
            return
    watch.account(log.drain())
    saver.wait()


def train(config: TrainConfig, environ: Mapping[str, str]) -> int:
    """Train as the configuration says; gives the exit code 0.

    Raises:
        DM05Error: the run cannot start or go on; what to do is said, and the ranks end together.
    """
    world = World.from_env(environ)
    switches = Switches.from_env(environ)
    join(world, minutes=config.trainer_config.timeout_minutes)
    try:
        with StopSignal(world) as stop, lost_peers(world):
            return _train(config, world, switches, stop)
    finally:
        leave()


def _train(config: TrainConfig, world: World, switches: Switches, stop: StopSignal) -> int:
    workspace = Workspace.resolve(config.workspace)
    output = output_folder(config, workspace)
    start = agree_on_start(config, world, workspace)
    trainer, state = config.trainer_config, start.state
    seed = trainer.seed if state is None else state.seed
    spec = together(world, lambda: lookup(config.data_config.dataset_name, workspace))
    stats = statistics(config, world, workspace, spec)
    dataset = together(world, lambda: training_data(config, workspace, spec, stats))
    folder = start.folder if config.model_config.load == "each" else share_small_files(world, start.folder)
    mode = precision_mode(config, folder)
    model = load_model(config, world, folder, mode)
    prompts = together(world, lambda: prompt_builder(config, folder, model.config, spec))
    wrapped = wrap(model, world, trainer.parallel)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer_config, mode)
    if state is not None:
        together(world, lambda: restore_optimizer(optimizer, model, folder))
    loader = training_loader(
        config,
        world,
        model.config,
        dataset,
        prompts,
        seed=seed,
        position=state.samples if state else 0,
        trimmed=switches.on("restructure"),
    )
    run = Run(
        config=config,
        world=world,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        batches=iter(loader),
        dataset_size=len(dataset),
        seed=seed,
        name=broadcast(world, state.run if state else new_run_name()),
        precision=mode,
        step=state.step if state else 0,
        samples=state.samples if state else 0,
        async_loss=switches.on("async_loss"),
    )
    metrics = Metrics(
        world,
        output,
        step=run.step,
        total=trainer.num_train_steps,
        report_to=trainer.report_to,
        config=as_plain(config),
    )
    metrics.say(start.note)
    extras = {path.name: path for path in small_files(folder)}
    saver = Saver(world, output, extras=extras, keep=trainer.save_total_limit, say=metrics.say)
    try:
        run_steps(run, saver, metrics, stop)
    finally:
        metrics.close()
    return 0
