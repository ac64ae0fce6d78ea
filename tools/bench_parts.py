"""The floor beneath a step: its matmuls and its vision attention alone, at the step's shapes, one kind after another.

    python tools/bench_parts.py                                                             (a GPU, the released sizes)
    python tools/bench_parts.py --config tests/golden/tiny_dm05/config.json --seconds 0.01  (a CPU, tiny)

Each matmul is timed as the output (``fwd``), the gradient of the input (``dx``) and of the weight (``dw``), on random
values, for long enough that the card's power limit acts as it does in training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from dm05_train.bench import matmul_rate
from dm05_train.env import World
from dm05_train.model.config import RELEASED, DM05Config
from dm05_train.timing import moment, seconds_between


@dataclass(frozen=True, kw_only=True)
class Linear:
    """``layers`` matrices [outputs, inputs], each applied to ``rows`` rows."""

    name: str
    rows: int
    inputs: int
    outputs: int
    layers: int


def linears(config: DM05Config, batch: int, prefix: int) -> Iterator[Linear]:
    """The matmuls of vision tower and language model as R16 packs them; the last language layer has keys and values."""
    vision, text = config.vision, config.text
    width, inner = vision.hidden_size, vision.intermediate_size
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, inner), "down": (inner, width)}
    for name, (inputs, outputs) in shapes.items():
        rows = 2 * batch * vision.patches_per_side**2
        yield Linear(name=f"vision {name}", rows=rows, inputs=inputs, outputs=outputs, layers=vision.num_layers)
    width, inner = text.hidden_size, text.intermediate_size
    heads, kv = text.num_heads * text.head_dim, 2 * text.num_kv_heads * text.head_dim
    shapes = {"qkv": (width, heads + kv), "out": (heads, width), "gate/up": (width, 2 * inner), "down": (inner, width)}
    for name, (inputs, outputs) in shapes.items():
        layers = text.num_layers - 1
        yield Linear(name=f"language {name}", rows=batch * prefix, inputs=inputs, outputs=outputs, layers=layers)


def seconds(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """Mean seconds of a call, over about ``budget`` seconds of calls."""
    for _ in range(3):
        start = moment(device)
        work()
        once = seconds_between(start, moment(device))
    calls = max(3, int(budget / once))
    start = moment(device)
    for _ in range(calls):
        work()
    return seconds_between(start, moment(device)) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=RELEASED)
    parser.add_argument("--per-device-batch", type=int, default=8)
    parser.add_argument("--prefix", type=int, default=568)
    parser.add_argument("--seconds", type=float, default=0.15)
    options = parser.parse_args()
    device = World.from_env({}).device
    config = DM05Config.from_json(options.config)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    print(f"a large matmul: {matmul_rate(device) / 1e12:.0f} TFLOP/s")
    total, flops = 0.0, 0.0
    for linear in linears(config, options.per_device_batch, options.prefix):
        x, w = random(linear.rows, linear.inputs), random(linear.outputs, linear.inputs)
        g, work = random(linear.rows, linear.outputs), 2 * linear.rows * linear.inputs * linear.outputs
        words = []
        for name, a, b in (("fwd", x, w.t()), ("dx", g, w), ("dw", g.t(), x)):
            once = seconds(partial(torch.mm, a, b), device, options.seconds)
            total, flops = total + once * linear.layers, flops + work * linear.layers
            words.append(f"{name} {once * 1e3:.3f} ms ({work / once / 1e12:.0f} TFLOP/s)")
        print(f"{linear.name:17} x {linear.layers}  {'  '.join(words)}")
    print(f"all matmuls: {total * 1e3:.1f} ms for {flops / 1e12:.1f} TFLOP, {flops / total / 1e12:.0f} TFLOP/s")

    vision = config.vision
    images, patches = 2 * options.per_device_batch, vision.patches_per_side**2
    heads = (images, patches, vision.num_heads, vision.hidden_size // vision.num_heads)
    q, k, v = (random(*heads).transpose(1, 2).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v)
    g = torch.randn_like(out)
    forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v), device, options.seconds)
    backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True), device, options.seconds)
    forward, backward = (x * 1e3 * vision.num_layers for x in (forward, backward))
    print(f"vision attention: {forward:.1f} ms forward, {backward:.1f} ms backward, all {vision.num_layers} layers")


if __name__ == "__main__":
    main()
