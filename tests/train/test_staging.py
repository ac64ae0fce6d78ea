"""Bytes of tensors on their way to a file: in order, whole, from the host or a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dm05_train import snapshot as snapshots
from dm05_train.env import World
from dm05_train.loop import train_step
from dm05_train.snapshot import take_snapshot
from dm05_train.staging import STAGE_BYTES, Staging
from golden_run import config, golden_run
from torch import Tensor

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def whole(tensors: list[Tensor]) -> bytes:
    return b"".join(t.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors)


def test_host_tensors_come_as_they_are() -> None:
    tensors = [torch.arange(10.0), torch.arange(6, dtype=torch.int16).view(2, 3).T, torch.zeros(0), torch.tensor(3.5)]
    assert b"".join(Staging(CPU, 2).bytes_of(tensors)) == whole(tensors)


@needs_gpu
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_gpu_tensors_come_whole_however_long(extra: int) -> None:
    """Around one and two buffers, by more readers than there are buffers."""
    device = torch.device("cuda", 0)
    sizes = [STAGE_BYTES + extra, 2 * STAGE_BYTES + extra, 5]
    groups = [[torch.randint(0, 255, (n,), dtype=torch.uint8, device=device) for n in sizes] for _ in range(4)]
    staging = Staging(device, 2)
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda tensors: b"".join(map(bytes, staging.bytes_of(tensors))), groups))
    assert read == [whole(tensors) for tensors in groups]


@needs_gpu
@pytest.mark.parametrize("spare", [snapshots.SPARE_GPU_BYTES, 1 << 60])
def test_a_snapshot_on_a_gpu_does_not_follow_the_run(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    """Copied on the GPU, and to the host where there is no room; the steps after it change nothing in it."""
    monkeypatch.setattr(snapshots, "SPARE_GPU_BYTES", spare)
    world = World(device=torch.device("cuda", 0))
    run = golden_run(config(batch=3), world)
    run.batches = ({k: v.cuda() if v.ndim > 1 else v for k, v in batch.items()} for batch in run.batches)
    train_step(run)
    before = {name: p.detach().cpu() for name, p in run.model.named_parameters()}
    snapshot = take_snapshot(run)
    for _ in range(3):
        train_step(run)
    assert snapshot.ready is not None
    snapshot.ready.synchronize()
    held = snapshot.files[snapshots.MODEL_FILE]
    assert all(torch.equal(held[name].cpu(), before[name]) for name in before)
    assert (next(iter(held.values())).is_cuda) == (spare < 1 << 60)
