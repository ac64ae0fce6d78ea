"""Attention of the accelerated path, made for DM05's shapes.

The prefix is short (about 570 tokens) and its heads are wide (256), so two batched matmuls around one fused softmax beat the
flash kernels there; no mask is ever materialised: who sees whom is worked out from two vectors a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dm05_train.model.language import PrefixLayout
from dm05_train.model.layers import KeysValues


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """q [N, R, D] times k [N, M, D] transposed."""
    return torch.bmm(q, k.transpose(1, 2))


def fold_queries(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, L, D] -> [B * G, H / G * L, D]: the query heads of one key/value head as more rows (no copy)."""
    batch, heads, length, head_dim = q.shape
    return q.reshape(batch * num_kv_heads, heads // num_kv_heads * length, head_dim)


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, layout: PrefixLayout, window: int | None, scale: float) -> Tensor:
    """The language model's attention: causal and windowed, or inside one image, never to padding.

    Args:
        q: [B, H, L, D]; k and v: [B, G, L, D].
        layout: who is real and in which image, [B, L] each.

    Returns:
        [B, L, H * D].
    """
    batch, heads, length, head_dim = q.shape
    groups = k.shape[1]
    scores = _scores(fold_queries(q, groups), k.flatten(0, 1)).view(batch, heads, length, length)
    index = torch.arange(length, device=q.device)
    distance = index[:, None] - index[None, :]
    causal = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    blocks = layout.blocks
    same_image = (blocks[:, :, None] == blocks[:, None, :]) & (blocks[:, :, None] > 0)
    # A padding query sees itself too, so that its row stays finite; nothing reads it.
    seen = ((causal | same_image) & layout.real[:, None, :]) | ((distance == 0) & ~layout.real[:, :, None])
    weights = torch.where(seen[:, None], scores.float() * scale, float("-inf")).softmax(-1).to(v.dtype)
    out = torch.bmm(weights.view(batch * groups, -1, length), v.flatten(0, 1))
    return out.view(batch, heads, length, head_dim).transpose(1, 2).reshape(batch, length, heads * head_dim)


def suffix_attention(q: Tensor, own: KeysValues, prefix: KeysValues, real: Tensor, scale: float) -> Tensor:
    """The expert's attention to prefix and chunk, without joining their keys and values.

    Args:
        q: [B, H, T, D].
        own: the chunk's keys and values [B, G, T, D]; prefix: the language layer's [B, G, L, D].
        real: [B, L], False on padding.

    Returns:
        [B, T, H * D].
    """
    batch, heads, chunk, head_dim = q.shape
    groups, length = own[0].shape[1], real.shape[1]
    (k, v), (prefix_k, prefix_v) = ((a.flatten(0, 1), b.flatten(0, 1)) for a, b in (own, prefix))
    rows = fold_queries(q, groups)
    to_prefix = _scores(rows, prefix_k).view(batch, -1, length).float() * scale
    to_prefix = torch.where(real[:, None, :], to_prefix, float("-inf"))
    to_chunk = _scores(rows, k).view(batch, -1, chunk).float() * scale
    weights = torch.cat([to_prefix, to_chunk], dim=-1).softmax(-1).to(v.dtype).view(batch * groups, -1, length + chunk)
    out = torch.bmm(weights[:, :, :length], prefix_v) + torch.bmm(weights[:, :, length:], v)
    return out.view(batch, heads, chunk, head_dim).transpose(1, 2).reshape(batch, chunk, heads * head_dim)
