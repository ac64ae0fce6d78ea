"""Optimizers, precision, schedule: what moves the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from dm05_train.config import OptimizerConfig
from dm05_train.optim.adamw import AdamW, local
from dm05_train.optim.precision import Mode


class Optimizer(Protocol):
    """What the loop and the checkpoint need of an optimizer (see ``adamw`` for the meaning of each)."""

    names: dict[nn.Parameter, str]
    state: dict[nn.Parameter, dict[str, Tensor]]
    steps: Tensor

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


@torch.no_grad()
def clip_scale(parameters: Sequence[nn.Parameter], max_norm: float) -> tuple[Tensor, Tensor]:
    """Norm of all gradients together, and the factor that brings them under ``max_norm``, without a host
    synchronisation.

    Sharded gradients are summed over their ranks, so that every rank gets the same two numbers and takes the same
    decision.

    Returns:
        (norm, scale) float32 scalars on the device; scale is 0 when the norm is not finite, which makes ``step`` skip.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = torch._foreach_norm([local(gradient) for gradient in gradients], 2, dtype=torch.float32)
    square = torch.stack(norms).square().sum()
    if mesh := next((g.device_mesh for g in gradients if hasattr(g, "device_mesh")), None):
        torch.distributed.all_reduce(square, group=mesh.get_group())
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm, torch.where(torch.isfinite(norm), scale, 0.0)
