"""One rank of the equality test: trains the golden model over every split of one global batch that it takes part in.

python rank_equal.py RANK FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from dm05_train.env import World, leave
from dm05_train.loop import train_step
from dm05_train.metrics import StepLog
from golden_run import config, golden_run

GLOBAL_BATCH, STEPS = 48, 2
SPLITS = [("ddp", ranks, accumulation) for ranks in (1, 2, 3, 4) for accumulation in (1, 2, 4)]
SPLITS += [("fsdp", 2, 2), ("fsdp", 3, 1), ("buckets", 2, 2), ("buckets", 4, 1)]


def curve(world: World, parallel: str, accumulation: int) -> dict[str, list[float]]:
    batch = GLOBAL_BATCH // (world.size * accumulation)
    buckets = {"bucket_mb": 1, "static_graph": True} if parallel == "buckets" else {}
    kind = "fsdp" if parallel == "fsdp" else "ddp"
    run = golden_run(config(steps=STEPS, batch=batch, accumulation=accumulation, parallel=kind), world, **buckets)
    log = StepLog(world, 1, lag=False)
    results = [log.add(run.step, run.rate(), *train_step(run))[0] for _ in range(STEPS)]
    return {"loss": [r.loss for r in results], "grad_norm": [r.grad_norm for r in results]}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    for parallel, size, accumulation in SPLITS:
        if rank >= size:
            continue
        name = f"{parallel}-{size}-{accumulation}"
        if size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/{name}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=120),
            )
        found = curve(World(rank=rank, size=size, local_rank=rank, local_size=size), parallel, accumulation)
        leave()
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
