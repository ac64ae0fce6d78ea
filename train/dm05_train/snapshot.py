"""What a checkpoint of this moment holds, copied out of reach of the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dm05_train.checkpoint import RunState
from dm05_train.config import as_plain
from dm05_train.model.weights import state_for_saving
from dm05_train.start import optimizer_tensors

if TYPE_CHECKING:
    from dm05_train.loop import Run


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A checkpoint in host memory."""

    state: RunState
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    rng: Mapping[str, Tensor]


def take_snapshot(run: Run) -> Snapshot:
    """Copy weights, optimizer state and counters to the host."""
    state = RunState(
        run=run.name,
        step=run.step,
        samples=run.samples,
        seed=run.seed,
        updates=int(run.optimizer.steps.item()),
        optimizer=run.config.optimizer_config.optim,
        precision=run.precision,
        dataset=run.config.data_config.dataset_name,
        dataset_samples=run.dataset_size,
        world=run.world.size,
        config=as_plain(run.config),
    )
    return Snapshot(
        state=state,
        weights={name: _host(tensor) for name, tensor in state_for_saving(run.model).items()},
        optimizer={name: _host(tensor) for name, tensor in optimizer_tensors(run.optimizer, run.model)},
        rng={"cpu": torch.get_rng_state()},
    )


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
