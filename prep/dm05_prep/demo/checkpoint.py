"""A tiny DM05 checkpoint folder: the released tensor names and config keys at sizes that train on a laptop.

::

    DM05/config.json                 the keys of the released one
    DM05/model.safetensors           every tensor that config calls for, float32
    DM05/tokenizer.json              see demo.tokenizer
    DM05/{tokenizer,preprocessor,processor}_config.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from dm05_schemas.checkpoint import expected_tensors
from safetensors.numpy import save

from dm05_prep.demo.tokenizer import IMAGE_TOKEN, Tokenizer, build_tokenizer

Array = npt.NDArray[np.float32]

IMAGE_SIZE = 56
TOKENS_PER_IMAGE = 16
LAYERS = 6  # five that slide, then a full one, as in Gemma 3
CHUNK_SIZE = 10
ACTION_DIM = 32
EMBEDDING = "model.vlm.model.language_model.embed_tokens.weight"
LM_HEAD = "model.vlm.lm_head.weight"


def demo_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json of the demo model."""
    decoder = {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": -(-tokenizer.size // 64) * 64,
        "sliding_window": 64,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
        "pad_token_id": tokenizer.ids["<pad>"],
        "model_type": "gemma3_text",
        "use_bidirectional_attention": False,
    }
    vision = {
        "image_size": IMAGE_SIZE,
        "patch_size": 14,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": False,
        "num_channels": 3,
        "attention_dropout": 0.0,
        "model_type": "siglip_vision_model",
    }
    return {
        "architectures": ["DM05ForConditionalGeneration"],
        "model_type": "dm05",
        "dtype": "float32",
        "action_dim": ACTION_DIM,
        "chunk_size": CHUNK_SIZE,
        "pad_token_id": tokenizer.ids["<pad>"],
        "tie_word_embeddings": True,
        "vlm_config": {
            "model_type": "gemma3",
            "image_token_index": tokenizer.ids[IMAGE_TOKEN],
            "boi_token_index": tokenizer.ids["<start_of_image>"],
            "eoi_token_index": tokenizer.ids["<end_of_image>"],
            "mm_tokens_per_image": TOKENS_PER_IMAGE,
            "text_config": {"hidden_size": 64, "intermediate_size": 160, **decoder},
            "vision_config": vision,
        },
        "action_config": {"hidden_size": 64, "intermediate_size": 160, **decoder},
    }


def initial_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """A starting value for one tensor, chosen so that a few hundred steps are enough to learn the demo.

    Weights of RMSNorms are offsets from 1, so 0 is neutral. The gates of the time modulators start at 1: a gate at 0
    would shut the gradient out of its layer.
    """
    *_, module, kind = name.split(".")
    if kind == "bias":
        bias = np.zeros(shape, np.float32)
        if "time_modulator" in name:
            bias[2 * shape[0] // 3 :] = 1.0
        return bias
    if len(shape) == 1:
        if "vision_tower" in name:  # a LayerNorm
            return np.ones(shape, np.float32)
        if module == "q_norm":  # sharper attention than the config's scale alone
            return np.ones(shape, np.float32)
        # What an expert layer adds starts small beside the action it refines.
        damped = "action_expert" in name and module.startswith("post_")
        return np.full(shape, -0.5 if damped else 0.0, np.float32)
    fan_in = shape[0] if kind == "mm_input_projection_weight" else int(np.prod(shape[1:]))
    scale = fan_in**-0.5
    if module == "position_embedding":
        scale = 1.0
    elif module == "patch_embedding":
        scale *= 3.0  # as loud as the positions
    elif module == "action_in_proj":
        scale *= 2.0  # most of its 32 inputs are padding
    elif module == "action_out_proj" or "time_modulator" in name:
        scale *= 0.1
    drawn: Array = (rng.standard_normal(shape) * scale).astype(np.float32)
    return drawn


def initial_weights(config: dict[str, Any], seed: int) -> dict[str, Array]:
    """Every tensor the config calls for, by released name; ``lm_head`` is the embedding again."""
    rng = np.random.default_rng(seed)
    weights = {name: initial_tensor(name, shape, rng) for name, shape in expected_tensors(config).items()}
    return weights | {LM_HEAD: weights[EMBEDDING].copy()}


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", "utf-8")


def write_checkpoint(folder: Path, seed: int) -> None:
    """Fill the (existing, empty) folder with the demo checkpoint."""
    tokenizer = build_tokenizer()
    config = demo_config(tokenizer)
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", tokenizer.json)
    _write_json(folder / "tokenizer_config.json", tokenizer.config)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    half = [0.5, 0.5, 0.5]
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": size, "image_mean": half, "image_std": half}
    _write_json(folder / "preprocessor_config.json", image)
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": TOKENS_PER_IMAGE}
    _write_json(folder / "processor_config.json", processor)
    (folder / "model.safetensors").write_bytes(save(initial_weights(config, seed), metadata={"format": "pt"}))
