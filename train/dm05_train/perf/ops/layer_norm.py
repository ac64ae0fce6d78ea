"""Bias, residual add and LayerNorm: ``x += out + bias; h = norm(x)``, one pass forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dm05_train.perf.ops.common import HAVE_TRITON, WALKERS, next_power_of_2, sum_rows, use_kernels

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _add_layer_norm(out, bias, x, weight, shift, x_new, h, stats, eps, N: tl.constexpr, BLOCK: tl.constexpr):
        row, at = tl.program_id(0), tl.arange(0, BLOCK)
        inside, here = at < N, row * N + at
        dtype = x_new.dtype.element_ty
        o = tl.load(out + here, mask=inside, other=0.0).to(tl.float32)
        o = (o + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        new = (tl.load(x + here, mask=inside, other=0.0).to(tl.float32) + o).to(dtype)
        tl.store(x_new + here, new, mask=inside)
        new = new.to(tl.float32)
        mean = tl.sum(new, 0) / N
        centred = tl.where(inside, new - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 0) / N + eps)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(h + here, (centred * scale * w + b).to(dtype), mask=inside)
        tl.store(stats + row * 2, mean)
        tl.store(stats + row * 2 + 1, scale)

    @triton.jit
    def _add_layer_norm_backward(
        g_x, g_h, x_new, weight, stats, d_x, partial, rows,
        N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        at = tl.arange(0, BLOCK)
        inside = at < N
        dtype = d_x.dtype.element_ty
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        d_bias, d_weight = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        d_shift = tl.zeros((BLOCK,), tl.float32)
        for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
            here = row * N + at
            mean, scale = tl.load(stats + row * 2), tl.load(stats + row * 2 + 1)
            n = (tl.load(x_new + here, mask=inside, other=0.0).to(tl.float32) - mean) * scale
            n = tl.where(inside, n, 0.0)
            g = tl.load(g_h + here, mask=inside, other=0.0).to(tl.float32)
            d_weight += g * n
            d_shift += g
            g = g * w
            d = scale * (g - tl.sum(g, 0) / N - n * (tl.sum(g * n, 0) / N))
            d = (d + tl.load(g_x + here, mask=inside, other=0.0).to(tl.float32)).to(dtype)
            tl.store(d_x + here, d, mask=inside)
            d_bias += d.to(tl.float32)
        base = partial + tl.program_id(0) * 3 * N + at
        tl.store(base, d_bias, mask=inside)
        tl.store(base + N, d_weight, mask=inside)
        tl.store(base + 2 * N, d_shift, mask=inside)


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, bias: Tensor, x: Tensor, weight: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        out, x, width = out.contiguous(), x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        x_new, h = torch.empty_like(x), torch.empty_like(x)
        stats = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
        _add_layer_norm[(rows,)](
            out, bias, x, weight, shift, x_new, h, stats, eps, N=width, BLOCK=next_power_of_2(width), num_warps=4
        )
        ctx.save_for_backward(x_new, weight, stats)
        return x_new, h

    @staticmethod
    def backward(ctx: Any, g_x: Tensor, g_h: Tensor) -> tuple[Tensor | None, ...]:
        x_new, weight, stats = ctx.saved_tensors
        width, rows = x_new.shape[-1], x_new.numel() // x_new.shape[-1]
        d_x = torch.empty_like(x_new)
        walkers = min(WALKERS, rows)
        partial = torch.empty((walkers, 3, width), dtype=torch.float32, device=x_new.device)
        _add_layer_norm_backward[(walkers,)](
            g_x.contiguous(), g_h.contiguous(), x_new, weight, stats, d_x, partial, rows,
            N=width, BLOCK=next_power_of_2(width), STAGES=3, num_warps=4,
        )  # fmt: skip
        d_bias, d_weight, d_shift = sum_rows(partial, weight.dtype)
        return d_x, d_bias, d_x, d_weight, d_shift, None


def add_layer_norm_plain(
    out: Tensor, bias: Tensor, x: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The twin of ``add_layer_norm``."""
    x = x + (out + bias)
    return x, F.layer_norm(x, x.shape[-1:], weight, shift, eps)


def add_layer_norm(
    out: Tensor, bias: Tensor, x: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``x + out + bias`` and its LayerNorm; out and x [..., C], the rest [C]."""
    if use_kernels(x):
        return _AddLayerNorm.apply(out, bias, x, weight, shift, eps)  # type: ignore[no-any-return]
    return add_layer_norm_plain(out, bias, x, weight, shift, eps)
