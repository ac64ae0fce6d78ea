"""The gradient clip: one norm over all gradients, and the factor that brings it down."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds (all of it unless it is sharded)."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


@torch.no_grad()
def clip_scale(parameters: Iterable[nn.Parameter], max_norm: float) -> tuple[Tensor, Tensor]:
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
    return clip_to(square.sqrt(), max_norm)


def clip_to(norm: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """(norm, scale): the factor that brings a norm under ``max_norm``, 0 when it is not finite."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm, torch.where(torch.isfinite(norm), scale, 0.0)
