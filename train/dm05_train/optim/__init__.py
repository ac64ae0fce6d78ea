"""Optimizers, precision, schedule: what moves the weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from dm05_train.config import OptimizerConfig
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.clip import clip_scale as clip_scale
from dm05_train.optim.precision import Mode


class Optimizer(Protocol):
    """What the loop and the checkpoint need of an optimizer (see ``adamw`` for the meaning of each)."""

    names: dict[nn.Parameter, str]
    state: dict[nn.Parameter, dict[str, Tensor]]
    steps: Tensor

    def clip_scale(self, max_norm: float) -> tuple[Tensor, Tensor]: ...
    def step(self, lr: Tensor, grad_scale: Tensor) -> None: ...


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, mode: Mode
) -> Optimizer:
    """The optimizer of a run over its trainable parameters."""
    return AdamW(
        [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        mode=mode,
    )
