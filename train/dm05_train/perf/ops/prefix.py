"""The language model's attention: two batched matmuls around a softmax that knows who sees whom.

The prefix is short (about 570 tokens) and its heads are wide (256): kept scores beat a flash kernel there, which would
compute them again in backward. No mask is ever materialised; it is worked out from two vectors a sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dm05_train.perf.ops.common import HAVE_TRITON, next_power_of_2, swap_heads, use_kernels

ROWS = 4

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _softmax(
        scores, codes, heads, window, scale,
        length: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Scores [B, H, L, L] to weights, in place; program (rows of L, batch and head). codes [B, L]: see below."""
        query, at = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        codes += tl.program_id(1) // heads * length
        theirs = tl.load(codes + at, mask=at < length, other=-1)[None, :]
        own = tl.load(codes + query, mask=query < length, other=-1)[:, None]
        distance = query[:, None] - at[None, :]
        seen = ((distance >= 0) & (distance < window)) | ((own == theirs) & (own > 0))
        seen = (seen & (theirs >= 0)) | ((distance == 0) & (own < 0))
        inside = (query < length)[:, None] & (at < length)[None, :]
        here = (tl.program_id(1).to(tl.int64) * length + query[:, None]) * length + at[None, :]
        x = tl.load(scores + here, mask=inside, other=0.0).to(tl.float32) * scale
        x = tl.where(seen & inside, x, -1e30)
        x = tl.exp(x - tl.max(x, 1)[:, None])
        x = x / tl.sum(x, 1)[:, None]
        tl.store(scores + here, x.to(scores.dtype.element_ty), mask=inside)

    @triton.jit
    def _softmax_backward(
        weights, g, scale, rows, length: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """Gradients of the weights to gradients of the scores, in place."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at = tl.arange(0, BLOCK)[None, :]
        inside = (at < length) & (row < rows)[:, None]
        here = row.to(tl.int64)[:, None] * length + at
        w = tl.load(weights + here, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(g + here, mask=inside, other=0.0).to(tl.float32)
        d = w * (d - tl.sum(w * d, 1)[:, None]) * scale
        tl.store(g + here, d.to(g.dtype.element_ty), mask=inside)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, real: Tensor, window: int, scale: float
    ) -> Tensor:
        batch, heads, length, head_dim = q.shape
        groups = k.shape[1]
        rows, keys, values = q.view(batch * groups, -1, head_dim), k.flatten(0, 1), v.flatten(0, 1)
        weights = torch.bmm(rows, keys.transpose(1, 2))
        # One number says it all: the image a token is in, 0 for text, -1 for padding.
        codes = torch.where(real, blocks, -1).int()
        _softmax[(-(-length // ROWS), batch * heads)](
            weights, codes, heads, window, scale,
            length=length, ROWS=ROWS, BLOCK=next_power_of_2(length), num_warps=4,
        )  # fmt: skip
        out = torch.bmm(weights, values).view(batch, heads, length, head_dim)
        ctx.save_for_backward(rows, keys, values, weights)
        ctx.scale, ctx.shape = scale, (batch, heads, length, head_dim)
        return swap_heads(out).view(batch, length, heads * head_dim)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, keys, values, weights = ctx.saved_tensors
        batch, heads, length, head_dim = ctx.shape
        g = swap_heads(g_out.view(batch, length, heads, head_dim)).view(rows.shape)
        d_v = torch.bmm(weights.transpose(1, 2), g)
        d = torch.bmm(g, values.transpose(1, 2))
        count = batch * heads * length
        _softmax_backward[(-(-count // ROWS),)](
            weights, d, ctx.scale, count, length=length, ROWS=ROWS, BLOCK=next_power_of_2(length), num_warps=4
        )
        d_q, d_k = torch.bmm(d, keys), torch.bmm(d.transpose(1, 2), rows)
        shape = (batch, -1, length, head_dim)
        return d_q.view(batch, heads, length, head_dim), d_k.view(shape), d_v.view(shape), None, None, None, None


def prefix_attention_plain(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, real: Tensor, window: int, scale: float
) -> Tensor:
    """The twin of ``prefix_attention``."""
    batch, heads, length, head_dim = q.shape
    groups = k.shape[1]
    scores = torch.bmm(q.reshape(batch * groups, -1, head_dim), k.flatten(0, 1).transpose(1, 2))
    index = torch.arange(length, device=q.device)
    distance = index[:, None] - index[None, :]
    same_image = (blocks[:, :, None] == blocks[:, None, :]) & (blocks[:, :, None] > 0)
    seen = ((distance >= 0) & (distance < window) | same_image) & real[:, None, :]
    # A padding query sees itself too, so that its row stays finite; nothing reads it.
    seen = seen | ((distance == 0) & ~real[:, :, None])
    scores = scores.view(batch, heads, length, length).float() * scale
    weights = torch.where(seen[:, None], scores, float("-inf")).softmax(-1).to(v.dtype)
    out = torch.bmm(weights.view(batch * groups, -1, length), v.flatten(0, 1))
    return out.view(batch, heads, length, head_dim).transpose(1, 2).reshape(batch, length, heads * head_dim)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, real: Tensor, window: int, scale: float
) -> Tensor:
    """Causal within the window, or inside one image, never to padding.

    Args:
        q: [B, H, L, D]; k and v: [B, G, L, D].
        blocks: int64 [B, L], the image a token is in (0: text); real: bool [B, L].
        window: how many keys back a query sees, itself included.
        scale: of the scores.

    Returns:
        [B, L, H * D].
    """
    if use_kernels(q):
        return _PrefixAttention.apply(q, k, v, blocks, real, window, scale)  # type: ignore[no-any-return]
    return prefix_attention_plain(q, k, v, blocks, real, window, scale)
