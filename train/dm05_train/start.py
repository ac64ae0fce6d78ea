"""From where a run starts: released weights, or a checkpoint that it continues."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dm05_schemas.files import expanded
from dm05_schemas.workspace import Workspace
from torch import Tensor

from dm05_train.checkpoint import RunState, checkpoint_entries, latest, opened, read_state
from dm05_train.config import TrainConfig, as_plain, is_run_checkpoint
from dm05_train.env import World, broadcast, together
from dm05_train.errors import TrainError
from dm05_train.optim.state import Entry


@dataclass(frozen=True, kw_only=True)
class Start:
    """The folder whose weights are loaded, and what to continue (None: a new run)."""

    folder: Path
    state: RunState | None
    note: str


def absolute(path: Path) -> Path:
    """A path that stays right wherever it is read from, without `..` in it."""
    return Path(os.path.abspath(expanded(path)))


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
        together(world, lambda: check_folder(start.folder, workspace, rank_0_has_it=True))
    return start


def check_folder(folder: Path, workspace: Workspace, *, rank_0_has_it: bool = False) -> None:
    """Raises a TrainError when this machine does not have the folder, or no checkpoint in it.

    Only where rank 0 has it can rank 0 send it: elsewhere that is not offered.
    """
    fetch, flag = f"dm05-prep model {workspace.flag}", "--model-config.model-name-or-path"
    if absolute(folder) == absolute(workspace.checkpoint_dir):
        fix = f"Run {fetch}, or name a checkpoint with {flag}"
    else:
        fix = f"Name a checkpoint with {flag}, or leave that out to start from the released one ({fetch} fetches it)"
    if not folder.is_dir():
        beside = latest(folder.parent) if is_run_checkpoint(folder) else None
        if beside is not None:
            fix = f"The newest complete checkpoint beside it is {beside.name}; --trainer-config.resume latest finds it"
        if rank_0_has_it:
            fix = "Rank 0 has it: copy it here, or have rank 0 send it with --model-config.load broadcast"
        raise TrainError(f"no such folder on {socket.gethostname()}", where=folder, fix=fix)
    if not (folder / "config.json").is_file():
        raise TrainError("this folder holds no checkpoint: there is no config.json in it", where=folder, fix=fix)


def check_output(output: Path) -> None:
    """Raises a TrainError when nothing could be written to an output folder (which need not be there yet).

    It is asked before the weights are loaded, which takes long.
    """
    there = next(path for path in (output, *output.parents) if path.exists())
    if not there.is_dir():
        raise TrainError("this is no folder", where=there, fix="Name a folder with --trainer-config.output-dir")
    if not os.access(there, os.W_OK | os.X_OK):
        fix = "Name a folder of yours with --trainer-config.output-dir"
        raise TrainError("nothing can be written here", where=there, fix=fix)


def find_start(config: TrainConfig, workspace: Workspace) -> Start:
    """Decide between a new run and a continued one, and say which.

    Raises:
        TrainError: the folder is missing or incomplete.
    """
    resume = config.trainer_config.resume
    output = output_folder(config, workspace)
    check_output(output)
    newest = latest(output) if output.is_dir() else None
    if resume == "latest" and newest is not None:
        return _continued(newest, config)
    folder = absolute(config.model_config.model_name_or_path or workspace.checkpoint_dir)
    check_folder(folder, workspace)
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
    if changes := changed_settings(state.config, as_plain(config)):
        note += f"; changed since: {', '.join(changes)}"
    return Start(folder=folder, state=state, note=note)


WITHOUT_EFFECT = {
    *("workspace", "norm_stats_root", "layout", "model_name_or_path", "load", "output_dir", "resume", "report_to"),
    *("save_strategy", "save_steps", "save_total_limit", "save_at_end", "dataloader_num_workers", "logging_steps"),
    *("timeout_minutes", "parallel", "gradient_checkpointing", "gradient_checkpointing_every"),
    *("dataset_name", "seed", "optim"),
}
"""Settings that say where and how, but do not change what a run learns; and those told in words of their own."""


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``NAME OLD -> NEW`` of the settings that shape a run's curve and differ from its checkpoint's."""
    changes = []
    for name, value in now.items():
        if name in WITHOUT_EFFECT or name not in before:
            continue
        if isinstance(value, Mapping) and isinstance(before[name], Mapping):
            changes += changed_settings(before[name], value)
        elif value != before[name]:
            changes.append(f"{name.replace('_', '-')} {before[name]} -> {value}")
    return changes


def check_position(start: Start, samples: int) -> None:
    """Raises a TrainError when a dataset is not as long as the one that a continued run's data position counts in."""
    state = start.state
    if state is not None and state.dataset_samples != samples:
        raise TrainError(
            f"this run trained on {state.dataset_samples:,} samples an epoch and the dataset now has {samples:,}: its "
            "data position means nothing there",
            where=start.folder,
            fix="Bring the dataset and --data-config.val-episodes back to what they were, or start anew from its "
            "weights with --trainer-config.resume never",
        )


def new_run_name() -> str:
    """A name for a run that no other run has."""
    return f"{time.time_ns():x}-{os.getpid():x}"


def optimizer_entries(world: World, state: RunState, folder: Path, *, broadcasting: bool) -> Iterator[Entry]:
    """The optimizer state of a checkpoint, tensor by tensor, read by every rank or read by rank 0 and sent."""
    read = checkpoint_entries(folder, weights_too=state.precision == "fp32")
    if world.size == 1 or not broadcasting:
        yield from read
        return
    while True:
        entry = next(read, None) if world.is_main else None
        facts = None if entry is None else (entry[0], entry[1], entry[2].dtype, entry[2].shape)
        facts = broadcast(world, facts)
        if facts is None:
            return
        kind, name, dtype, shape = facts
        tensor = entry[2].to(world.device) if entry else torch.empty(shape, dtype=dtype, device=world.device)
        sent = tensor.reshape(-1).view(torch.uint8)
        dist.broadcast(sent, src=0)
        yield kind, name, tensor


def read_rng(world: World, folder: Path) -> Tensor:
    """The state of torch's generator in a checkpoint, as rank 0 reads it."""

    def read() -> Tensor | None:
        if not world.is_main:
            return None
        with opened(folder / "training" / "rng.safetensors") as file:
            return file.get_tensor("cpu")

    state = broadcast(world, together(world, read))
    assert state is not None
    return state
