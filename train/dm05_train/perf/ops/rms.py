"""Residual add between two Gemma RMSNorms: ``x += norm(out); h = norm(x)``, one pass forward, one backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dm05_train.model.layers import rms_normalise
from dm05_train.perf.ops.common import HAVE_TRITON, WALKERS, next_power_of_2, sum_rows, use_kernels

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _add_rms_norm(
        out, x, w_out, w_next, x_new, h, scale_out, scale_next, eps, N: tl.constexpr, BLOCK: tl.constexpr
    ):
        row, at = tl.program_id(0), tl.arange(0, BLOCK)
        inside, here = at < N, tl.program_id(0) * N + tl.arange(0, BLOCK)
        dtype = x_new.dtype.element_ty
        o = tl.load(out + here, mask=inside, other=0.0).to(tl.float32)
        a = tl.rsqrt(tl.sum(o * o, 0) / N + eps)
        w = tl.load(w_out + at, mask=inside, other=0.0).to(tl.float32)
        added = (o * a * (1.0 + w)).to(dtype).to(tl.float32)
        new = (tl.load(x + here, mask=inside, other=0.0).to(tl.float32) + added).to(dtype)
        tl.store(x_new + here, new, mask=inside)
        new = new.to(tl.float32)
        b = tl.rsqrt(tl.sum(new * new, 0) / N + eps)
        w = tl.load(w_next + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(h + here, (new * b * (1.0 + w)).to(dtype), mask=inside)
        tl.store(scale_out + row, a)
        tl.store(scale_next + row, b)

    @triton.jit
    def _add_rms_norm_backward(
        g_x, g_h, out, x_new, w_out, w_next, scale_out, scale_next, d_x, d_out, partial, rows,
        N: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        at = tl.arange(0, BLOCK)
        inside = at < N
        dtype = d_x.dtype.element_ty
        w_o = tl.load(w_out + at, mask=inside, other=0.0).to(tl.float32) + 1.0
        w_n = tl.load(w_next + at, mask=inside, other=0.0).to(tl.float32) + 1.0
        d_w_o, d_w_n = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
            here = row * N + at
            a, b = tl.load(scale_out + row), tl.load(scale_next + row)
            n = tl.load(x_new + here, mask=inside, other=0.0).to(tl.float32) * b
            g = tl.load(g_h + here, mask=inside, other=0.0).to(tl.float32)
            d_w_n += g * n
            g = g * w_n
            d = b * (g - n * (tl.sum(g * n, 0) / N)) + tl.load(g_x + here, mask=inside, other=0.0).to(tl.float32)
            d = d.to(dtype)
            tl.store(d_x + here, d, mask=inside)
            n = tl.load(out + here, mask=inside, other=0.0).to(tl.float32) * a
            g = d.to(tl.float32)
            d_w_o += g * n
            g = g * w_o
            tl.store(d_out + here, (a * (g - n * (tl.sum(g * n, 0) / N))).to(dtype), mask=inside)
        tl.store(partial + (tl.program_id(0) * 2) * N + at, d_w_o, mask=inside)
        tl.store(partial + (tl.program_id(0) * 2 + 1) * N + at, d_w_n, mask=inside)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, w_out: Tensor, w_next: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, x, width = out.contiguous(), x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        x_new, h = torch.empty_like(x), torch.empty_like(x)
        scales = torch.empty((2, rows), dtype=torch.float32, device=x.device)
        _add_rms_norm[(rows,)](
            out, x, w_out, w_next, x_new, h, scales[0], scales[1], eps,
            N=width, BLOCK=next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(out, x_new, w_out, w_next, scales)
        return x_new, h

    @staticmethod
    def backward(ctx: Any, g_x: Tensor, g_h: Tensor) -> tuple[Tensor | None, ...]:
        out, x_new, w_out, w_next, scales = ctx.saved_tensors
        width = out.shape[-1]
        rows = out.numel() // width
        d_x, d_out = torch.empty_like(out), torch.empty_like(out)
        walkers = min(2 * WALKERS, rows)
        partial = torch.empty((walkers, 2, width), dtype=torch.float32, device=out.device)
        _add_rms_norm_backward[(walkers,)](
            g_x.contiguous(), g_h.contiguous(), out, x_new, w_out, w_next, scales[0], scales[1], d_x, d_out, partial,
            rows, N=width, BLOCK=next_power_of_2(width), STAGES=3, num_warps=8,
        )  # fmt: skip
        d_w_out, d_w_next = sum_rows(partial, w_out.dtype)
        return d_out, d_x, d_w_out, d_w_next, None


def add_rms_norm_plain(out: Tensor, x: Tensor, w_out: Tensor, w_next: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The twin of ``add_rms_norm``."""
    x = x + (rms_normalise(out, eps) * (1.0 + w_out.float())).to(x.dtype)
    return x, (rms_normalise(x, eps) * (1.0 + w_next.float())).to(x.dtype)


def add_rms_norm(out: Tensor, x: Tensor, w_out: Tensor, w_next: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + norm(out, w_out)``, and the norm of that with ``w_next``; all [..., C], weights [C] as offsets from 1."""
    if use_kernels(x):
        return _AddRMSNorm.apply(out, x, w_out, w_next, eps)  # type: ignore[no-any-return]
    return add_rms_norm_plain(out, x, w_out, w_next, eps)
