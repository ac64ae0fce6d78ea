"""The action expert: a small Gemma 3 decoder over the noisy action chunk, steered by the flow time."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dm05_train.model.config import DecoderConfig
from dm05_train.model.layers import DecoderLayer, KeysValues, RMSNorm, Rope, attend, rms_normalise, rope_table

ADAPTIVE_NORM_EPS = 1e-6
MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0


def time_sinusoid(time: Tensor, width: int) -> Tensor:
    """Flow times [B] in 0..1 -> float32 [B, width]: sines, then cosines, of geometrically spaced periods."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** fraction
    angle = time.float()[:, None] * (2 * math.pi / period).float()
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def adaptive_norm(x: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [B, T, C] scaled and shifted by modulation [B, 3C]; gives the result and the gate [B, 1, C]."""
    scale, shift, gate = modulation[:, None, :].chunk(3, dim=-1)
    normed = rms_normalise(x, ADAPTIVE_NORM_EPS) * (1.0 + scale.float()) + shift.float()
    return normed.to(x.dtype), gate


class ExpertLayer(DecoderLayer):
    """``input_layernorm`` and ``pre_feedforward_layernorm`` are in the file, but the adaptive norms replace them."""

    def forward(
        self, x: Tensor, rope: Rope, mask: Tensor, prefix: KeysValues, attn_modulation: Tensor, mlp_modulation: Tensor
    ) -> Tensor:
        """x [B, T, C]; mask [B, 1, 1, L + T]; prefix: keys and values [B, G, L, D] of the same language layer."""
        attn = self.self_attn
        h, gate = adaptive_norm(x, attn_modulation)
        q = attn.queries(h, rope)
        k, v = (torch.cat(pair, dim=2) for pair in zip(prefix, attn.keys_values(h, rope), strict=True))
        x = x + gate * self.post_attention_layernorm(attn.o_proj(attend(q, k, v, mask, attn.scale)))
        h, gate = adaptive_norm(x, mlp_modulation)
        return x + gate * self.post_feedforward_layernorm(self.mlp(h))


class ActionExpert(nn.Module):
    """Suffix embeddings in, suffix features out; ``norm`` is in the file, but the final modulator replaces it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.layers = nn.ModuleList(ExpertLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.input_time_modulators = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(config.num_layers))
        self.mlp_time_modulators = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(config.num_layers))
        self.final_time_modulator = nn.Linear(width, 3 * width)

    def modulations(self, condition: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Time condition [B, C] -> [B, 3C] for every layer's attention, every layer's MLP, and the final norm."""
        return (
            [modulator(condition) for modulator in self.input_time_modulators],
            [modulator(condition) for modulator in self.mlp_time_modulators],
            self.final_time_modulator(condition),
        )

    def mask(self, real: Tensor, chunk: int) -> Tensor:
        """True where a suffix token may look, [B, 1, 1, L + T]: all of the chunk, and all of the prefix but padding."""
        return torch.cat([real, real.new_ones(len(real), chunk)], dim=1)[:, None, None, :]

    def forward(self, x: Tensor, condition: Tensor, prefix: list[KeysValues], real: Tensor) -> Tensor:
        """x [B, T, C], condition [B, C], prefix of every layer, real [B, L] (False: padding) -> [B, T, C]."""
        chunk = torch.arange(x.shape[1], device=x.device)
        positions = real.long().sum(1, keepdim=True) + chunk
        ropes = {kind: rope_table(positions, self.config.head_dim, rope) for kind, rope in self.config.rope.items()}
        mask = self.mask(real, x.shape[1])
        attn_modulations, mlp_modulations, final = self.modulations(condition)
        x = self.run_layers(x, ropes, mask, prefix, attn_modulations, mlp_modulations)
        return adaptive_norm(x, final)[0]

    def run_layers(
        self,
        x: Tensor,
        ropes: dict[str, Rope],
        mask: Tensor,
        prefix: list[KeysValues],
        attn_modulations: list[Tensor],
        mlp_modulations: list[Tensor],
    ) -> Tensor:
        for i, layer in enumerate(self.layers):
            rope = ropes[self.config.layer_types[i]]
            x = layer(x, rope, mask, prefix[i], attn_modulations[i], mlp_modulations[i])
        return x
