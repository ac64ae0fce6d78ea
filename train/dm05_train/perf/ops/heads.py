"""From a packed q/k/v projection to heads: norm and rotation of queries and keys, in the layout of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dm05_train.model.layers import Rope, rms_normalise, rotate
from dm05_train.perf.ops.common import HAVE_TRITON, WALKERS, next_power_of_2, sum_rows, use_kernels

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _places(row, length, head, at, FIRST: tl.constexpr, COUNT: tl.constexpr, HALF: tl.constexpr):
        """Where token ``row`` of heads FIRST .. FIRST + COUNT lies in a [B, COUNT, L, D] tensor."""
        batch, token = row // length, row % length
        return ((batch * COUNT + head - FIRST) * length + token) * 2 * HALF + at

    @triton.jit
    def _split_heads(
        qkv, cos, sin, w_q, w_k, q, k, v, length, eps,
        H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)[None, :]
        lane = at < HALF
        inside = (head < H + 2 * G) & lane
        dtype = q.dtype.element_ty
        source = qkv + row * (H + 2 * G) * 2 * HALF + head * 2 * HALF + at
        raw_1, raw_2 = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
        x1, x2 = raw_1.to(tl.float32), raw_2.to(tl.float32)
        scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
        is_q = head < H
        w1 = tl.where(is_q, tl.load(w_q + at, mask=lane, other=0.0), tl.load(w_k + at, mask=lane, other=0.0))
        w2 = tl.where(
            is_q, tl.load(w_q + HALF + at, mask=lane, other=0.0), tl.load(w_k + HALF + at, mask=lane, other=0.0)
        )
        n1 = (x1 * scale * (1.0 + w1.to(tl.float32))).to(dtype).to(tl.float32)
        n2 = (x2 * scale * (1.0 + w2.to(tl.float32))).to(dtype).to(tl.float32)
        c = tl.load(cos + row * 2 * HALF + at, mask=lane, other=0.0)
        s = tl.load(sin + row * 2 * HALF + at, mask=lane, other=0.0)
        y1, y2 = (n1 * c - n2 * s).to(dtype), (n2 * c + n1 * s).to(dtype)
        to_q = _places(row, length, head, at, 0, H, HALF)
        to_k = _places(row, length, head, at, H, G, HALF)
        to_v = _places(row, length, head, at, H + G, G, HALF)
        is_k, is_v = (head >= H) & (head < H + G) & lane, (head >= H + G) & inside
        tl.store(q + to_q, y1, mask=is_q & lane)
        tl.store(q + to_q + HALF, y2, mask=is_q & lane)
        tl.store(k + to_k, y1, mask=is_k)
        tl.store(k + to_k + HALF, y2, mask=is_k)
        tl.store(v + to_v, raw_1, mask=is_v)
        tl.store(v + to_v + HALF, raw_2, mask=is_v)

    @triton.jit
    def _split_heads_backward(
        g_q, g_k, g_v, qkv, cos, sin, w_q, w_k, d_qkv, partial, rows, length, eps,
        H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr,
        STAGES: tl.constexpr,
    ):  # fmt: skip
        head, at = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)[None, :]
        lane = at < HALF
        dtype = d_qkv.dtype.element_ty
        inside, is_q = (head < H + 2 * G) & lane, head < H
        is_k, is_v = (head >= H) & (head < H + G) & lane, (head >= H + G) & inside
        w1 = tl.where(is_q, tl.load(w_q + at, mask=lane, other=0.0), tl.load(w_k + at, mask=lane, other=0.0)).to(
            tl.float32
        )
        w2 = tl.where(
            is_q, tl.load(w_q + HALF + at, mask=lane, other=0.0), tl.load(w_k + HALF + at, mask=lane, other=0.0)
        )
        w2 = w2.to(tl.float32)
        d_w1, d_w2 = tl.zeros((HEADS, LANES), tl.float32), tl.zeros((HEADS, LANES), tl.float32)
        for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
            to_q = _places(row, length, head, at, 0, H, HALF)
            to_k = _places(row, length, head, at, H, G, HALF)
            to_v = _places(row, length, head, at, H + G, G, HALF)
            g1 = tl.load(g_q + to_q, mask=is_q & lane, other=0.0) + tl.load(g_k + to_k, mask=is_k, other=0.0)
            g2 = tl.load(g_q + to_q + HALF, mask=is_q & lane, other=0.0) + tl.load(
                g_k + to_k + HALF, mask=is_k, other=0.0
            )
            g1, g2 = g1.to(tl.float32), g2.to(tl.float32)
            c = tl.load(cos + row * 2 * HALF + at, mask=lane, other=0.0)
            s = tl.load(sin + row * 2 * HALF + at, mask=lane, other=0.0)
            g1, g2 = g1 * c + g2 * s, g2 * c - g1 * s
            place = row * (H + 2 * G) * 2 * HALF + head * 2 * HALF + at
            x1 = tl.load(qkv + place, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(qkv + place + HALF, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
            x1, x2 = x1 * scale, x2 * scale
            d_w1 += g1 * x1
            d_w2 += g2 * x2
            g1, g2 = g1 * (1.0 + w1), g2 * (1.0 + w2)
            mean = ((tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1)) / (2 * HALF))[:, None]
            v1 = tl.load(g_v + to_v, mask=is_v, other=0.0)
            v2 = tl.load(g_v + to_v + HALF, mask=is_v, other=0.0)
            tl.store(d_qkv + place, tl.where(is_v, v1, (scale * (g1 - x1 * mean)).to(dtype)), mask=inside)
            tl.store(d_qkv + place + HALF, tl.where(is_v, v2, (scale * (g2 - x2 * mean)).to(dtype)), mask=inside)
        base, lane = partial + tl.program_id(0) * 4 * HALF + tl.arange(0, LANES), tl.arange(0, LANES) < HALF
        tl.store(base, tl.sum(tl.where(is_q, d_w1, 0.0), 0), mask=lane)
        tl.store(base + HALF, tl.sum(tl.where(is_q, d_w2, 0.0), 0), mask=lane)
        tl.store(base + 2 * HALF, tl.sum(tl.where(is_k, d_w1, 0.0), 0), mask=lane)
        tl.store(base + 3 * HALF, tl.sum(tl.where(is_k, d_w2, 0.0), 0), mask=lane)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, w_q: Tensor, w_k: Tensor, heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, packed = qkv.shape
        head_dim = w_q.shape[0]
        groups = (packed // head_dim - heads) // 2
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        q = qkv.new_empty((batch, heads, length, head_dim))
        k, v = (qkv.new_empty((batch, groups, length, head_dim)) for _ in range(2))
        ctx.sizes = {
            "H": heads, "G": groups, "HALF": head_dim // 2,
            "HEADS": next_power_of_2(heads + 2 * groups), "LANES": next_power_of_2(head_dim // 2),
        }  # fmt: skip
        _split_heads[(batch * length,)](qkv, cos, sin, w_q, w_k, q, k, v, length, eps, **ctx.sizes, num_warps=4)
        ctx.save_for_backward(qkv, cos, sin, w_q, w_k)
        ctx.eps = eps
        return q, k, v

    @staticmethod
    def backward(ctx: Any, g_q: Tensor, g_k: Tensor, g_v: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, w_q, w_k = ctx.saved_tensors
        batch, length, _ = qkv.shape
        d_qkv, rows = torch.empty_like(qkv), batch * length
        walkers = min(WALKERS, rows)
        partial = torch.empty((walkers, 2, w_q.shape[0]), dtype=torch.float32, device=qkv.device)
        _split_heads_backward[(walkers,)](
            g_q.contiguous(), g_k.contiguous(), g_v.contiguous(), qkv, cos, sin, w_q, w_k, d_qkv, partial,
            rows, length, ctx.eps, **ctx.sizes, STAGES=2, num_warps=4,
        )  # fmt: skip
        d_w_q, d_w_k = sum_rows(partial, w_q.dtype)
        return d_qkv, None, None, d_w_q, d_w_k, None, None


def split_heads_plain(
    qkv: Tensor, rope: Rope, w_q: Tensor, w_k: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The twin of ``split_heads``."""
    head_dim = w_q.shape[0]
    groups = (qkv.shape[-1] // head_dim - heads) // 2
    parts = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2).split([heads, groups, groups], dim=1)
    q, k = (
        rotate((rms_normalise(x, eps) * (1.0 + w.float())).to(qkv.dtype), rope)
        for x, w in zip(parts[:2], (w_q, w_k), strict=True)
    )
    return q, k, parts[2]


def split_heads(
    qkv: Tensor, rope: Rope, w_q: Tensor, w_k: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, L, (H + 2G) * D] -> queries [B, H, L, D] and keys [B, G, L, D], normalised and rotated, and values.

    Args:
        qkv: the packed projection.
        rope: cosines and sines float32 [B, 1, L, D], equal in both halves of D.
        w_q, w_k: norm weights [D] as offsets from 1.
        heads: H.
        eps: of the norm.
    """
    if use_kernels(qkv):
        return _SplitHeads.apply(qkv, *rope, w_q, w_k, heads, eps)  # type: ignore[no-any-return]
    return split_heads_plain(qkv, rope, w_q, w_k, heads, eps)
