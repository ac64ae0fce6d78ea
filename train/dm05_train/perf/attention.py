"""The expert's attention on the accelerated path: the prefix's keys and values are read where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from dm05_train.model.layers import KeysValues


def suffix_attention(q: Tensor, own: KeysValues, prefix: KeysValues, real: Tensor, scale: float) -> Tensor:
    """Attention of the chunk to prefix and chunk, without joining their keys and values.

    Ten queries a head are too few for a flash kernel, whose backward would walk all keys for them: plain matmuls
    around one softmax do less.

    Args:
        q: [B, H, T, D].
        own: the chunk's keys and values [B, G, T, D]; prefix: the language layer's [B, G, L, D].
        real: bool [B, L], False on padding.
        scale: of the scores.

    Returns:
        [B, T, H * D].
    """
    batch, heads, chunk, head_dim = q.shape
    groups, length = own[0].shape[1], real.shape[1]
    (k, v), (prefix_k, prefix_v) = ((a.flatten(0, 1), b.flatten(0, 1)) for a, b in (own, prefix))
    rows = q.reshape(batch * groups, -1, head_dim)
    to_prefix = torch.bmm(rows, prefix_k.transpose(1, 2)).view(batch, -1, length).float() * scale
    to_prefix = torch.where(real[:, None, :], to_prefix, float("-inf"))
    to_chunk = torch.bmm(rows, k.transpose(1, 2)).view(batch, -1, chunk).float() * scale
    weights = torch.cat([to_prefix, to_chunk], dim=-1).softmax(-1).to(v.dtype).view(batch * groups, -1, length + chunk)
    out = torch.bmm(weights[:, :, :length], prefix_v) + torch.bmm(weights[:, :, length:], v)
    return out.view(batch, heads, chunk, head_dim).transpose(1, 2).reshape(batch, chunk, heads * head_dim)
