"""The language MLP with FP8 matmuls: forward and the gradient of its input; gradients of weights stay BF16.

A matrix is held as E4M3 values times a float32 scale a row (a token's, or a weight row's), the row's largest value at
the format's largest. The gradient of a linear map's input contracts over the weight's rows, so the rows' scales go into
the incoming gradient before that is quantised: one set of quantised weights serves both directions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dm05_train.perf.ops.common import HAVE_TRITON, next_power_of_2, use_kernels
from dm05_train.perf.ops.gelu import gated_gelu_plain

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
TINY = 1e-12  # no row is scaled by less: a row of zeros stays one
BLOCK = 2048

if HAVE_TRITON:
    import triton
    import triton.language as tl

    from dm05_train.perf.ops.gelu import _gelu

    @triton.jit
    def _row_scale(most):
        return tl.maximum(most, 1e-12) / 448.0

    @triton.jit
    def _quantise_rows(x, factors, q8, scales, N: tl.constexpr, BLOCK: tl.constexpr):
        """A row of x, times ``factors`` unless that is None."""
        row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        inside = at < N
        value = tl.load(x + row * N + at, mask=inside, other=0.0).to(tl.float32)
        if factors is not None:
            value *= tl.load(factors + at, mask=inside, other=0.0)
        scale = _row_scale(tl.max(tl.abs(value), 0))
        tl.store(q8 + row * N + at, (value / scale).to(q8.dtype.element_ty), mask=inside)
        tl.store(scales + row, scale)

    @triton.jit
    def _transpose_bytes(source, target, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        at = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (at < width)
        tl.store(target + at * rows + row, tl.load(source + row * width + at, mask=inside), mask=inside)

    @triton.jit
    def _gated_gelu_fp8(gate_up, act, q8, scales, N: tl.constexpr, BLOCK: tl.constexpr):
        """A row: the activation in BF16 and, from that, in FP8."""
        row = tl.program_id(0).to(tl.int64)
        most = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, N, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < N
            gate = tl.load(gate_up + row * 2 * N + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(gate_up + row * 2 * N + N + at, mask=inside, other=0.0).to(tl.float32)
            value, _ = _gelu(gate)
            value = (value.to(act.dtype.element_ty).to(tl.float32) * up).to(act.dtype.element_ty)
            tl.store(act + row * N + at, value, mask=inside)
            most = tl.maximum(most, tl.abs(value.to(tl.float32)))
        scale = _row_scale(tl.max(most, 0))
        tl.store(scales + row, scale)
        for first in range(0, N, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(act + row * N + at, mask=at < N, other=0.0).to(tl.float32)
            tl.store(q8 + row * N + at, (value / scale).to(q8.dtype.element_ty), mask=at < N)

    @triton.jit
    def _gated_gelu_fp8_backward(gate_up, g_act, factors, d_gate_up, q8, scales, N: tl.constexpr, BLOCK: tl.constexpr):
        """A row: the gradient of gate and up in BF16 and, times ``factors`` [2N], in FP8."""
        row = tl.program_id(0).to(tl.int64)
        most = tl.zeros((BLOCK,), tl.float32)
        dtype = d_gate_up.dtype.element_ty
        for first in range(0, N, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < N
            gate = tl.load(gate_up + row * 2 * N + at, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(gate_up + row * 2 * N + N + at, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(g_act + row * N + at, mask=inside, other=0.0).to(tl.float32)
            value, slope = _gelu(gate)
            d_gate, d_up = (g * up * slope).to(dtype), (g * value).to(dtype)
            tl.store(d_gate_up + row * 2 * N + at, d_gate, mask=inside)
            tl.store(d_gate_up + row * 2 * N + N + at, d_up, mask=inside)
            most = tl.maximum(most, tl.abs(d_gate.to(tl.float32) * tl.load(factors + at, mask=inside, other=0.0)))
            most = tl.maximum(most, tl.abs(d_up.to(tl.float32) * tl.load(factors + N + at, mask=inside, other=0.0)))
        scale = _row_scale(tl.max(most, 0))
        tl.store(scales + row, scale)
        for first in range(0, 2 * N, BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(d_gate_up + row * 2 * N + at, mask=at < 2 * N, other=0.0).to(tl.float32)
            value *= tl.load(factors + at, mask=at < 2 * N, other=0.0)
            tl.store(q8 + row * 2 * N + at, (value / scale).to(q8.dtype.element_ty), mask=at < 2 * N)


def _like(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Room for a quantised matrix and its scales."""
    return (
        torch.empty((rows, columns), dtype=FP8, device=x.device),
        torch.empty((rows, 1), dtype=torch.float32, device=x.device),
    )


def quantise_rows_plain(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The twin of ``quantise_rows``."""
    value = x.float() if factors is None else x.float() * factors
    scale = value.abs().amax(1, keepdim=True).clamp_min(TINY) / LARGEST
    return (value / scale).to(FP8), scale


def quantise_rows(x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [T, N], its columns times ``factors`` [N] if given -> FP8 [T, N] and scales [T, 1]."""
    if not use_kernels(x):
        return quantise_rows_plain(x, factors)
    (rows, width), x = x.shape, x.contiguous()
    q, scales = _like(x, rows, width)
    _quantise_rows[(rows,)](x, factors, q, scales, N=width, BLOCK=next_power_of_2(width), num_warps=8)
    return q, scales


def transpose(q: Tensor) -> Tensor:
    """FP8 [R, N] -> the same bytes as [N, R]; torch's own copy moves one byte at a time, ten times slower."""
    if not use_kernels(q):
        return q.view(torch.int8).t().contiguous().view(FP8)
    (rows, width), out = q.shape, torch.empty(q.shape[::-1], dtype=FP8, device=q.device)
    _transpose_bytes[(-(-rows // 64), -(-width // 128))](
        q.view(torch.int8), out.view(torch.int8), rows, width, ROWS=64, COLUMNS=128, num_warps=4
    )
    return out


def quantise_weight(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w [R, N] -> FP8 [R, N], the same values as [N, R], and scales [R, 1]."""
    q, scales = quantise_rows(w)
    return q, transpose(q), scales


def gelu_quantised(gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gate_up [T, 2F] -> GELU(gate) * up as BF16 [T, F], and that as FP8 with scales [T, 1]."""
    if not use_kernels(gate_up):
        act = gated_gelu_plain(gate_up)
        return act, *quantise_rows_plain(act)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    act, (q, scales) = gate_up.new_empty((rows, width)), _like(gate_up, rows, width)
    _gated_gelu_fp8[(rows,)](gate_up, act, q, scales, N=width, BLOCK=BLOCK, num_warps=8)
    return act, q, scales


def gelu_backward_quantised(gate_up: Tensor, g_act: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of gate_up [T, 2F] in BF16, and that times ``factors`` [2F] as FP8 with scales [T, 1]."""
    if not use_kernels(gate_up):
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            (d_gate_up,) = torch.autograd.grad(gated_gelu_plain(leaf), leaf, g_act)
        return d_gate_up, *quantise_rows_plain(d_gate_up, factors)
    rows, width = g_act.shape
    d_gate_up, (q, scales) = torch.empty_like(gate_up), _like(gate_up, rows, 2 * width)
    _gated_gelu_fp8_backward[(rows,)](
        gate_up, g_act, factors, d_gate_up, q, scales, N=width, BLOCK=BLOCK, num_warps=8
    )  # fmt: skip
    return d_gate_up, q, scales


def multiply(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """FP8 a [T, K] and b [N, K] with their scales [T, 1] and [N, 1] (None: all 1) -> a @ b.T [T, N] in ``dtype``."""
    b_scales = torch.ones((len(b), 1), device=b.device) if b_scales is None else b_scales
    if not b.is_cuda:
        return ((a.float() * a_scales) @ (b.float() * b_scales).t()).to(dtype)
    rowwise = F.ScalingType.RowWise  # type: ignore[attr-defined]
    return F.scaled_mm(  # type: ignore[attr-defined,no-any-return]
        a, b.t(), a_scales, rowwise, b_scales.t(), rowwise, output_dtype=dtype, use_fast_accum=True
    )


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
        rows, dtype = h.reshape(-1, h.shape[-1]), h.dtype
        w1, w1_t, w1_scales = quantise_weight(gate_up_weight)
        w2, w2_t, w2_scales = quantise_weight(down_weight)
        gate_up = multiply(*quantise_rows(rows), w1, w1_scales, dtype)
        act, act8, scales = gelu_quantised(gate_up)
        ctx.save_for_backward(rows, gate_up, act, w1_t, w1_scales, w2_t, w2_scales)
        return multiply(act8, scales, w2, w2_scales, dtype).view_as(h)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor, ...]:
        h, gate_up, act, w1_t, w1_scales, w2_t, w2_scales = ctx.saved_tensors
        g = g_out.reshape(-1, g_out.shape[-1])
        g_act = multiply(*quantise_rows(g, w2_scales.flatten()), w2_t, None, g.dtype)
        d_w2 = g.t() @ act
        d_gate_up, d8, scales = gelu_backward_quantised(gate_up, g_act, w1_scales.flatten())
        d_h = multiply(d8, scales, w1_t, None, g.dtype)
        return d_h.view_as(g_out), d_gate_up.t() @ h, d_w2


def gated_mlp_fp8(h: Tensor, gate_up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """``gelu.gated_mlp`` with FP8 matmuls: h [..., C], weights [2F, C] and [C, F] -> [..., C]; C and F divide by 16."""
    return _GatedMLP.apply(h, gate_up_weight, down_weight)  # type: ignore[no-any-return]
