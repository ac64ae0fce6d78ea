"""``-m tests.train.group_of_one CASE ...``: losses of cases of bench_multi_gpu in a process group of one, as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from dm05_train.bench import release
from dm05_train.env import World, join, leave
from dm05_train.loop import train_step

from tools.bench_multi_gpu import Settings, prepare

CONFIG = Path(__file__).parents[1] / "golden" / "tiny_dm05" / "config.json"
STEPS = 14  # CUDA graphs are recorded in the first one, after 11 passes
SETTINGS = Settings(model_config=str(CONFIG), prefix=64, padded=96, precision="fp32", steps=STEPS)


def show(label: str, name: str, world: World) -> None:
    """Train the case and print its losses."""
    run, acceleration = prepare(name, SETTINGS, 2, world)
    losses = [float(train_step(run)[0]) for _ in range(STEPS)]
    row = {"case": label, "losses": losses, "wrapped": run.wrapped is not run.model}
    print(json.dumps(row | {"graphed": acceleration.on("cuda_graph")}), flush=True)
    del run
    release()


def main() -> None:
    """Each case as it is alone, and in a world that says it has two ranks, so that the model is wrapped."""
    world = World.from_env({})
    join(world)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
        )
        for name in ("all", "muon"):
            show(f"{name} alone", name, world)
        for name in sys.argv[1:]:
            show(name, name, replace(world, size=2))
        leave()


if __name__ == "__main__":
    main()
