"""The language model (Gemma 3 text), of which the action expert reads every layer's keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dm05_train.model.config import DecoderConfig
from dm05_train.model.layers import DecoderLayer, KeysValues, RMSNorm, Rope, attend, rope_table, run_layer


class PrefixLayout(NamedTuple):
    """Who is who among the prefix tokens, each [B, L]: real or padding, position, and image block (0: text)."""

    real: Tensor
    positions: Tensor
    blocks: Tensor


def prefix_layout(token_type_ids: Tensor, attention_mask: Tensor) -> PrefixLayout:
    """Positions count real tokens from 0 (padding keeps the last); blocks number the maximal runs of token type 1."""
    real = attention_mask.bool()
    positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
    image = (token_type_ids == 1) & real
    starts = image & ~torch.nn.functional.pad(image, (1, 0))[:, :-1]
    return PrefixLayout(real, positions, starts.long().cumsum(1) * image)


def prefix_mask(layout: PrefixLayout, window: int | None) -> Tensor:
    """True where query may see key, [B, 1, L, L]: causal (and windowed), or both in one image; never padding."""
    index = torch.arange(layout.real.shape[1], device=layout.real.device)
    distance = index[:, None] - index
    causal = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    blocks = layout.blocks
    same_image = (blocks[:, :, None] == blocks[:, None, :]) & (blocks[:, :, None] > 0)
    seen = (causal | same_image) & layout.real[:, None, :]
    # A padding query may see no key at all: let it see itself, so that its row stays finite.
    return (seen | (torch.eye(len(index), dtype=torch.bool, device=seen.device) & ~seen.any(-1, keepdim=True)))[:, None]


class LanguageLayer(DecoderLayer):
    """One Gemma 3 layer: norms before and after attention and MLP, the latter before the residual add."""

    def forward(self, x: Tensor, rope: Rope, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, C] -> the next x, and this layer's keys and values [B, G, L, D]."""
        attn, h = self.self_attn, self.input_layernorm(x)
        q = attn.queries(h, rope)
        k, v = attn.keys_values(h, rope)
        x = x + self.post_attention_layernorm(attn.o_proj(attend(q, k, v, mask, attn.scale)))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x, k, v


class LanguageModel(nn.Module):
    """Embeddings in, keys and values of every layer out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LanguageLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.checkpointing = 0

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token vectors [B, L, C], scaled by sqrt(C) rounded to the parameter dtype."""
        weight = self.embed_tokens.weight
        return (
            self.embed_tokens(input_ids)
            * torch.tensor(self.config.hidden_size**0.5, dtype=weight.dtype, device="cpu").item()
        )

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        """One table a kind of layer, for ``positions`` [B, L]."""
        return {kind: rope_table(positions, self.config.head_dim, rope) for kind, rope in self.config.rope.items()}

    def masks(self, layout: PrefixLayout) -> dict[str, Tensor]:
        """One mask a kind of layer; a window wider than the prefix hides nothing."""
        full = prefix_mask(layout, None)
        if self.config.sliding_window >= layout.real.shape[1]:
            return {"full_attention": full, "sliding_attention": full}
        return {"full_attention": full, "sliding_attention": prefix_mask(layout, self.config.sliding_window)}

    def forward(self, x: Tensor, layout: PrefixLayout) -> list[KeysValues]:
        """Embeddings [B, L, C] -> keys and values [B, G, L, D] of every layer (nothing reads what follows the last)."""
        ropes, masks = self.ropes(layout.positions), self.masks(layout)
        prefix: list[KeysValues] = []
        layer: Any
        for i, (kind, layer) in enumerate(zip(self.config.layer_types, self.layers, strict=True)):
            x, k, v = run_layer(layer, x, ropes[kind], masks[kind], index=i, every=self.checkpointing)
            prefix.append((k, v))
        return prefix
