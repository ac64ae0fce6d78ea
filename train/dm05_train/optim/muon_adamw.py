"""Two optimizers as one: Muon for the matrices of the action expert's layers, AdamW for the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dm05_train.optim.adamw import AdamW
from dm05_train.optim.muon import Muon


class MuonAdamW:
    """A step of both, with the rate and the clip coefficient of one.

    On a GPU the two run side by side: Muon is bound by matmuls (and by the gather, over several GPUs), AdamW by memory.

    Args:
        muon: moves some parameters.
        rest: moves the others.
    """

    def __init__(self, muon: Muon, rest: AdamW) -> None:
        self.muon, self.rest = muon, rest
        self.names: dict[nn.Parameter, str] = muon.names | rest.names
        self.state: dict[nn.Parameter, dict[str, Tensor]] = muon.state | rest.state
        self.side = torch.cuda.Stream(rest.steps.device) if rest.steps.is_cuda else None

    @property
    def steps(self) -> Tensor:
        """The updates made so far, float64 scalar on the device."""
        return self.rest.steps

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters it moves."""
        return list(self.names)

    def step(self, lr: Tensor, grad_scale: Tensor) -> None:
        """One update; see ``AdamW.step``."""
        if self.side is None:
            self.muon.step(lr, grad_scale)
            self.rest.step(lr, grad_scale)
            return
        here = torch.cuda.current_stream(self.rest.steps.device)
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            self.muon.step(lr, grad_scale)
        self.rest.step(lr, grad_scale)
        here.wait_stream(self.side)
