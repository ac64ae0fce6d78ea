"""Gradients of every parameter in BF16, all switches off and all on, each against float32 from the same weights.

    python tools/compare_gradients.py                                                       (released sizes, a GPU)
    python tools/compare_gradients.py --model-config tests/golden/tiny_dm05/config.json --prefix 64 --padded 96

An error is the norm of the difference over the norm of the float32 gradient. What the two BF16 paths do to it is
rounding when theirs are alike: neither was made from the other.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import torch
import tyro
from dm05_train.bench import SWITCHES, BenchConfig, Case, build, release, stepper, switches_of
from dm05_train.env import World
from dm05_train.model.config import DM05Config
from dm05_train.model.weights import released_tensors
from dm05_train.perf.switches import Switches
from torch import Tensor

Gradients = dict[str, Tensor]
# A bias of the keys shifts all scores of a query alike, which softmax takes out: its gradient is 0 but for rounding.
ZERO = "k_proj.bias"


def gradients(config: BenchConfig, model_config: DM05Config, switches: Switches, dtype: torch.dtype) -> Gradients:
    """All gradients of one batch, by released name, in float32."""
    world = World.from_env({})
    model = build(model_config, "bf16", world.device).to(dtype)
    case = Case(name="", switches=switches, mode="bf16")
    forward_backward, _ = stepper(config, case, model, world)
    loss = float(forward_backward())
    print(f"{dtype}, {'all on' if switches.enable else 'all off'}: loss {loss:.6f}", flush=True)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.float() for n, g in released_tensors(found, model.packed)}


def errors(of: Gradients, against: Gradients) -> dict[str, float]:
    """Relative error of each gradient."""
    return {n: float((of[n] - g).norm() / g.norm()) for n, g in against.items() if not n.endswith(ZERO)}


def main() -> None:
    config = tyro.cli(BenchConfig, description=__doc__, default=replace(BenchConfig(), per_device_batch=2))
    raw = json.loads(config.model_config.read_text("utf-8")) | {"chunk_size": config.chunk_size}
    model_config = DM05Config.from_dict(raw)
    exact = gradients(config, model_config, Switches(), torch.float32)
    found = {}
    for name, switches in {"all off": Switches(), "all on": switches_of(SWITCHES)}.items():
        release()
        found[name] = errors(gradients(config, model_config, switches, torch.bfloat16), exact)
    print(f"\n{len(exact)} gradients against float32 {'median':>10} {'95%':>10} {'worst':>10}")
    for name, those in found.items():
        ordered = sorted(those.values())
        worst = max(those, key=lambda n: those[n])
        print(
            f"{name:32} {statistics.median(ordered):10.4f} {ordered[int(0.95 * len(ordered))]:10.4f} "
            f"{ordered[-1]:10.4f}  {worst}"
        )
    ratios = sorted((found["all on"][n] / found["all off"][n], n) for n in found["all on"])
    median, (most, where) = statistics.median(r for r, _ in ratios), ratios[-1]
    print(f"error all on / all off: median {median:.3f}, most {most:.3f} ({where})")


if __name__ == "__main__":
    main()
