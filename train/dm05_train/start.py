"""From where a run starts: released weights, or a checkpoint that it continues."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from dm05_schemas.workspace import Workspace
from safetensors import safe_open
from torch import Tensor, nn

from dm05_train.checkpoint import RunState, latest, read_optimizer, read_state
from dm05_train.config import TrainConfig, is_run_checkpoint
from dm05_train.env import World, broadcast, together
from dm05_train.errors import TrainError
from dm05_train.model.weights import packed_of, released_tensors
from dm05_train.optim import Optimizer
from dm05_train.optim.adamw import local
from dm05_train.optim.precision import join16, write_master


@dataclass(frozen=True, kw_only=True)
class Start:
    """The folder whose weights are loaded, and what to continue (None: a new run)."""

    folder: Path
    state: RunState | None
    note: str


def absolute(path: Path) -> Path:
    """A path that stays right wherever it is read from, without `..` in it."""
    return Path(os.path.abspath(path.expanduser()))


def output_folder(config: TrainConfig, workspace: Workspace) -> Path:
    """Where a run writes: ``--trainer-config.output-dir``, else ``outputs`` beside the workspace."""
    chosen = config.trainer_config.output_dir
    return absolute(chosen) if chosen is not None else workspace.root.parent / "outputs"


def agree_on_start(config: TrainConfig, world: World, workspace: Workspace) -> Start:
    """Rank 0 decides; the ranks that must read the folder themselves check that they have it.

    Raises:
        TrainError: on every rank, naming the machine that lacks the folder.
    """
    start = broadcast(world, together(world, lambda: find_start(config, workspace) if world.is_main else None))
    assert start is not None
    if config.model_config.load == "each":
        together(world, lambda: check_folder(start.folder))
    return start


def check_folder(folder: Path) -> None:
    """Raises a TrainError when this machine does not have the folder."""
    if not folder.is_dir():
        raise TrainError(
            f"no such folder on {socket.gethostname()}",
            where=folder,
            fix="Run dm05-prep model, or name a checkpoint with --model-config.model-name-or-path. Where machine 0 "
            "alone has it, add --model-config.load broadcast",
        )


def find_start(config: TrainConfig, workspace: Workspace) -> Start:
    """Decide between a new run and a continued one, and say which.

    Raises:
        TrainError: the folder is missing or incomplete.
    """
    resume = config.trainer_config.resume
    output = output_folder(config, workspace)
    newest = latest(output) if output.is_dir() else None
    if resume == "latest" and newest is not None:
        return _continued(newest, config)
    folder = absolute(config.model_config.model_name_or_path or workspace.checkpoint_dir)
    check_folder(folder)
    if is_run_checkpoint(folder) and resume != "never":
        return _continued(folder, config)
    kind = "the weights of a checkpoint" if is_run_checkpoint(folder) else "released weights"
    note = f"starting anew from {kind}: {folder}"
    if newest is not None:
        note += f" ({output} already holds {newest.name}; --trainer-config.resume latest would continue from it)"
    return Start(folder=folder, state=None, note=note)


def _continued(folder: Path, config: TrainConfig) -> Start:
    state = read_state(folder)
    if state.dataset != config.data_config.dataset_name:
        raise TrainError(
            f"this run trained on {state.dataset}, its data position is none of {config.data_config.dataset_name}",
            where=folder,
            fix="Add --trainer-config.resume never to start anew from its weights",
        )
    note = f"continuing from {folder}: {state.step} steps and {state.samples} samples done"
    wanted = config.trainer_config.seed
    if state.seed != wanted:
        note += f"; the seed stays {state.seed} (not {wanted}), as the order of the data depends on it"
    if state.optimizer != config.optimizer_config.optim:
        note += (
            f"; the optimizer changes from {state.optimizer} to {config.optimizer_config.optim}: "
            "moments both have are kept, the others start from zero"
        )
    return Start(folder=folder, state=state, note=note)


def new_run_name() -> str:
    """A name for a run that no other run has."""
    return f"{time.time_ns():x}-{os.getpid():x}"


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's state as ``KIND:RELEASED NAME`` -> view on the device, and ``steps:`` the updates made."""
    packed = packed_of(model)
    kinds = sorted({kind for state in optimizer.state.values() for kind in state})
    for kind in kinds:
        held = {optimizer.names[p]: state[kind] for p, state in optimizer.state.items() if kind in state}
        for name, tensor in released_tensors(held, packed):
            yield f"{kind}:{name}", tensor
    yield "steps:", optimizer.steps


@torch.no_grad()
def restore_optimizer(optimizer: Optimizer, model: nn.Module, folder: Path) -> None:
    """Fill an optimizer from a checkpoint, after the weights were loaded.

    The float32 value of a weight is what the checkpoint's precision mode kept of it; it is stored in the way of the
    optimizer's own mode, so that a run may continue in another one.
    """
    slots = dict(optimizer_tensors(optimizer, model))
    masters = _master_slots(optimizer, model)

    def visit(kind: str, name: str, tensor: Tensor) -> None:
        if kind in ("master", "remainder"):
            if name in masters:
                weight, extra = masters[name]
                tensor = tensor.to(weight.device)
                exact = tensor if kind == "master" else join16(weight.to(torch.bfloat16), tensor)
                write_master(weight, extra, exact)
        elif (slot := slots.get(f"{kind}:{name}")) is not None:
            slot.copy_(tensor)

    for (
        weight,
        extra,
    ) in masters.values():  # what the loaded weights alone say, where the checkpoint kept nothing beside them
        write_master(weight, extra, weight.float())
    read_optimizer(folder, visit)


def _master_slots(optimizer: Optimizer, model: nn.Module) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Released name -> (weight, its ``remainder`` or ``master``), views that ``write_master`` can fill."""
    packed = packed_of(model)
    weights = dict(released_tensors({name: local(p.detach()) for p, name in optimizer.names.items()}, packed))
    extras: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
    for kind in ("remainder", "master"):
        held = {optimizer.names[p]: state[kind] for p, state in optimizer.state.items() if kind in state}
        for name, view in released_tensors(held, packed):
            extras[name][kind] = view
    return {name: (weight, extras[name]) for name, weight in weights.items()}


def read_rng(folder: Path) -> Tensor:
    """The state of torch's generator in a checkpoint."""
    with safe_open(folder / "training" / "rng.safetensors", framework="pt", device="cpu") as file:
        return file.get_tensor("cpu")
