"""The vision tower's packed q/k/v projection; its backward gathers three gradients into one and sums the bias."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dm05_train.perf.ops.common import HAVE_TRITON, next_power_of_2, sum_rows, use_kernels

ROWS_A_PROGRAM = 32

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _gather_heads(
        g_q, g_k, g_v, d_qkv, partial, rows, length, s_batch, s_head, s_token,
        HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, LANES: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        """Gradients [B, HEADS, N, DIM] (DIM dense) into rows of [B * N, 3 * HEADS * DIM]; program (row group, part)."""
        part, first = tl.program_id(1), tl.program_id(0).to(tl.int64) * ROWS
        head, lane = tl.arange(0, H)[:, None], tl.arange(0, LANES)[None, :]
        inside = (head < HEADS) & (lane < DIM)
        source = g_q if part == 0 else (g_k if part == 1 else g_v)
        total = tl.zeros((H, LANES), tl.float32)
        for row in tl.range(first, tl.minimum(first + ROWS, rows), num_stages=STAGES):
            batch, token = row // length, row % length
            g = tl.load(source + batch * s_batch + head * s_head + token * s_token + lane, mask=inside, other=0.0)
            tl.store(d_qkv + (row * 3 + part) * HEADS * DIM + head * DIM + lane, g, mask=inside)
            total += g.to(tl.float32)
        place = partial + (tl.program_id(0) * 3 + part) * HEADS * DIM + head * DIM + lane
        tl.store(place, total, mask=inside)


class _VisionQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, width = h.shape
        rows = h.reshape(-1, width)
        qkv = torch.addmm(bias, rows, weight.t()).view(batch, length, 3, heads, -1)
        ctx.save_for_backward(rows, weight)
        ctx.heads, ctx.shape = heads, h.shape
        return tuple(qkv[:, :, i].transpose(1, 2) for i in range(3))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, g_q: Tensor, g_k: Tensor, g_v: Tensor) -> tuple[Tensor | None, ...]:
        h, weight = ctx.saved_tensors
        batch, length, _ = ctx.shape
        if not g_q.stride() == g_k.stride() == g_v.stride() or g_q.stride(-1) != 1:
            g_q, g_k, g_v = (g.contiguous() for g in (g_q, g_k, g_v))
        rows = batch * length
        d_qkv, groups = h.new_empty((rows, weight.shape[0])), -(-rows // ROWS_A_PROGRAM)
        partial = torch.empty((groups, weight.shape[0]), dtype=torch.float32, device=h.device)
        dim = g_q.shape[-1]
        _gather_heads[(groups, 3)](
            g_q, g_k, g_v, d_qkv, partial, rows, length, g_q.stride(0), g_q.stride(1), g_q.stride(2),
            HEADS=ctx.heads, DIM=dim, ROWS=ROWS_A_PROGRAM,
            H=next_power_of_2(ctx.heads), LANES=next_power_of_2(dim), STAGES=2, num_warps=4,
        )  # fmt: skip
        d_h = (d_qkv @ weight).view(ctx.shape)
        return d_h, d_qkv.t() @ h, sum_rows(partial, weight.dtype), None


def vision_qkv_plain(h: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of ``vision_qkv``."""
    qkv = F.linear(h, weight, bias).unflatten(-1, (3, heads, -1))
    return tuple(qkv[:, :, i].transpose(1, 2) for i in range(3))  # type: ignore[return-value]


def vision_qkv(h: Tensor, weight: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """h [B, N, C], packed weight [3C, C] and bias [3C] -> queries, keys and values [B, H, N, D]."""
    if use_kernels(h):
        return _VisionQKV.apply(h, weight, bias, heads)  # type: ignore[no-any-return]
    return vision_qkv_plain(h, weight, bias, heads)
