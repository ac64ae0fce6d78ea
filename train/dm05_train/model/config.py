"""The numbers of a DM05 checkpoint, read from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dm05_train.errors import TrainError

RELEASED = Path(__file__).with_name("released_config.json")
"""The released model's config.json, for what needs its sizes and not its weights."""
_FETCH = "Run dm05-prep model, or name a checkpoint with --model-config.model-name-or-path"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer: base, and the number positions are divided by."""

    theta: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Gemma 3 decoder: the language model, or the action expert that reads its keys and values."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_window: int
    attention_scale: float
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    rope: dict[str, RopeConfig]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Read ``text_config`` or ``action_config`` of a config.json."""
        rope = {
            kind: RopeConfig(
                theta=float(value["rope_theta"]),
                factor=float(value.get("factor", 1.0)) if value.get("rope_type") == "linear" else 1.0,
            )
            for kind, value in raw["rope_parameters"].items()
        }
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            vocab_size=raw["vocab_size"],
            sliding_window=raw["sliding_window"],
            attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
            rms_norm_eps=raw["rms_norm_eps"],
            layer_types=tuple(raw["layer_types"]),
            rope=rope,
        )


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The SigLIP vision tower."""

    image_size: int
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    num_channels: int = 3

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> VisionConfig:
        """Read ``vision_config`` of a config.json."""
        return cls(
            image_size=raw["image_size"],
            patch_size=raw["patch_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            layer_norm_eps=raw["layer_norm_eps"],
            num_channels=raw.get("num_channels", 3),
        )


@dataclass(frozen=True, kw_only=True)
class DM05Config:
    """Everything the model is built from."""

    text: DecoderConfig
    expert: DecoderConfig
    vision: VisionConfig
    action_dim: int
    chunk_size: int
    image_token_id: int
    mm_tokens_per_image: int
    pad_token_id: int

    def __post_init__(self) -> None:
        shared = ("num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in shared:
            if getattr(self.text, name) != getattr(self.expert, name):
                raise TrainError(
                    f"the action expert must share {name} with the language model: "
                    f"{getattr(self.expert, name)} is not {getattr(self.text, name)}",
                    where="config.json",
                )
        side = round(self.mm_tokens_per_image**0.5)
        if side * side != self.mm_tokens_per_image or self.vision.patches_per_side % side:
            raise TrainError(
                f"{self.vision.patches_per_side}x{self.vision.patches_per_side} patches cannot be pooled to "
                f"{self.mm_tokens_per_image} tokens an image",
                where="config.json",
            )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DM05Config:
        """Read the content of a config.json.

        Raises:
            TrainError: a key is missing, or the parts do not fit together.
        """
        try:
            vlm = raw["vlm_config"]
            return cls(
                text=DecoderConfig.from_dict(vlm["text_config"]),
                expert=DecoderConfig.from_dict(raw["action_config"]),
                vision=VisionConfig.from_dict(vlm["vision_config"]),
                action_dim=raw["action_dim"],
                chunk_size=raw["chunk_size"],
                image_token_id=vlm["image_token_index"],
                mm_tokens_per_image=vlm["mm_tokens_per_image"],
                pad_token_id=raw.get("pad_token_id") or 0,
            )
        except KeyError as error:
            raise TrainError(
                f"the key {error} is missing", where="config.json", fix="Is this a DM05 checkpoint?"
            ) from None
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            what = f"not a DM05 configuration: {error}"
            raise TrainError(what, where="config.json", fix="Is this a DM05 checkpoint?") from None

    @classmethod
    def from_json(cls, path: Path, *, fix: str = _FETCH) -> DM05Config:
        """Read a checkpoint's config.json (``path``: the file or its folder; ``fix``: what to do if it is not right).

        Raises:
            TrainError: it cannot be read, a key is missing, or the parts do not fit together.
        """
        raw = read_settings(path, fix=fix)
        try:
            return cls.from_dict(raw)
        except TrainError as error:
            raise TrainError(error.what, where=_config_file(path), fix=fix) from None


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def read_settings(path: Path, *, fix: str = _FETCH) -> dict[str, Any]:
    """What a config.json holds (``path``: the file or its folder; ``fix``: what to do if it cannot be read).

    Raises:
        TrainError: it cannot be read, or holds something else than settings.
    """
    path = _config_file(path)
    try:
        raw = json.loads(path.read_text("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("no settings in it")
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        raise TrainError(f"cannot read the model's configuration: {reason}", where=path, fix=fix) from None
    return raw
