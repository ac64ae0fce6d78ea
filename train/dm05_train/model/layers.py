"""What the language model and the action expert share: norm, rotary embedding, attention, gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dm05_train.model.config import DecoderConfig, RopeConfig

Rope = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]


def run_layer(layer: Callable[..., Any], *inputs: Any, index: int, every: int) -> Any:
    """``layer(*inputs)``; every ``every``-th layer (0: none) keeps only its inputs and runs again in backward."""
    if every and index % every == 0:
        return checkpoint(layer, *inputs, use_reentrant=False)
    return layer(*inputs)


def rms_normalise(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dim, in float32 (the result too)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Gemma's RMSNorm: the weight is stored as an offset from 1 and applied in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (rms_normalise(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)


def rope_table(positions: Tensor, head_dim: int, rope: RopeConfig) -> Rope:
    """Cosines and sines, float32 [B, 1, L, D], of integer ``positions`` [B, L]."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    inverse_frequency = 1.0 / (rope.theta**exponent) / rope.factor
    angle = positions[:, None, :, None].float() * inverse_frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the halves of the head dim of ``x`` [B, H, L, D]."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention of q [B, H, L, D] over k, v [B, G, M, D]; mask [B, 1, L, M]: True where seen. [B, L, H * D]."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Projections of grouped-query attention, with a per-head RMSNorm on queries and keys before rotation."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.head_dim, self.scale = head_dim, config.attention_scale
        self.q_proj = nn.Linear(width, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[B, L, heads * D] -> [B, heads, L, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        return rotate(self.q_norm(self.heads(self.q_proj(x))), rope)

    def keys_values(self, x: Tensor, rope: Rope) -> KeysValues:
        """Keys (normalised and rotated) and values, each [B, G, L, D]."""
        return rotate(self.k_norm(self.heads(self.k_proj(x))), rope), self.heads(self.v_proj(x))


class MLP(nn.Module):
    """Gated MLP with the tanh form of GELU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class DecoderLayer(nn.Module):
    """The parts of a Gemma 3 layer; how they are put together is the language model's and the expert's own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.post_feedforward_layernorm = RMSNorm(width, eps)
