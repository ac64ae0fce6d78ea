"""R7: nothing in a step waits for the device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import environment, flags, losses

FIRST = 6  # compiled and captured by then


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("optimizer", ["adamw", "muon_adamw"])
@pytest.mark.parametrize("graph", ["1", "0"])
def test_a_step_never_waits(workspace: Path, tmp_path: Path, graph: str, optimizer: str) -> None:
    """A whole run, loader and metrics included, under torch's sync debug mode once the first steps are over."""
    words = flags(
        workspace,
        tmp_path,
        steps=16,
        dataloader_num_workers=2,
        gradient_accumulation_steps=2,
        optimizer_config__optim=optimizer,
    )
    environ = environment(DM05_PERF_ENABLE="1", DM05_PERF_R18_CUDA_GRAPH=graph)
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "no_sync.py", str(FIRST), *words],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [int(n) for n in re.findall(r"watched (\d+)", done.stdout)] == list(range(FIRST, 16))
    assert len(losses(tmp_path)) == 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_debug_mode_sees_a_wait() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
