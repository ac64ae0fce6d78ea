"""Optimizers, precision, schedule: what moves the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor, nn

from dm05_train.config import OptimizerConfig
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.clip import clip_scale as clip_scale
from dm05_train.optim.muon import Muon
from dm05_train.optim.muon_adamw import build_muon_adamw
from dm05_train.optim.precision import Mode


class Optimizer(Protocol):
    """What the loop and the checkpoint need of an optimizer (see ``adamw`` for the meaning of each)."""

    names: dict[nn.Parameter, str]
    state: dict[nn.Parameter, dict[str, Tensor]]
    steps: Tensor

    def clip_scale(self, max_norm: float) -> tuple[Tensor, Tensor]: ...
    def step(self, lr: Tensor, grad_scale: Tensor) -> None: ...


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    mode: Mode,
    *,
    packed: Mapping[str, tuple[tuple[str, int], ...]] | None = None,
    muon_batched: bool = True,
    adamw_class: type[AdamW] = AdamW,
    muon_class: type[Muon] = Muon,
) -> Optimizer:
    """The optimizer of a run over its trainable parameters.

    Args:
        named_parameters: all of the model's.
        config: the run's settings.
        mode: the precision mode.
        packed: which released tensors the model's packed parameters stack (``DM05.packed``).
        muon_batched: whether DM05_MUON_BATCHED_GATHER is on.
        adamw_class, muon_class: which implementations (R1's take one pass).
    """

    def adamw(named: list[tuple[str, nn.Parameter]]) -> AdamW:
        return adamw_class(
            named,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            mode=mode,
        )

    trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if config.optim == "adamw":
        return adamw(trainable)
    splits = {name: tuple(rows for _, rows in parts) for name, parts in (packed or {}).items()}
    return build_muon_adamw(trainable, config, mode, splits=splits, batched=muon_batched, adamw=adamw, muon=muon_class)
