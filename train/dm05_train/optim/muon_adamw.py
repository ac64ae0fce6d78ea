"""Two optimizers as one: Muon for the matrices of the action expert's layers, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from dm05_train.config import OptimizerConfig
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.clip import clip_to
from dm05_train.optim.muon import Muon, Named, muon_parameters
from dm05_train.optim.precision import Mode


class MuonAdamW:
    """A step of both, with the rate and the clip coefficient of one.

    On a GPU the two run side by side: Muon is bound by matmuls (and by the gather, over several GPUs), AdamW by memory,
    which half of the multiprocessors suffice to saturate.

    Args:
        muon: moves some parameters.
        rest: moves the others.
    """

    def __init__(self, muon: Muon, rest: AdamW) -> None:
        self.muon, self.rest = muon, rest
        self.names: dict[nn.Parameter, str] = muon.names | rest.names
        self.state: dict[nn.Parameter, dict[str, Tensor]] = muon.state | rest.state
        self.steps = rest.steps
        self.side: torch.cuda.Stream | None = None
        self.blocks: int | None = None
        if rest.steps.is_cuda:
            self.side = torch.cuda.Stream(rest.steps.device)
            self.blocks = torch.cuda.get_device_properties(rest.steps.device).multi_processor_count // 2

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters it moves."""
        return list(self.names)

    def clip_scale(self, max_norm: float) -> tuple[Tensor, Tensor]:
        """(norm, scale) of all gradients together; see ``clip.clip_scale``."""
        return clip_to(torch.hypot(self.muon.clip_scale(max_norm)[0], self.rest.clip_scale(max_norm)[0]), max_norm)

    def step(self, lr: Tensor, grad_scale: Tensor) -> None:
        """One update; see ``AdamW.step``."""
        self.rest.blocks = self.blocks if self.side is not None else None
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


def build_muon_adamw(
    named_parameters: Iterable[Named],
    config: OptimizerConfig,
    mode: Mode,
    *,
    splits: Mapping[str, tuple[int, ...]],
    batched: bool,
    adamw: Callable[[list[Named]], AdamW],
    muon: type[Muon] = Muon,
) -> MuonAdamW:
    """Muon and AdamW over the trainable parameters of a model.

    Args:
        named_parameters: all of them.
        config: the run's settings.
        mode: the precision mode.
        splits: the rows of each matrix in packed parameters, by name (other names do no harm).
        batched: whether DM05_MUON_BATCHED_GATHER is on.
        adamw: builds AdamW over some parameters.
        muon: which implementation.

    Raises:
        TrainError: there is nothing for Muon to move.
    """
    matrices, rest = muon_parameters(named_parameters)
    mover = muon(
        matrices,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        steps=config.muon_ns_steps,
        lr_scale=config.muon_lr_scale,
        coefficient=config.muon_coefficient,
        weight_decay=config.weight_decay,
        mode=mode,
        splits=splits,
        batched=batched,
    )
    return MuonAdamW(mover, adamw(rest))
