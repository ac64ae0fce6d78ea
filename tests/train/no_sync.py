"""A run of ``dm05-train`` whose steps are watched by torch's sync debug mode; run alone, for its kernels are compiled.

python no_sync.py FIRST FLAG...          prints the steps that were watched, from FIRST on
"""

from __future__ import annotations

import sys

import torch
from dm05_train import loop
from dm05_train.cli import main

make_step, first = loop.train_step, int(sys.argv.pop(1))


def watched_step(run: loop.Run) -> tuple[torch.Tensor, torch.Tensor]:
    """A step in which a wait for the device is an error."""
    if run.step >= first:
        torch.cuda.set_sync_debug_mode("error")
        print(f"watched {run.step}", flush=True)
    try:
        return make_step(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


loop.train_step = watched_step
main()
