"""``group_of_one.py CASE ...``: the losses of cases of bench_multi_gpu in a process group of one, as JSON lines."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from bench_multi_gpu import Settings, prepare  # noqa: E402
from dm05_train.bench import release  # noqa: E402
from dm05_train.env import World, leave  # noqa: E402
from dm05_train.loop import train_step  # noqa: E402

CONFIG = ROOT / "tests" / "golden" / "tiny_dm05" / "config.json"
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
    cuda = torch.cuda.is_available()
    world = World(device=torch.device("cuda", 0) if cuda else torch.device("cpu"))
    if cuda:
        torch.cuda.set_device(world.device)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
        for name in ("all", "muon"):
            show(f"{name} alone", name, world)
        for name in sys.argv[1:]:
            show(name, name, replace(world, size=2))
        leave()


if __name__ == "__main__":
    main()
