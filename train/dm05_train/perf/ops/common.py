"""When kernels apply, how work is cut, and two movements of data that several operations need."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

HAVE_TRITON = importlib.util.find_spec("triton") is not None
# Programs that walk rows and keep a partial sum each: two a multiprocessor of an H200. How many rows each fetches ahead
# (STAGES, where it is called) is what measured best there.
WALKERS = 264

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _sum_rows(source, target, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, rows, ROWS):
            row = first + tl.arange(0, ROWS)[:, None]
            total += tl.load(source + row * width + at, mask=(row < rows) & (at < width), other=0.0)
        out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + out, tl.sum(total, 0).to(target.dtype.element_ty), mask=out < width)

    @triton.jit
    def _swap_heads(source, target, A: tl.constexpr, B: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
        """[.., A, B, D] -> [.., B, A, D]; program (outer and a, block of b)."""
        outer, a = tl.program_id(0) // A, tl.program_id(0) % A
        b = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        at, base = tl.arange(0, D)[None, :], outer.to(tl.int64) * A * B * D
        x = tl.load(source + base + (a * B + b) * D + at, mask=b < B, other=0.0)
        tl.store(target + base + (b * A + a) * D + at, x, mask=b < B)


def use_kernels(x: Tensor) -> bool:
    """Whether ``x`` goes through the kernels rather than their plain twins."""
    return HAVE_TRITON and x.is_cuda


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def sum_rows(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 [R, ...] summed over its rows, as [...] of ``dtype``."""
    width = partial[0].numel()
    out = torch.empty(partial.shape[1:], dtype=dtype, device=partial.device)
    _sum_rows[(-(-width // 32),)](partial, out, len(partial), width, ROWS=64, BLOCK=32, num_warps=4)
    return out


def swap_heads(x: Tensor) -> Tensor:
    """[N, A, B, D] -> contiguous [N, B, A, D] (D a power of two)."""
    outer, a, b, dim = x.shape
    x, out = x.contiguous(), x.new_empty((outer, b, a, dim))
    block = max(1, 4096 // dim)
    _swap_heads[(outer * a, -(-b // block))](x, out, A=a, B=b, D=dim, BLOCK=block, num_warps=4)
    return out
