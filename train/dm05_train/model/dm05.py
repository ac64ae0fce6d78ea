"""DM05: a vision-language prefix, and a flow-matching action expert that reads its keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dm05_train.errors import TrainError
from dm05_train.model.config import DM05Config
from dm05_train.model.expert import ActionExpert, time_sinusoid
from dm05_train.model.language import LanguageModel, prefix_layout
from dm05_train.model.layers import KeysValues
from dm05_train.model.vision import Projector, VisionTower

Batch = Mapping[str, Tensor]
# Of a model restructured for speed: parameter name -> the released tensors it stacks, with their rows.
Packed = Mapping[str, tuple[tuple[str, int], ...]]


def namespace(**modules: nn.Module) -> nn.Module:
    """A module that only gives its children their place in the released names."""
    parent = nn.Module()
    for name, module in modules.items():
        parent.add_module(name, module)
    return parent


class DM05(nn.Module):
    """The whole model; its parameter names are the released ones (all but lm_head, a second copy of the embedding)."""

    def __init__(self, config: DM05Config) -> None:
        super().__init__()
        self.config = config
        width = config.expert.hidden_size
        self.packed: Packed = {}
        self.model: Any = namespace(
            vlm=namespace(
                model=namespace(
                    vision_tower=namespace(vision_model=VisionTower(config.vision)),
                    multi_modal_projector=Projector(config),
                    language_model=LanguageModel(config.text),
                )
            ),
            action_expert=ActionExpert(config.expert),
            action_in_proj=nn.Linear(config.action_dim, width),
            action_out_proj=nn.Linear(width, config.action_dim),
            time_mlp_in=nn.Linear(width, width),
            time_mlp_out=nn.Linear(width, width),
        )

    @property
    def vision(self) -> VisionTower:
        return self.model.vlm.model.vision_tower.vision_model

    @property
    def projector(self) -> Projector:
        return self.model.vlm.model.multi_modal_projector

    @property
    def language(self) -> LanguageModel:
        return self.model.vlm.model.language_model

    @property
    def expert(self) -> ActionExpert:
        return self.model.action_expert

    def set_checkpointing(self, every: int) -> None:
        """In backward, recompute every ``every``-th layer of both towers instead of keeping its activations."""
        self.vision.checkpointing = self.language.checkpointing = every

    def embed(self, input_ids: Tensor, token_type_ids: Tensor, pixel_values: Tensor) -> Tensor:
        """Prefix embeddings [B, L, C]; images [B*V, 3, S, S] fill the image tokens by sample, then position."""
        images = self.projector(self.vision(pixel_values)).flatten(0, 1)
        is_image = token_type_ids == 1
        tokens = self.language.embed(input_ids * ~is_image)
        return self.merge_images(tokens, is_image, images.to(tokens.dtype))

    def merge_images(self, tokens: Tensor, is_image: Tensor, images: Tensor) -> Tensor:
        """Put the image vectors [image tokens, C], in order, where ``is_image`` [B, L] says, into tokens [B, L, C].

        Raises:
            TrainError: the prompts hold more or fewer image tokens than the images make.
        """
        if int(is_image.sum()) != len(images):
            raise TrainError(
                f"the prompts hold {int(is_image.sum())} image tokens, the images make {len(images)}",
                fix="Every image of the batch needs one <start_of_image> block in its prompt",
            )
        return tokens.masked_scatter(is_image[..., None], images)

    def prefix(
        self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor
    ) -> list[KeysValues]:
        """Keys (after norm and RoPE) and values [B, G, L, D] of every language layer."""
        embeddings = self.embed(input_ids, token_type_ids, pixel_values)
        return self.language(embeddings, prefix_layout(token_type_ids, attention_mask))

    def time_condition(self, time: Tensor) -> Tensor:
        """Flow times [B] -> [B, C_expert]."""
        m = self.model
        sinusoid = time_sinusoid(time, self.config.expert.hidden_size).to(m.time_mlp_in.weight.dtype)
        return F.silu(m.time_mlp_out(F.silu(m.time_mlp_in(sinusoid))))

    def velocity(self, prefix: list[KeysValues], attention_mask: Tensor, x_t: Tensor, time: Tensor) -> Tensor:
        """The flow at noisy actions x_t [B, T, A] and times [B]: float32 [B, T, A]."""
        m = self.model
        suffix = m.action_in_proj(x_t.to(m.action_in_proj.weight.dtype))
        features = self.expert(suffix, self.time_condition(time), prefix, attention_mask.bool())
        return m.action_out_proj(features).float()

    def _prefix_of(self, batch: Batch) -> list[KeysValues]:
        names = ("input_ids", "token_type_ids", "attention_mask", "pixel_values")
        return self.prefix(*(batch[name] for name in names))

    def loss(self, batch: Batch, noise: Tensor, time: Tensor, *, reduction: str = "mean") -> Tensor:
        """Flow-matching loss: per sample the mean squared error over its masked elements, then the mean over samples.

        Args:
            batch: input_ids, token_type_ids, attention_mask [B, L], pixel_values [B*V, 3, S, S], action and action_mask
                [B, T, A] (a sample whose mask is all zero must not get here).
            noise: float32 [B, T, A], standard normal.
            time: float32 [B] in 0..1 (1 is pure noise).
            reduction: "mean", or "none" for a loss a sample [B].
        """
        action, mask = batch["action"].float(), batch["action_mask"].float()
        t = time.float()[:, None, None]
        x_t = (t * noise + (1.0 - t) * action) * mask
        velocity = self.velocity(self._prefix_of(batch), batch["attention_mask"], x_t, time)
        error = (velocity - (noise - action)).square() * mask
        per_sample = error.sum((1, 2)) / mask.sum((1, 2))
        return per_sample.mean() if reduction == "mean" else per_sample

    def forward(self, batch: Batch, noise: Tensor, time: Tensor, *, reduction: str = "mean") -> Tensor:
        """The loss, so that wrappers (DDP, FSDP) see one call."""
        return self.loss(batch, noise, time, reduction=reduction)

    @torch.no_grad()
    def sample(self, batch: Batch, noise: Tensor, steps: int = 10) -> Tensor:
        """Actions [B, T, A] (read the real dims only): Euler steps from noise at t = 1 to t = 0, state in float32."""
        prefix, mask = self._prefix_of(batch), batch["action_mask"].float()
        x = noise.float()
        for i in range(steps):
            x = x * mask
            time = torch.full((len(x),), 1.0 - i / steps, device=x.device)
            x = x - self.velocity(prefix, batch["attention_mask"], x, time) / steps
        return x
