"""Loading weights by several ranks: each reads the file itself, or rank 0 reads and sends (--model-config.load).

    torchrun --nproc-per-node 2 tools/bench_load.py --folder SCRATCH [--layers 8] [--vocabulary 32768]

Rank 0 writes a checkpoint of generated weights in the released shapes with fewer layers and tokens (unless there is
one), then both ways are timed in turns from barrier to barrier: right after the system was asked to drop the file from
its cache, and again with the file in it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from dm05_schemas.cli import run
from dm05_schemas.flags import parse_flags
from dm05_train.build import empty_model, load_model
from dm05_train.checkpoint import write_tensors
from dm05_train.config import ModelConfig, TrainConfig
from dm05_train.env import World, join, leave
from dm05_train.model.config import DM05Config
from dm05_train.model.weights import EMBEDDING, LM_HEAD, generate_weights, state_for_saving

FULL = Path(__file__).parents[1] / "tests" / "golden" / "dm05_config.json"
Load = Literal["each", "broadcast"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    folder: Path
    """Where the checkpoint is written, and kept."""
    layers: int = 8
    """Layers of the language model, of the expert and of the vision tower."""
    vocabulary: int = 32768
    """Rows of the embedding."""
    repeats: int = 3
    """Times each way is measured."""


def make(options: Options) -> None:
    """Write the checkpoint unless there is one."""
    if (options.folder / "model.safetensors").exists():
        return
    raw: dict[str, Any] = json.loads(FULL.read_text("utf-8"))
    raw["vlm_config"]["image_token_index"] = options.vocabulary - 1
    for part in (raw["vlm_config"]["text_config"], raw["action_config"], raw["vlm_config"]["vision_config"]):
        part["num_hidden_layers"] = options.layers
        if "layer_types" in part:
            part["layer_types"] = part["layer_types"][: options.layers]
            part["vocab_size"] = options.vocabulary
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "config.json").write_text(json.dumps(raw), "utf-8")
    model = empty_model(DM05Config.from_json(options.folder), torch.device("cpu"), torch.bfloat16)
    generate_weights(model)
    write_tensors(options.folder / "model.safetensors", state_for_saving(model), {LM_HEAD: EMBEDDING})
    os.sync()


def forget(folder: Path) -> None:
    """Ask the system to drop the weights from its cache."""
    with (folder / "model.safetensors").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(world: World, folder: Path, load: Load, *, cold: bool) -> float:
    """Seconds until all ranks have the weights."""
    if cold and world.is_main:
        forget(folder)
    config = TrainConfig(model_config=ModelConfig(model_name_or_path=folder, load=load))
    dist.barrier()
    began = time.perf_counter()
    model = load_model(config, world, folder, "bf16")
    dist.barrier()
    seconds = time.perf_counter() - began
    del model
    return seconds


def main() -> int:
    options = parse_flags(Options, sys.argv[1:], prog="bench_load.py", description=__doc__)
    world = World.from_env(os.environ)
    join(world)
    if world.is_main:
        make(options)
    dist.barrier()
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(options.repeats):
        for cold in (True, False):
            for load in ("each", "broadcast"):
                seconds = measure(world, options.folder, load, cold=cold)
                found.setdefault((load, "cold" if cold else "warm"), []).append(seconds)
    if world.is_main:
        size = (options.folder / "model.safetensors").stat().st_size
        print(f"{size:,} bytes, {world.size} ranks on {world.device.type}, medians of {options.repeats}")
        for (load, cache), seconds in found.items():
            print(f"  {load:9} {cache}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})")
    leave()
    return 0


if __name__ == "__main__":
    run(main, "bench_load.py")
