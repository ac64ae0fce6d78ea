"""A training run from start to end: where it begins, what it is built of, then its steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from dm05_schemas.commands import aiming
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace

from dm05_train.build import checkpoint_files, load_model, precision_mode, share_small_files
from dm05_train.checkpoint import clean
from dm05_train.config import TrainConfig, as_plain
from dm05_train.data.loader import Loader
from dm05_train.env import World, broadcast, first_line, join, leave, lost_peers, speaking_in_turn, together
from dm05_train.errors import TrainError
from dm05_train.inputs import prompt_builder, statistics, training_data, training_loader
from dm05_train.kept import Kept
from dm05_train.loop import Run, run_steps
from dm05_train.memory import GIB, Shape, advice, estimate, shape_of
from dm05_train.metrics import Metrics
from dm05_train.optim import build_optimizer
from dm05_train.optim.state import restore
from dm05_train.perf.accelerate import Acceleration
from dm05_train.perf.switches import Switches
from dm05_train.saver import Saver
from dm05_train.signals import StopSignal
from dm05_train.start import (
    Start,
    agree_on_start,
    check_position,
    new_run_name,
    optimizer_entries,
    output_folder,
    read_rng,
)
from dm05_train.table import start_table
from dm05_train.timing import NoTimer, StepTimer


def train(config: TrainConfig, environ: Mapping[str, str]) -> int:
    """Train as the configuration says; gives the exit code 0.

    Raises:
        DM05Error: the run cannot start or go on; what to do is said, and the ranks end together.
    """
    with speaking_in_turn(environ), warnings.catch_warnings():
        world = World.from_env(environ)
        if not world.is_main:  # rank 0 says it for all
            warnings.simplefilter("ignore")
        switches = Switches.from_env(environ)
        workspace = Workspace.resolve(config.workspace)
    kept = Kept.now(config, output_folder(config, workspace))
    join(world, minutes=config.trainer_config.timeout_minutes)
    try:
        aimed = aiming(workspace, config.data_config.dataset_name)
        with StopSignal(world) as stop, lost_peers(world, kept.advice), aimed:
            return _train(config, world, switches, stop, environ, kept)
    finally:
        leave()


READERS = 8


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that is ready for its first step, and what its checkpoints hold beside tensors."""

    run: Run
    loader: Loader
    files: dict[str, bytes]
    cameras: int
    acceleration: Acceleration


def prepare(config: TrainConfig, world: World, switches: Switches, workspace: Workspace, start: Start) -> Prepared:
    """Build everything, in the order in which one part needs another."""
    trainer, state = config.trainer_config, start.state
    broadcasting = config.model_config.load == "broadcast"
    seed, position = (trainer.seed, 0) if state is None else (state.seed, state.samples)
    spec = together(world, lambda: lookup(config.data_config.dataset_name, workspace))
    found = statistics(config, world, workspace, spec, start)
    dataset = together(world, lambda: training_data(config, workspace, spec, found.stats))
    together(world, lambda: check_position(start, len(dataset)))
    folder = share_small_files(world, start.folder) if broadcasting else start.folder
    mode = together(world, lambda: precision_mode(config, folder))
    model = load_model(config, world, folder, mode)
    acceleration = Acceleration(
        switches=switches, world=world, parallel=trainer.parallel, mode=mode, optim=config.optimizer_config.optim
    )
    acceleration.prepare(model)
    prompts = together(world, lambda: prompt_builder(config, folder, model.config, spec))
    wrapped = acceleration.wrap(model)
    optimizer = build_optimizer(
        model.named_parameters(),
        config.optimizer_config,
        mode,
        packed=model.packed,
        muon_batched=switches.on("muon_batched_gather"),
        adamw_class=acceleration.adamw(),
        muon_class=acceleration.muon(),
    )
    if state is not None:
        entries = optimizer_entries(world, state, start.folder, broadcasting=broadcasting)
        if broadcasting:
            restore(optimizer, model, entries)
        else:
            together(world, lambda: restore(optimizer, model, entries, threads=READERS))
        torch.set_rng_state(read_rng(world, start.folder))
    loader = training_loader(
        config, world, model.config, dataset, prompts, seed=seed, position=position, trimmed=acceleration.trims
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
        samples=position,
        async_loss=switches.on("async_loss"),
        timer=StepTimer(world.device) if switches.on("log") else NoTimer(),
    )
    files = checkpoint_files(folder, config, mode) | found.files if world.is_main else {}
    return Prepared(run=run, loader=loader, files=files, cameras=dataset.cameras, acceleration=acceleration)


def _train(
    config: TrainConfig, world: World, switches: Switches, stop: StopSignal, environ: Mapping[str, str], kept: Kept
) -> int:
    workspace, trainer, output = Workspace.resolve(config.workspace), config.trainer_config, kept.output
    start = agree_on_start(config, world, workspace)
    ready = prepare(config, world, switches, workspace, start)
    run = ready.run
    metrics = together(world, lambda: open_metrics(run, kept))
    metrics.say(start.note)
    run.backward = ready.acceleration.backward(run.loss_of, run.wrapped, metrics.say) or run.eager_backward
    for line in ready.acceleration.report() if switches.on("log") else ():
        metrics.say(line)
    if world.is_main:
        metrics.say(describe(ready, output, environ))
    saver = Saver(
        world,
        output,
        extras=ready.files,
        keep=trainer.save_total_limit,
        say=metrics.say,
        last=start.folder if start.state else None,
        minutes=trainer.timeout_minutes,
    )
    try:
        run_steps(run, saver, metrics, stop)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(ready, error) from None
    finally:
        ready.loader.close()
        metrics.close()
    return 0


def open_metrics(run: Run, kept: Kept) -> Metrics:
    """The metrics of a run that is about to begin, in an output folder without what a killed one left half written."""
    if run.world.is_main:
        clean(kept.output)  # before anything is written: it may be what fills the disk
    trainer = run.config.trainer_config
    return Metrics(
        run.world,
        kept.output,
        step=run.step,
        total=trainer.num_train_steps,
        report_to=trainer.report_to,
        config=as_plain(run.config),
        name=run.name,
        advice=kept.advice,
    )


def run_shape(ready: Prepared) -> Shape:
    """What the memory of this run depends on."""
    run, acceleration = ready.run, ready.acceleration
    return shape_of(
        run.config,
        run.model.config,
        run.precision,
        cameras=ready.cameras,
        gpus=run.world.size,
        trimmed=acceleration.trims,
        graphs=acceleration.on("cuda_graph"),
        fp8=acceleration.on("fp8_mlp"),
    )


def is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether memory ran out, on the GPU, in torch's allocator for the CPU (which has no class for it) or in NumPy."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def out_of_memory(ready: Prepared, error: Exception) -> TrainError:
    """What torch says, and what to try, with what each would need."""
    run, shape = ready.run, run_shape(ready)
    need = estimate(run.model.config, shape).total / GIB
    steps = "; ".join(advice(run.model.config, shape, ready.acceleration.switches))
    full = "the GPU" if run.world.device.type == "cuda" else "this machine's memory"
    what = f"{full} is full at step {run.step + 1} (about {need:.1f} GiB were expected): {first_line(error)}"
    return TrainError(what, where=f"rank {run.world.rank}", fix=f"Try, the cheapest first: {steps}")


def describe(ready: Prepared, output: Path, environ: Mapping[str, str]) -> str:
    """The start table of a run that is ready."""
    run = ready.run
    return start_table(
        run.config,
        run.world,
        output=output,
        samples=run.dataset_size,
        seed=run.seed,
        parameters=(sum(p.numel() for p in run.model.parameters()), sum(p.numel() for p in run.parameters)),
        precision=run.precision,
        memory=estimate(run.model.config, run_shape(ready)),
        acceleration=ready.acceleration,
        environ=environ,
    )
