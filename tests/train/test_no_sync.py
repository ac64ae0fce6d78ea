"""R7: nothing in a step waits for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dm05_train import loop
from training_runs import flags, losses, run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("optimizer", ["adamw", "muon_adamw"])
@pytest.mark.parametrize("graph", ["1", "0"])
def test_a_step_never_waits(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graph: str, optimizer: str
) -> None:
    """A whole run, loader and metrics included, under torch's sync debug mode once the first steps are over."""
    make_step, watched = loop.train_step, []

    def watched_step(made: loop.Run) -> tuple[torch.Tensor, torch.Tensor]:
        if made.step >= 6:  # compiled and captured by then
            torch.cuda.set_sync_debug_mode("error")
            watched.append(made.step)
        try:
            return make_step(made)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(loop, "train_step", watched_step)
    words = flags(
        workspace,
        tmp_path,
        steps=16,
        dataloader_num_workers=2,
        gradient_accumulation_steps=2,
        optimizer_config__optim=optimizer,
    )
    done = run(words, DM05_PERF_ENABLE="1", DM05_PERF_R18_CUDA_GRAPH=graph)
    assert done.returncode == 0, done.stderr
    assert watched == list(range(6, 16)) and len(losses(tmp_path)) == 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_debug_mode_sees_a_wait() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
