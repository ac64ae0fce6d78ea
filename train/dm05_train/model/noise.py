"""Noise and flow times as a pure function of (seed, global sample position).

A counter-based generator (SplitMix64) instead of torch's: the draw of a sample does not depend on how a global batch is
cut over ranks and accumulation steps, runs on the device without state, and can be replayed in a CUDA graph.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASK_24 = (1 << 24) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 torch wants."""
    return value - (1 << 64) if value >= 1 << 63 else value


GOLDEN, MIX_1, MIX_2 = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's ``>>`` on int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hash64(x: Tensor) -> Tensor:
    """SplitMix64's output function on int64 tensors (wrapping arithmetic)."""
    x = x + GOLDEN
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def uniform(x: Tensor) -> Tensor:
    """Hashes to float64 strictly inside (0, 1), 24 bits of them."""
    return ((_shift_right(x, 40) & MASK_24).double() + 0.5) / (1 << 24)


def draw(seed: int, positions: Tensor, chunk: int, action_dim: int) -> tuple[Tensor, Tensor]:
    """Noise float32 [B, chunk, action_dim] (standard normal) and times float32 [B] (Beta(1.5, 1) * 0.999 + 0.001).

    Args:
        seed: of the run.
        positions: int64 [B], global sample positions (how many samples were drawn before this one).
    """
    device = positions.device
    key = hash64(positions + hash64(torch.full((), seed, dtype=torch.int64, device=device)))
    count = chunk * action_dim
    counters = torch.arange(2 * count + 1, device=device)
    u = uniform(hash64(key[:, None] + hash64(counters)))
    radius = torch.sqrt(-2.0 * torch.log(u[:, :count]))
    noise = radius * torch.cos(2.0 * math.pi * u[:, count : 2 * count])
    time = u[:, -1] ** (1 / 1.5) * 0.999 + 0.001  # the inverse of Beta(1.5, 1)'s distribution function x**1.5
    return noise.float().unflatten(1, (chunk, action_dim)), time.float()
