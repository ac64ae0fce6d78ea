"""The vision tower (SigLIP) and the projector that turns its patches into language tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dm05_train.model.config import DM05Config, VisionConfig
from dm05_train.model.layers import RMSNorm, run_layer


class VisionAttention(nn.Module):
    """Full self-attention over the patches of one image, with biases."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    """Patches to vectors, plus a learned position each."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, width, kernel_size=patch, stride=patch)
        self.position_embedding = nn.Embedding(config.patches_per_side**2, width)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class VisionTower(nn.Module):
    """Images [B*V, 3, S, S] in -1..1 to patch features [B*V, N, C]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.encoder: Any = nn.Module()
        self.encoder.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_layers))
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.checkpointing = 0

    def forward(self, pixels: Tensor) -> Tensor:
        return self.encode(self.embeddings(pixels))

    def encode(self, x: Tensor) -> Tensor:
        """Embeddings [B*V, N, C] through all layers and the last norm."""
        for i, layer in enumerate(self.encoder.layers):
            x = run_layer(layer, x, index=i, every=self.checkpointing)
        return self.post_layernorm(x)


class Projector(nn.Module):
    """Average-pool the patch grid to mm_tokens_per_image, RMSNorm, then one matrix into the language width."""

    def __init__(self, config: DM05Config) -> None:
        super().__init__()
        vision = config.vision
        self.side = vision.patches_per_side
        self.kernel = self.side // round(config.mm_tokens_per_image**0.5)
        self.mm_input_projection_weight = nn.Parameter(torch.zeros(vision.hidden_size, config.text.hidden_size))
        self.mm_soft_emb_norm = RMSNorm(vision.hidden_size, vision.layer_norm_eps)

    def forward(self, patches: Tensor) -> Tensor:
        """[B*V, N, C_vision] -> [B*V, tokens, C_text]."""
        grid = patches.transpose(1, 2).unflatten(2, (self.side, self.side))
        pooled = F.avg_pool2d(grid, self.kernel).flatten(2).transpose(1, 2)
        return self.mm_soft_emb_norm(pooled) @ self.mm_input_projection_weight
