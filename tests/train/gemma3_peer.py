"""The model once more, in transformers' Gemma 3 and SigLIP modules.

What Gemma 3 does not have - the masks as this model means them, the suffix's attention to the prefix, the adaptive
norms, the time condition - is written here slow and plain; no code of the model is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peer_shapes import FULL, SLIDING, Shape
from torch import Tensor, nn

REASON = "transformers is not installed, so there is no peer to compare with"
transformers = pytest.importorskip("transformers", reason=REASON)
gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3", reason=REASON)
masking = pytest.importorskip("transformers.masking_utils", reason=REASON)

KeysValues = tuple[Tensor, Tensor]
VLM, EXPERT = "model.vlm.model.", "model.action_expert."
PEER_ATTENTION = "dm05_peer"


def peer_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    seen: list[KeysValues] | None = None,
    before: list[KeysValues] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Gemma 3's own eager attention that notes each layer's keys and values, or puts others ``before`` them."""
    if seen is not None:
        seen.append((key, value))
    if before is not None:
        key, value = (torch.cat(pair, dim=2) for pair in zip(before[module.layer_idx], (key, value), strict=True))
    out: tuple[Tensor, Tensor] = gemma3.eager_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling
    )
    return out


transformers.AttentionInterface.register(PEER_ATTENTION, peer_attention)
transformers.AttentionMaskInterface.register(PEER_ATTENTION, masking.eager_mask)


def additive(seen: Tensor) -> Tensor:
    """A mask of bools [B, Q, K] as Gemma 3 adds it to the scores, [B, 1, Q, K]."""
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]


def sees(query: int, key: int, types: list[int], real: list[int], window: float) -> bool:
    """Whether a prefix token sees another: looking back, or inside one run of image tokens; never padding."""
    between = types[min(query, key) : max(query, key) + 1]
    return bool(real[key]) and (0 <= query - key < window or all(kind == 1 for kind in between))


def written_mask(batch: dict[str, Tensor], window: float) -> Tensor:
    """Who sees whom in the prefix, additive [B, 1, L, L], said token by token."""
    indices = range(batch["input_ids"].shape[1])
    samples = zip(batch["token_type_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
    seen = [[[sees(q, k, types, real, window) for k in indices] for q in indices] for types, real in samples]
    return additive(torch.tensor(seen))


class AdaptiveNorm(nn.Module):
    """RMSNorm scaled and shifted by [B, C] each."""

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.scale, self.shift = scale[:, None], shift[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.scale) + self.shift


class GatedNorm(nn.Module):
    """A norm of Gemma 3 whose result is gated by [B, C]."""

    def __init__(self, norm: nn.Module, gate: Tensor) -> None:
        super().__init__()
        self.norm, self.gate = norm, gate[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * self.norm(x)


class Peer:
    """The same weights in transformers' modules."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor]) -> None:
        raw = shape.config()
        self.shape = shape
        self.weights = weights
        config = transformers.Gemma3Config(**raw["vlm_config"])
        config.text_config._attn_implementation = PEER_ATTENTION
        self.vlm = transformers.Gemma3Model(config).eval()
        names = self.vlm.state_dict().keys()
        inner = "" if any(name.startswith("vision_tower.vision_model.") for name in names) else "vision_model."
        self.vlm.load_state_dict({name.replace(inner, "", 1): w for name, w in self.under(VLM).items()})
        self.expert_config = transformers.Gemma3TextConfig(**raw["action_config"])
        self.expert_config._attn_implementation = PEER_ATTENTION

    def under(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"model.{name}.weight"], self.weights[f"model.{name}.bias"])

    def prefix(self, batch: dict[str, Tensor], masks: dict[str, Tensor] | None) -> list[KeysValues]:
        """Keys and values of every language layer, under the given masks or those that transformers makes."""
        seen: list[KeysValues] = []
        self.vlm(
            input_ids=batch["input_ids"],
            pixel_values=batch["pixel_values"],
            token_type_ids=batch["token_type_ids"],
            attention_mask=batch["attention_mask"] if masks is None else masks,
            position_ids=(batch["attention_mask"].cumsum(1) - 1).clamp(min=0),
            use_cache=False,
            seen=seen,
        )
        return seen

    def time_condition(self, time: Tensor) -> Tensor:
        half = self.shape.expert_width // 2
        factors = torch.tensor([2 * math.pi / (4e-3 * 1000 ** (i / (half - 1))) for i in range(half)])
        angles = time[:, None] * factors
        hidden = F.silu(self.linear("time_mlp_in", torch.cat([angles.sin(), angles.cos()], dim=1)))
        return F.silu(self.linear("time_mlp_out", hidden))

    def expert(self, condition: Tensor) -> Any:
        """A Gemma 3 decoder whose norms are steered by the condition [B, C]."""
        decoder = transformers.Gemma3TextModel(self.expert_config).eval()
        own = {name: w for name, w in self.under(EXPERT).items() if "time_modulator" not in name}
        lacking = decoder.load_state_dict(own, strict=False)
        assert lacking.missing_keys == ["embed_tokens.weight"] and not lacking.unexpected_keys

        def modulation(name: str) -> tuple[Tensor, ...]:
            return self.linear(f"action_expert.{name}", condition).chunk(3, dim=-1)

        for i, layer in enumerate(decoder.layers):
            scale, shift, gate = modulation(f"input_time_modulators.{i}")
            layer.input_layernorm = AdaptiveNorm(scale, shift)
            layer.post_attention_layernorm = GatedNorm(layer.post_attention_layernorm, gate)
            scale, shift, gate = modulation(f"mlp_time_modulators.{i}")
            layer.pre_feedforward_layernorm = AdaptiveNorm(scale, shift)
            layer.post_feedforward_layernorm = GatedNorm(layer.post_feedforward_layernorm, gate)
        decoder.norm = AdaptiveNorm(*modulation("final_time_modulator")[:2])
        return decoder

    def velocity(self, prefix: list[KeysValues], batch: dict[str, Tensor], x_t: Tensor) -> Tensor:
        real, chunk = batch["attention_mask"].bool(), self.shape.chunk
        seen = torch.cat([real, torch.ones(len(real), chunk, dtype=torch.bool)], dim=1)
        mask = additive(seen[:, None].expand(-1, chunk, -1))
        features = self.expert(self.time_condition(batch["time"]))(
            inputs_embeds=self.linear("action_in_proj", x_t),
            attention_mask={SLIDING: mask, FULL: mask},
            position_ids=real.sum(1, keepdim=True) + torch.arange(chunk),
            use_cache=False,
            before=prefix,
        ).last_hidden_state
        return self.linear("action_out_proj", features)
