"""DDP in a group of one: on a GPU, whether CUDA graphs that hold NCCL's collectives train as those without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import environment

CASES = ["all", "bucket-25", "without-static-graph", "without-graphs", "muon"]


def test_a_group_of_one_trains_as_no_group() -> None:
    environ = environment()
    environ.pop("TRITON_INTERPRET", None)
    command, root = [sys.executable, "-m", "tests.train.group_of_one", *CASES], Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    for name in CASES:
        alone, grouped = rows["muon alone" if name == "muon" else "all alone"], rows[name]
        assert grouped["wrapped"] and not alone["wrapped"]
        assert grouped["graphed"] == (torch.cuda.is_available() and name != "without-graphs")
        gained = alone["losses"][0] - alone["losses"][-1]
        assert gained > 0
        assert grouped["losses"] == pytest.approx(alone["losses"], abs=0.02 * gained), name
