"""The model of a run: its folder, precision and weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from dm05_train.config import TrainConfig
from dm05_train.env import World, broadcast, together
from dm05_train.model.config import DM05Config, read_settings
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import freeze_untrained, load_weights
from dm05_train.optim.precision import Mode, resolve, weight_dtype

SMALL_FILE_BYTES = 64 << 20


def share_small_files(world: World, folder: Path) -> Path:
    """A folder with rank 0's config, tokenizer and other small files, on every rank (its own copy off rank 0)."""
    files: dict[str, bytes] = {}
    if world.is_main:
        files = {path.name: path.read_bytes() for path in small_files(folder)}
    files = broadcast(world, files)
    if world.is_main:
        return folder
    copy = Path(tempfile.mkdtemp(prefix="dm05-checkpoint-"))
    for name, data in files.items():
        (copy / name).write_bytes(data)
    return copy


def small_files(folder: Path) -> list[Path]:
    """What belongs to a checkpoint beside its tensors: config.json, tokenizer.json and the like."""
    tensors = ("model.safetensors", "model.safetensors.index.json")
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.name not in tensors
        and not path.name.startswith(".")
        and path.suffix not in (".safetensors", ".md")
        and path.stat().st_size < SMALL_FILE_BYTES
    )


def precision_mode(config: TrainConfig, path: Path) -> Mode:
    """The precision mode; ``auto`` follows the dtype that config.json states (``path``: the file or its folder).

    Raises:
        TrainError: config.json cannot be read.
    """
    return resolve(config.trainer_config.precision, read_settings(path).get("dtype", "bfloat16"))


def empty_model(config: DM05Config, device: torch.device, dtype: torch.dtype) -> DM05:
    """The model with memory but no values: nothing is initialised only to be overwritten."""
    with torch.device("meta"):
        model = DM05(config).to(dtype)
    return model.to_empty(device=device)


def load_model(config: TrainConfig, world: World, folder: Path, mode: Mode) -> DM05:
    """The model with its weights on this rank's device, trainable where fine-tuning trains.

    Raises:
        TrainError: on every rank, when the weights are missing or wrong on any.
    """
    model = empty_model(together(world, lambda: DM05Config.from_json(folder)), world.device, weight_dtype(mode))
    alone = config.model_config.load == "broadcast"
    together(world, lambda: load_weights(model, folder) if world.is_main or not alone else None)
    if alone and world.size > 1:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
    freeze_untrained(model)
    model.set_checkpointing(config.trainer_config.recomputed_every)
    return model.train()


def checkpoint_files(folder: Path, config: TrainConfig, mode: Mode) -> dict[str, bytes]:
    """The small files of every checkpoint of a run, by name.

    Read once, at the start: the folder the run came from may be rotated away later. config.json says what is true of
    the new weights: their dtype and the chunk they were trained for.
    """
    files = {path.name: path.read_bytes() for path in small_files(folder)}
    settings = json.loads(files["config.json"])
    settings |= {"dtype": str(weight_dtype(mode)).removeprefix("torch."), "chunk_size": config.model_config.chunk_size}
    files["config.json"] = (json.dumps(settings, indent=2) + "\n").encode()
    return files
