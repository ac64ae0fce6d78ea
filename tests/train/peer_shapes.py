"""Models and batches at other shapes than the golden one, with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import generate_weights
from torch import Tensor

IMAGE_TOKEN, VOCABULARY = 90, 96
ACTION_DIM, REAL_DIMS = 32, 7
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model and one batch; a prompt is a list of pieces: a number of words, or "image"."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    attention_scalar: int
    layer_types: tuple[str, ...]
    window: int
    width: int
    expert_width: int
    eps: float
    rope: dict[str, dict[str, Any]]
    image_size: int
    patch: int
    tokens: int
    vision_width: int
    vision_heads: int
    vision_layers: int
    chunk: int
    prompts: tuple[tuple[int | str, ...], ...] = field(repr=False)

    def config(self) -> dict[str, Any]:
        """The content of a config.json."""
        decoder = {
            "num_hidden_layers": len(self.layer_types),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": VOCABULARY,
            "sliding_window": self.window,
            "query_pre_attn_scalar": self.attention_scalar,
            "rms_norm_eps": self.eps,
            "layer_types": list(self.layer_types),
            "rope_parameters": self.rope,
        }
        vision = {
            "model_type": "siglip_vision_model",
            "image_size": self.image_size,
            "patch_size": self.patch,
            "hidden_size": self.vision_width,
            "intermediate_size": 2 * self.vision_width + 6,
            "num_hidden_layers": self.vision_layers,
            "num_attention_heads": self.vision_heads,
            "layer_norm_eps": self.eps,
            "vision_use_head": False,
        }
        return {
            "action_dim": ACTION_DIM,
            "chunk_size": self.chunk,
            "vlm_config": {
                "image_token_index": IMAGE_TOKEN,
                "mm_tokens_per_image": self.tokens,
                "text_config": {**decoder, "hidden_size": self.width, "intermediate_size": 3 * self.width},
                "vision_config": vision,
            },
            "action_config": {**decoder, "hidden_size": self.expert_width, "intermediate_size": 2 * self.expert_width},
        }


def ropes(local: float, base: float, factor: float) -> dict[str, dict[str, Any]]:
    return {
        SLIDING: {"rope_type": "default", "rope_theta": local},
        FULL: {"rope_type": "linear", "rope_theta": base, "factor": factor},
    }


SHAPES = (
    # The released depth pattern twice over, three query heads a group, three images in a sample, a window wider than
    # the prefix.
    Shape(
        name="thirteen layers, wide window",
        heads=6,
        kv_heads=2,
        head_dim=24,
        attention_scalar=24,
        layer_types=((SLIDING,) * 5 + (FULL,)) * 2 + (SLIDING,),
        window=64,
        width=72,
        expert_width=36,
        eps=1e-6,
        rope=ropes(1e4, 1e6, 8.0),
        image_size=84,
        patch=14,
        tokens=9,
        vision_width=40,
        vision_heads=5,
        vision_layers=3,
        chunk=10,
        prompts=((3, "image", 2, "image", 2, "image", 6), (3, "image", 9), (2, "image", 2, "image", 7)),
    ),
    # One head a group, full attention first and last, a window between an image and the prefix, no pooling.
    Shape(
        name="no groups, medium window",
        heads=4,
        kv_heads=4,
        head_dim=32,
        attention_scalar=20,
        layer_types=(FULL, SLIDING, SLIDING, FULL),
        window=17,
        width=64,
        expert_width=56,
        eps=1e-5,
        rope=ropes(5e2, 2e4, 4.0),
        image_size=32,
        patch=8,
        tokens=16,
        vision_width=24,
        vision_heads=2,
        vision_layers=2,
        chunk=5,
        prompts=((1, "image", 3, "image", 2, "image", 30), (4, "image", 1, "image", 5)),
    ),
    # One group, a window narrower than an image and than the padding, two images that touch and so are one block.
    Shape(
        name="one group, narrow window",
        heads=8,
        kv_heads=1,
        head_dim=10,
        attention_scalar=16,
        layer_types=(SLIDING, FULL, SLIDING, SLIDING, SLIDING),
        window=5,
        width=40,
        expert_width=24,
        eps=1e-6,
        rope=ropes(1e4, 1e6, 2.0),
        image_size=60,
        patch=10,
        tokens=9,
        vision_width=48,
        vision_heads=3,
        vision_layers=2,
        chunk=7,
        prompts=((2, "image", "image", 4, "image", 8), (1, "image", 2)),
    ),
)


def make_batch(shape: Shape, seed: int) -> dict[str, Tensor]:
    """A random batch of the shape's prompts, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    for prompt in shape.prompts:
        words = torch.randint(1, IMAGE_TOKEN, (64,), generator=generator).tolist()
        pieces = [
            [IMAGE_TOKEN] * shape.tokens if p == "image" else [words.pop() for _ in range(int(p))] for p in prompt
        ]
        rows.append(list(chain.from_iterable(pieces)))
    length = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    images = sum(prompt.count("image") for prompt in shape.prompts)
    size = (len(rows), shape.chunk, ACTION_DIM)
    mask = (torch.arange(ACTION_DIM) < REAL_DIMS).float().expand(size).clone()
    return {
        "input_ids": ids,
        "token_type_ids": (ids == IMAGE_TOKEN).long(),
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.rand(images, 3, shape.image_size, shape.image_size, generator=generator) * 2 - 1,
        "action": torch.randn(size, generator=generator) * mask,
        "action_mask": mask,
        "noise": torch.randn(size, generator=generator),
        "time": torch.rand(len(rows), generator=generator),
    }


def make_model(shape: Shape, seed: int) -> DM05:
    """The plain model with random weights; norms and biases too, also those that must not be used."""
    model = DM05(DM05Config.from_dict(shape.config()))
    generate_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
