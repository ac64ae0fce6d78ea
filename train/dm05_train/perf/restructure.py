"""R16: the same model in fewer, larger pieces.

Packed projections (q/k/v, gate/up, all time modulators) are one matmul each; the language layers stop at the last keys
and values; the expert reads the prefix's keys and values where they lie. ``model.packed`` says which released tensors a
packed parameter stacks, so that checkpoints and optimizers see the released names.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dm05_train.model.dm05 import DM05
from dm05_train.model.expert import ActionExpert, ExpertLayer, adaptive_norm
from dm05_train.model.language import LanguageModel
from dm05_train.model.layers import Attention, KeysValues, Rope, rotate
from dm05_train.model.vision import VisionTower
from dm05_train.perf.attention import suffix_attention
from dm05_train.perf.fused import language_forward, patch_embed, vision_encode
from dm05_train.perf.ops.gelu import gated_mlp

PACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def stack_linears(linears: list[nn.Linear]) -> nn.Linear:
    """One linear map whose output is the outputs of several, one after the other."""
    first = linears[0]
    device, dtype = first.weight.device, first.weight.dtype
    rows = sum(linear.out_features for linear in linears)
    stacked = nn.Linear(first.in_features, rows, bias=first.bias is not None, device="meta", dtype=dtype)
    with torch.no_grad():
        for name in ("weight", "bias"):
            if getattr(first, name) is None:
                continue
            parts = [getattr(linear, name) for linear in linears]
            joined = torch.empty((rows, *parts[0].shape[1:]), device=device, dtype=dtype)
            torch.cat([part.detach() for part in parts], out=joined)
            setattr(stacked, name, nn.Parameter(joined, requires_grad=parts[0].requires_grad))
    return stacked


def pack_children(module: nn.Module, packed_name: str) -> None:
    """Replace the parts of ``packed_name`` among a module's children by their stack."""
    parts = PACKS[packed_name]
    stacked = stack_linears([getattr(module, part) for part in parts])
    for part in parts:
        delattr(module, part)
    module.add_module(packed_name, stacked)


class PackedAttention(nn.Module):
    """``Attention`` with one projection; the language model only uses its weights (its layers form a chain)."""

    def __init__(self, plain: Attention) -> None:
        super().__init__()
        self.head_dim, self.scale = plain.head_dim, plain.scale
        self.rows = [plain.q_proj.out_features, plain.k_proj.out_features, plain.v_proj.out_features]
        for name, child in plain.named_children():
            self.add_module(name, child)
        pack_children(self, "qkv_proj")

    def forward(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, C] -> queries [B, H, L, D], keys and values [B, G, L, D]."""
        parts = self.qkv_proj(x).split(self.rows, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope), v


class PackedMLP(nn.Module):
    """Gated MLP with one projection for gate and up."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        for name, child in plain.named_children():
            self.add_module(name, child)
        pack_children(self, "gate_up_proj")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class PackedExpertLayer(nn.Module):
    """``ExpertLayer`` on packed projections, reading the prefix where it lies."""

    def __init__(self, plain: ExpertLayer) -> None:
        super().__init__()
        for name, child in plain.named_children():
            self.add_module(name, child)
        self.self_attn, self.mlp = PackedAttention(plain.self_attn), PackedMLP(plain.mlp)

    def forward(
        self, x: Tensor, rope: Rope, real: Tensor, prefix: KeysValues, attn_modulation: Tensor, mlp_modulation: Tensor
    ) -> Tensor:
        attn = self.self_attn
        h, gate = adaptive_norm(x, attn_modulation)
        q, k, v = attn(h, rope)
        out = suffix_attention(q, (k, v), prefix, real, attn.scale)
        x = x + gate * self.post_attention_layernorm(attn.o_proj(out))
        h, gate = adaptive_norm(x, mlp_modulation)
        return x + gate * self.post_feedforward_layernorm(self.mlp(h))


def pack_modulators(expert: ActionExpert) -> None:
    """All time modulators of the expert in one matmul."""
    count = len(expert.layers)
    linears = [*expert.input_time_modulators, *expert.mlp_time_modulators, expert.final_time_modulator]
    stacked = stack_linears(linears)  # type: ignore[arg-type]
    for name in ("input_time_modulators", "mlp_time_modulators", "final_time_modulator"):
        delattr(expert, name)
    expert.time_modulators = stacked

    def modulations(condition: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        parts = stacked(condition).chunk(2 * count + 1, dim=-1)
        return list(parts[:count]), list(parts[count:-1]), parts[-1]

    expert.modulations = modulations  # type: ignore[method-assign]


def pack_language(language: LanguageModel) -> None:
    """Pack every layer but the last, of which only keys and values matter; run the layers as a fused chain."""
    for layer, kind in zip(list(language.layers)[:-1], language.config.layer_types, strict=False):
        layer.self_attn, layer.mlp = PackedAttention(layer.self_attn), PackedMLP(layer.mlp)  # type: ignore[arg-type]
        layer.window = language.config.sliding_window if kind == "sliding_attention" else None  # type: ignore[assignment]
    language.gated_mlp = gated_mlp  # type: ignore[assignment]
    language.forward = partial(language_forward, language)  # type: ignore[method-assign]


def pack_vision(tower: VisionTower) -> None:
    """Pack the attention projections; embed patches by a matmul and run the layers as a fused chain."""
    for layer in tower.encoder.layers:
        pack_children(layer.self_attn, "qkv_proj")
    tower.encode = partial(vision_encode, tower)  # type: ignore[method-assign]
    tower.embeddings.forward = partial(patch_embed, tower)  # type: ignore[method-assign]


def pack_expert(expert: ActionExpert) -> None:
    """Pack every layer's projections and all time modulators; hand over the prefix as it is."""
    for i, layer in enumerate(expert.layers):
        expert.layers[i] = PackedExpertLayer(layer)  # type: ignore[arg-type]
    pack_modulators(expert)
    expert.mask = lambda real, chunk: real  # type: ignore[method-assign]


def restructure(model: DM05) -> None:
    """Restructure a loaded model in place; ``model.packed`` then maps packed parameters to released tensors."""
    rows = {name: p.shape[0] for name, p in model.named_parameters()}
    pack_vision(model.vision)
    pack_language(model.language)
    pack_expert(model.expert)
    model.packed = {name: parts for name, _ in model.named_parameters() if (parts := _parts_of(name, rows))}


def _parts_of(name: str, rows: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """The released tensors a parameter stacks, with their rows; empty for a parameter that stacks none."""
    owner, kind = name.rsplit(".", 1)
    owner, module = owner.rsplit(".", 1)
    if module == "time_modulators":
        count = sum(1 for n in rows if n.startswith(f"{owner}.input_time_modulators.")) // 2
        modules = [f"{m}_time_modulators.{i}" for m in ("input", "mlp") for i in range(count)] + [
            "final_time_modulator"
        ]
    else:
        modules = list(PACKS.get(module, ()))
    names = [f"{owner}.{m}.{kind}" for m in modules]
    return tuple((n, rows[n]) for n in names)
