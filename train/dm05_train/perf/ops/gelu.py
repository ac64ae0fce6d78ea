"""GELU (tanh form): gated, on a packed gate/up projection; and plain, with the column sums its bias gradient needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dm05_train.perf.ops.common import HAVE_TRITON, sum_rows, use_kernels

BLOCK = 1024
ROWS_A_PROGRAM = 64

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _gelu(x):
        """GELU(x) and its slope; ``tanh(z)`` as ``2 sigmoid(2z) - 1``."""
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        s = 1.0 / (1.0 + tl.exp(-inner))
        slope = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * s, slope

    @triton.jit
    def _gated_gelu(gate_up, act, N: tl.constexpr, BLOCK: tl.constexpr):
        row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < N
        dtype = act.dtype.element_ty
        gate = tl.load(gate_up + row * 2 * N + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * N + N + at, mask=inside, other=0.0).to(tl.float32)
        value, _ = _gelu(gate)
        tl.store(act + row * N + at, (value.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)

    @triton.jit
    def _gated_gelu_backward(gate_up, g_act, d_gate_up, N: tl.constexpr, BLOCK: tl.constexpr):
        row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < N
        dtype = d_gate_up.dtype.element_ty
        gate = tl.load(gate_up + row * 2 * N + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * N + N + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_act + row * N + at, mask=inside, other=0.0).to(tl.float32)
        value, slope = _gelu(gate)
        tl.store(d_gate_up + row * 2 * N + at, (g * up * slope).to(dtype), mask=inside)
        tl.store(d_gate_up + row * 2 * N + N + at, (g * value).to(dtype), mask=inside)

    @triton.jit
    def _gelu_forward(u, act, count, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value, _ = _gelu(tl.load(u + at, mask=at < count, other=0.0).to(tl.float32))
        tl.store(act + at, value.to(act.dtype.element_ty), mask=at < count)

    @triton.jit
    def _gelu_backward(
        u, g_act, d_u, partial, rows,
        N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside, first = at < N, tl.program_id(0).to(tl.int64) * ROWS
        total = tl.zeros((BLOCK,), tl.float32)
        for row in tl.range(first, tl.minimum(first + ROWS, rows), num_stages=STAGES):
            here = row * N + at
            _, slope = _gelu(tl.load(u + here, mask=inside, other=0.0).to(tl.float32))
            d = (tl.load(g_act + here, mask=inside, other=0.0).to(tl.float32) * slope).to(d_u.dtype.element_ty)
            tl.store(d_u + here, d, mask=inside)
            total += d.to(tl.float32)
        tl.store(partial + tl.program_id(0) * N + at, total, mask=inside)


class _GatedGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        act = gate_up.new_empty((*gate_up.shape[:-1], width))
        _gated_gelu[(act.numel() // width, -(-width // BLOCK))](gate_up, act, N=width, BLOCK=BLOCK, num_warps=4)
        ctx.save_for_backward(gate_up)
        return act

    @staticmethod
    def backward(ctx: Any, g_act: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        width, d_gate_up = gate_up.shape[-1] // 2, torch.empty_like(gate_up)
        grid = (gate_up.numel() // (2 * width), -(-width // BLOCK))
        _gated_gelu_backward[grid](gate_up, g_act.contiguous(), d_gate_up, N=width, BLOCK=BLOCK, num_warps=4)
        return d_gate_up


class _VisionMLP(torch.autograd.Function):
    """``gelu(h @ w1.T + b1) @ w2.T``; one Function, so that the bias gradient comes out of the GELU's backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
        rows = h.reshape(-1, h.shape[-1])
        u = torch.addmm(b1, rows, w1.t())
        act = torch.empty_like(u)
        _gelu_forward[(-(-u.numel() // BLOCK),)](u, act, u.numel(), BLOCK=BLOCK, num_warps=4)
        ctx.save_for_backward(rows, u, act, w1, w2)
        return (act @ w2.t()).view(*h.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor, ...]:
        h, u, act, w1, w2 = ctx.saved_tensors
        g = g_out.reshape(-1, g_out.shape[-1])
        d_w2, g_act = g.t() @ act, g @ w2
        d_u, (rows, width) = torch.empty_like(u), u.shape
        groups = -(-rows // ROWS_A_PROGRAM)
        partial = torch.empty((groups, width), dtype=torch.float32, device=u.device)
        _gelu_backward[(groups, -(-width // BLOCK))](
            u, g_act, d_u, partial, rows, N=width, ROWS=ROWS_A_PROGRAM, BLOCK=BLOCK, STAGES=2, num_warps=4
        )
        d_h = (d_u @ w1).view(*g_out.shape[:-1], -1)
        return d_h, d_u.t() @ h, sum_rows(partial, w1.dtype), d_w2


def gated_gelu_plain(gate_up: Tensor) -> Tensor:
    """The twin of ``gated_gelu``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gated_gelu(gate_up: Tensor) -> Tensor:
    """[..., 2F] (gate, then up) -> GELU(gate) * up [..., F]."""
    return _GatedGELU.apply(gate_up) if use_kernels(gate_up) else gated_gelu_plain(gate_up)  # type: ignore[no-any-return]


def gated_mlp(h: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """A gated MLP on packed weights: h [..., C], weights [2F, C] and [C, F] -> [..., C]."""
    return F.linear(gated_gelu(F.linear(h, gate_up_weight)), down_weight)


def vision_mlp_plain(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """The twin of ``vision_mlp``."""
    return F.linear(F.gelu(F.linear(h, w1, b1), approximate="tanh"), w2)


def vision_mlp(h: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """The vision MLP without its last bias: h [..., C], w1 [F, C], b1 [F], w2 [C, F] -> [..., C]."""
    if use_kernels(h):
        return _VisionMLP.apply(h, w1, b1, w2)  # type: ignore[no-any-return]
    return vision_mlp_plain(h, w1, b1, w2)
