"""The restructured towers, written as chains of fused operations.

The norm that begins a layer is computed by the operation that ends the layer before it: a residual add, the norm
behind it and the norm in front of the next piece are one pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from dm05_train.model.language import LanguageModel, PrefixLayout
from dm05_train.model.layers import KeysValues, Rope, run_layer
from dm05_train.model.vision import VisionTower
from dm05_train.perf.ops.gelu import vision_mlp
from dm05_train.perf.ops.heads import split_heads
from dm05_train.perf.ops.layer_norm import add_layer_norm
from dm05_train.perf.ops.prefix import prefix_attention
from dm05_train.perf.ops.rms import add_rms_norm
from dm05_train.perf.ops.vision_heads import vision_qkv

MLP = Callable[[Tensor, Tensor, Tensor], Tensor]  # (h, packed gate/up weight, down weight) -> out


def vision_encode(tower: VisionTower, x: Tensor) -> Tensor:
    """``VisionTower.encode`` of a tower with packed attention: embeddings [B*V, N, C] to features [B*V, N, C]."""
    layers = list(tower.encoder.layers)
    nexts = [layer.layer_norm1 for layer in layers[1:]] + [tower.post_layernorm]
    first = layers[0].layer_norm1
    h = F.layer_norm(x, x.shape[-1:], first.weight, first.bias, first.eps)
    for i, (layer, norm) in enumerate(zip(layers, nexts, strict=True)):
        x, h = run_layer(_vision_layer, layer, norm, x, h, index=i, every=tower.checkpointing)
    return h


def _vision_layer(layer: object, after: object, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """One layer from its normalised input h; gives the residual stream and it normalised by ``after``."""
    attn, mlp, norm = layer.self_attn, layer.mlp, layer.layer_norm2  # type: ignore[attr-defined]
    q, k, v = vision_qkv(h, attn.qkv_proj.weight, attn.qkv_proj.bias, attn.num_heads)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    out = F.linear(out, attn.out_proj.weight)
    x, h = add_layer_norm(out, attn.out_proj.bias, x, norm.weight, norm.bias, norm.eps)
    out = vision_mlp(h, mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight)
    return add_layer_norm(out, mlp.fc2.bias, x, after.weight, after.bias, after.eps)  # type: ignore[attr-defined]


def language_forward(language: LanguageModel, x: Tensor, layout: PrefixLayout) -> list[KeysValues]:
    """``LanguageModel.forward`` of a packed model: embeddings [B, L, C] to keys and values of every layer."""
    config, layers = language.config, list(language.layers)
    ropes = language.ropes(layout.positions)
    h = layers[0].input_layernorm(x)  # type: ignore[operator]
    prefix: list[KeysValues] = []
    for i, (kind, layer, after) in enumerate(zip(config.layer_types[:-1], layers[:-1], layers[1:], strict=True)):
        weight, mlp = after.input_layernorm.weight, language.gated_mlp
        arguments = (layer, weight, x, h, ropes[kind], layout, config.num_heads, mlp)
        x, h, k, v = run_layer(_language_layer, *arguments, index=i, every=language.checkpointing)
        prefix.append((k, v))
    prefix.append(layers[-1].self_attn.keys_values(h, ropes[config.layer_types[-1]]))  # type: ignore[union-attr]
    return prefix


def _language_layer(
    layer: object, after: Tensor, x: Tensor, h: Tensor, rope: Rope, layout: PrefixLayout, heads: int, gated_mlp: MLP
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One layer from its normalised input h; gives x, x normalised with the weight ``after``, keys and values."""
    attn, mlp = layer.self_attn, layer.mlp  # type: ignore[attr-defined]
    eps = attn.q_norm.eps
    qkv = F.linear(h, attn.qkv_proj.weight)
    q, k, v = split_heads(qkv, rope, attn.q_norm.weight, attn.k_norm.weight, heads, eps)
    window = layer.window or x.shape[1]  # type: ignore[attr-defined]
    out = F.linear(prefix_attention(q, k, v, layout.blocks, layout.real, window, attn.scale), attn.o_proj.weight)
    norms = (layer.post_attention_layernorm.weight, layer.pre_feedforward_layernorm.weight)  # type: ignore[attr-defined]
    x, h = add_rms_norm(out, x, *norms, eps)
    out = gated_mlp(h, mlp.gate_up_proj.weight, mlp.down_proj.weight)
    x, h = add_rms_norm(out, x, layer.post_feedforward_layernorm.weight, after, eps)  # type: ignore[attr-defined]
    return x, h, k, v


def patch_embed(tower: VisionTower, pixels: Tensor) -> Tensor:
    """``VisionEmbeddings.forward`` as one matmul instead of a convolution: [B*V, 3, S, S] -> [B*V, N, C]."""
    embeddings = tower.embeddings
    convolution = embeddings.patch_embedding
    side, patch = pixels.shape[-1] // convolution.kernel_size[0], convolution.kernel_size[0]
    patches = pixels.to(convolution.weight.dtype).unflatten(3, (side, patch)).unflatten(2, (side, patch))
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    out = F.linear(patches, convolution.weight.flatten(1), convolution.bias)
    return out + embeddings.position_embedding.weight
