"""What every optimizer of ours holds: named parameters, their state, and the count of updates made."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dm05_train.optim.clip import clip_scale, local
from dm05_train.optim.precision import Mode, extra_state, moment_dtype


class NamedOptimizer:
    """Parameters by name, each with running means (``moments``) and what the precision mode keeps.

    Args:
        names: parameter -> its name in the model.
        moments: keys of the running means, shaped like the parameter.
        mode: the precision mode.
    """

    def __init__(self, names: dict[nn.Parameter, str], moments: Iterable[str], mode: Mode) -> None:
        self.names, self.mode = names, mode
        self.steps = torch.zeros((), dtype=torch.float64, device=next(iter(names)).device)
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        for parameter in names:
            weight = local(parameter.detach())
            means = {key: torch.zeros_like(weight, dtype=moment_dtype(mode)) for key in moments}
            self.state[parameter] = means | extra_state(weight, mode)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters it moves."""
        return list(self.names)

    def clip_scale(self, max_norm: float) -> tuple[Tensor, Tensor]:
        """(norm, scale) of the gradients; see ``clip.clip_scale``."""
        return clip_scale(self.names, max_norm)

    def accept(self, grad_scale: Tensor) -> Tensor:
        """Whether the step counts, bool on the device: its scale is finite and above 0. Counts it if so."""
        go = torch.isfinite(grad_scale) & (grad_scale > 0)
        self.steps += go
        return go
