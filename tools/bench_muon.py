"""Time the optimizer step of Muon + AdamW against AdamW alone, on the real shapes, in one run on one device.

    python tools/bench_muon.py --config checkpoints/DM05/config.json
    python tools/bench_muon.py --config tests/golden/tiny_dm05/config.json --steps 3        (a CPU, tiny)

"All" is everything that fine-tuning trains, "rest" what Muon leaves to AdamW. Gradients are random. Each row is timed
without and with the clip before the step: its norm and, for torch, its pass over the gradients. Ratios are to our
``AdamW, all``.

On a GPU the times are the device's: it is kept busy while the host launches, as the backward pass does in training.
(The launches of a step matrix by matrix are more than the device's queue holds; there the host's share counts.)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

# Some 100 ms of an H200.
SPIN_CYCLES = 200_000_000

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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row: a step from a rate and a clip factor, and what finds (norm, factor) before it."""

    name: str
    step: Callable[[Tensor, Tensor], None]
    clip: Callable[[float], tuple[Tensor, Tensor]]


def milliseconds(work: Callable[[], None], device: torch.device, steps: int) -> float:
    """Median time of a call after two more; on a GPU from event to event, behind a spin that covers the launches."""
    times = []
    for _ in range(steps + 2):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def stock(named: Named) -> Case:
    """torch's AdamW (fused where it can be), which takes its rate from elsewhere, and torch's clip."""
    parameters = [p for _, p in named]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=parameters[0].is_cuda)
    one = torch.ones((), device=parameters[0].device)

    def step(lr: Tensor, grad_scale: Tensor) -> None:
        optimizer.step()

    def clip(max_norm: float) -> tuple[Tensor, Tensor]:
        return nn.utils.clip_grad_norm_(parameters, max_norm), one

    return Case(name="torch AdamW, all", step=step, clip=clip)


def cases(named: Named, mode: Mode, splits: dict[str, tuple[int, ...]], fused: bool) -> Iterator[Case]:
    """One after another; the state of the one before is free by then."""
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

    def case(name: str, optimizer: AdamW | Muon | MuonAdamW) -> Case:
        return Case(name=name, step=optimizer.step, clip=optimizer.clip_scale)

    yield case("AdamW, all", adam(named))
    yield stock(named)
    yield case("AdamW, rest", adam(rest))
    yield case("Muon, matrix by matrix", muon(Muon, batched=False))
    yield case("Muon, batched", muon(Muon, batched=True))
    if fused:
        yield case("Muon, batched and fused", muon(fastest, batched=True))
    yield case("Muon + AdamW, matrix by matrix", MuonAdamW(muon(Muon, batched=False), adam(rest)))
    both = MuonAdamW(muon(fastest, batched=True), adam(rest))
    if both.side is not None:
        yield case("Muon + AdamW, beside each other", both)
        both.side = None
    yield case("Muon + AdamW, one after another", both)


def times(case: Case, lr: Tensor, one: Tensor, device: torch.device, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and of a step with its clip."""
    alone = milliseconds(lambda: case.step(lr, one), device, steps)
    return alone, milliseconds(lambda: case.step(lr, case.clip(1.0)[1]), device, steps)


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
    print(f"{'':32} {'step ms':>9} {'x AdamW':>8} {'with clip':>10} {'x AdamW':>8}")
    lr, one, base = torch.tensor(1e-5, device=device), torch.tensor(1.0, device=device), None
    for case in cases(named, mode, splits, device.type == "cuda" and not arguments.plain):
        alone, clipped = times(case, lr, one, device, arguments.steps)
        base = base or (alone, clipped)
        ratio, clipped_ratio = alone / base[0], clipped / base[1]
        print(f"{case.name:32} {alone:9.3f} {ratio:8.2f} {clipped:10.3f} {clipped_ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
