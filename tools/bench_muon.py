"""Time the optimizer step of Muon + AdamW against AdamW alone, on the real shapes, in one run on one device.

    python tools/bench_muon.py --config checkpoints/DM05/config.json
    python tools/bench_muon.py --config tests/golden/tiny_dm05/config.json --steps 3        (a CPU, tiny)

"All" is everything that fine-tuning trains, "matrices" what Muon moves, "rest" what it leaves to AdamW. Gradients are
random; a step is timed from the first launch to the last result, clip norm left out. The last column is the ratio to
``AdamW, all`` of the same kind: torch's fused step, or ours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import freeze_untrained
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.muon import Muon, muon_parameters
from dm05_train.optim.muon_adamw import MuonAdamW
from dm05_train.optim.precision import Mode, weight_dtype
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


def shapes(config: Path, packed: bool) -> tuple[dict[str, torch.Size], dict[str, tuple[int, ...]]]:
    """Trainable parameters by name, and the matrices in the packed ones."""
    with torch.device("meta"):
        model = DM05(DM05Config.from_json(config))
    freeze_untrained(model)
    if packed:
        from dm05_train.perf.restructure import restructure

        restructure(model)
    splits = {name: tuple(rows for _, rows in parts) for name, parts in model.packed.items()}
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}, splits


def filled(wanted: dict[str, torch.Size], device: torch.device, dtype: torch.dtype) -> Named:
    """Parameters with weights and gradients of a sane size."""
    named = []
    for name, shape in wanted.items():
        weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype).normal_(0, 0.02))
        weight.grad = torch.empty_like(weight).normal_(0, 1e-4)
        named.append((name, weight))
    return named


def milliseconds(step: Callable[[], None], device: torch.device, steps: int) -> float:
    """Median time of a step, synchronised before and after."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for i in range(steps + 2):
        wait()
        start = time.perf_counter()
        step()
        wait()
        if i >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def stock_step(named: Named) -> Callable[[Tensor, Tensor], None]:
    """The step of torch's AdamW (fused where it can be), which takes its rate from elsewhere."""
    optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-5, fused=named[0][1].is_cuda)

    def step(lr: Tensor, grad_scale: Tensor) -> None:
        optimizer.step()

    return step


def optimizers(
    named: Named, mode: Mode, splits: dict[str, tuple[int, ...]], fused: bool
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], None]]]:
    """(what, its step) one after another; the state of the one before is free by then."""
    matrices, rest = muon_parameters(named)
    adamw, fastest = AdamW, Muon
    if fused:
        from dm05_train.perf.fused_adamw import FusedAdamW
        from dm05_train.perf.fused_muon import FusedMuon

        adamw, fastest = FusedAdamW, FusedMuon

    def adam(some: Named) -> AdamW:
        return adamw(some, betas=(0.9, 0.95), eps=1e-8, weight_decay=1e-10, mode=mode)

    def muon(kind: type[Muon], batched: bool) -> Muon:
        return kind(matrices, mode=mode, splits=splits, batched=batched)

    yield "torch AdamW, all", stock_step(named)
    yield "AdamW, all", adam(named).step
    yield "AdamW, rest", adam(rest).step
    yield "Muon, matrix by matrix", muon(Muon, batched=False).step
    yield "Muon, batched", muon(Muon, batched=True).step
    if fused:
        yield "Muon, batched and fused", muon(fastest, batched=True).step
    yield "Muon + AdamW, matrix by matrix", MuonAdamW(muon(Muon, batched=False), adam(rest)).step
    both = MuonAdamW(muon(fastest, batched=True), adam(rest))
    yield "Muon + AdamW, batched", both.step
    if both.side is not None:
        both.side = None
        yield "Muon + AdamW, one after another", both.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a DM05 config.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", default="bf16_compensated", choices=["fp32", "bf16", "bf16_compensated"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--packed", action="store_true", help="the restructured model (R16)")
    parser.add_argument("--plain", action="store_true", help="our reference steps and not the fused ones")
    arguments = parser.parse_args()
    device, mode = torch.device(arguments.device), arguments.mode
    wanted, splits = shapes(arguments.config, arguments.packed)
    named = filled(wanted, device, weight_dtype(mode))
    matrices, rest = muon_parameters(named)
    count = {k: sum(p.numel() for _, p in some) for k, some in (("matrices", matrices), ("rest", rest))}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"{where}, torch {torch.__version__}, {mode}, {len(matrices)} weights with {count['matrices'] / 1e6:.1f} M for"
    )
    print(f"Muon, {len(rest)} with {count['rest'] / 1e6:.1f} M for AdamW; median of {arguments.steps} steps")
    print(f"{'':32} {'ms':>9} {'x AdamW':>8}")
    lr, scale, base = torch.tensor(1e-5, device=device), torch.tensor(1.0, device=device), 0.0
    fused = device.type == "cuda" and not arguments.plain
    for what, step in optimizers(named, mode, splits, fused):
        taken = milliseconds(lambda step=step: step(lr, scale), device, arguments.steps)  # type: ignore[misc]
        base = taken if what.endswith("all") else base
        print(f"{what:32} {taken:9.3f} {taken / base:8.2f}", flush=True)


if __name__ == "__main__":
    main()
