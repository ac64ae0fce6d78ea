"""The processes of ``test_muon``: every run of it, on the first ``size`` ranks of one gloo group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from dm05_train.errors import TrainError
from dm05_train.optim.adamw import local
from dm05_train.optim.muon import Muon
from dm05_train.optim.precision import Mode, read_master
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SIZES = (1, 2, 3, 4)
COUNTS = (1, 8, 9, 19)
KINDS = ("plain", "packed", "frozen", "missing", "zero", "bf16", "sharded")
SHAPES = ((12, 20), (20, 12), (12, 12), (24, 12), (2, 12))
LR = torch.tensor(0.02)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: how many ranks, how many matrices, what is special about them, batched or not."""

    size: int
    count: int
    kind: str
    batched: bool


def runs() -> Iterator[Run]:
    """All runs, in an order that every process follows."""
    for size, count, kind, batched in product(SIZES, COUNTS, KINDS, (True, False)):
        yield Run(size=size, count=count, kind=kind, batched=batched)


def matrices(count: int, kind: str) -> list[Tensor]:
    """The weights that a run starts from."""
    generator = torch.Generator().manual_seed(count)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    return [torch.randn(*SHAPES[i % len(SHAPES)], generator=generator).to(dtype) for i in range(count)]


def _gradient(weight: Tensor, index: int, step: int, run: Run, rank: int) -> Tensor | None:
    if run.kind == "frozen" and index % 3 == 0:
        return None
    if run.kind == "missing" and index % 3 == 0 and rank == run.size - 1:
        return None
    if run.kind == "zero" and index % 3 == 1:
        return torch.zeros_like(weight)
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(weight.shape, generator=generator).to(weight.dtype)


def _train(run: Run, rank: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    mesh = DeviceMesh("cpu", list(range(run.size))) if run.kind == "sharded" else None

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) if mesh is not None else tensor

    weights = [nn.Parameter(place(weight)) for weight in matrices(run.count, run.kind)]
    if run.kind == "frozen":
        for weight in weights[::3]:
            weight.requires_grad_(False)
    mode: Mode = "bf16_compensated" if run.kind == "bf16" else "fp32"
    splits = {f"w{i}": (12, 6, 6) for i in range(3, run.count, len(SHAPES))} if run.kind == "packed" else {}
    named = [(f"w{i}", weight) for i, weight in enumerate(weights)]
    optimizer = Muon(named, weight_decay=0.1, mode=mode, splits=splits, batched=run.batched, group=group)
    for step in range(2):
        for i, weight in enumerate(weights):
            gradient = _gradient(torch.empty(weight.shape, dtype=weight.dtype), i, step, run, rank)
            weight.grad = None if gradient is None else place(gradient)
        optimizer.step(LR, torch.tensor(0.5))
    if run.kind == "bf16":
        return [read_master(weight.detach(), optimizer.state[weight]) for weight in weights]
    return [w.full_tensor() if isinstance(w, DTensor) else w.detach() for w in weights]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20, bias=False), nn.Tanh(), nn.Linear(20, 10, bias=False))


def _train_model(parallel: str, rank: int, size: int, batched: bool, group: dist.ProcessGroup) -> list[Tensor]:
    """Three steps of two accumulated micro-batches through the real wrappers; each rank has its own data."""
    model = _model()
    named = list(model.named_parameters())
    wrapped: nn.Module = model
    if parallel == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=group)
    elif parallel == "fsdp":
        wrapped = fully_shard(model, mesh=DeviceMesh("cpu", list(range(size))))
        named = list(wrapped.named_parameters())
    optimizer = Muon(named, mode="fp32", batched=batched, group=group)
    for step in range(3):
        data = torch.randn(2, 4, 3, 12, generator=torch.Generator().manual_seed(step))
        for micro in data:
            batch = micro.tensor_split(size)[rank] if parallel != "none" else micro
            wrapped(batch.flatten(0, 1)).square().mean().backward()
        optimizer.step(LR, torch.tensor(1.0))
        model.zero_grad()
    return [w.full_tensor() if isinstance(w, DTensor) else w.detach() for _, w in named]


def _disagree(rank: int, group: dist.ProcessGroup) -> str:
    """What is said when one rank has built its optimizer without the second matrix."""
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    named = [(f"w{i}", weight) for i, weight in enumerate(weights)][: 1 if rank == 1 else 2]
    try:
        Muon(named, mode="fp32", group=group).step(LR, torch.tensor(1.0))
    except TrainError as error:
        return str(error)
    return "no error"


def run_rank(rank: int, world: int, folder: Path) -> None:
    """Body of one process: its results of all runs go to ``folder/<rank>.pt``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    results: dict[object, object] = {}
    for run in runs():
        if rank < run.size:
            results[run, rank] = _train(run, rank, groups[run.size])
        elif run.kind == "sharded":
            DeviceMesh("cpu", list(range(run.size)))
    for parallel, batched in product(("ddp", "fsdp"), (True, False)):
        results[parallel, batched, rank] = _train_model(parallel, rank, world, batched, groups[world])
    if rank == 0:
        results["none"] = _train_model("none", 0, 1, False, groups[1])
    results["disagree", rank] = _disagree(rank, groups[world])
    assert all(local(t).isfinite().all() for t in results.values() if isinstance(t, Tensor))
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()
