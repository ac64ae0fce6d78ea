"""Optimizer state by released parameter name: out of a run into a checkpoint, and back into any other arrangement.

A checkpoint knows neither shards nor packed parameters: each of its tensors is whole and belongs to one released name.
So a run may go on with other numbers of ranks, sharded or not, packed or not, and in another precision mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import Packed
from dm05_train.optim import Optimizer
from dm05_train.optim.clip import local
from dm05_train.optim.precision import join16, write_master

STEPS = "steps"
Entry = tuple[str, str, Tensor]
"""Kind of state (exp_avg, remainder, ...), released parameter name, whole tensor."""


def state_tensors(optimizer: Optimizer) -> dict[tuple[str, str], Tensor]:
    """The state by (kind, name of the parameter as this run has it); sharded like the parameter."""
    found: dict[tuple[str, str], Tensor] = {(STEPS, ""): optimizer.steps}
    for parameter, name in optimizer.names.items():
        for kind, tensor in optimizer.state[parameter].items():
            found[kind, name] = _like(tensor, parameter)
    return found


def _like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A rank's part of some state as the same kind of shard as its parameter."""
    if not isinstance(parameter, DTensor):
        return tensor
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where the state of one released name goes on this rank: views to fill, and the rows of the whole that they
    hold."""

    weight: Tensor
    state: dict[str, Tensor]
    rows: slice


def slots(optimizer: Optimizer, model: DM05) -> dict[str, Slot]:
    """The slot of every released name that has a part on this rank."""
    packed = model.packed
    found: dict[str, Slot] = {}
    for parameter, name in optimizer.names.items():
        weight, state, first = local(parameter.detach()), optimizer.state[parameter], _first_row(parameter)
        for released, start, stop in _places(name, parameter, packed):
            low, high = max(start, first), min(stop, first + _rows(weight))
            if low >= high:
                continue
            here = slice(low - first, high - first) if weight.ndim else ...
            found[released] = Slot(
                weight=weight[here],
                state={kind: tensor[here] for kind, tensor in state.items()},
                rows=slice(low - start, high - start),
            )
    return found


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _first_row(parameter: nn.Parameter) -> int:
    """The row of the whole parameter at which this rank's part begins."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offset[0])


def _places(name: str, parameter: nn.Parameter, packed: Packed) -> Iterator[tuple[str, int, int]]:
    """Released names in a parameter, and the rows of each."""
    start = 0
    for released, rows in packed.get(name, ((name, _rows(parameter)),)):
        yield released, start, start + rows
        start += rows


@torch.no_grad()
def restore(optimizer: Optimizer, model: DM05, entries: Iterable[Entry], *, threads: int = 1) -> None:
    """Fill an optimizer from a checkpoint's entries, after the weights were loaded.

    The float32 value of a weight is what the checkpoint's precision mode kept of it (``master``, or ``remainder``
    beside the weight); it is stored in the way of the optimizer's own mode. Each entry is one of its own; ``threads``
    are filled in at once.
    """
    places = slots(optimizer, model)
    for slot in places.values():  # what the weights alone say, should the checkpoint have kept nothing beside them
        write_master(slot.weight, slot.state, slot.weight.float())

    def fill(entry: Entry) -> None:
        kind, name, tensor = entry
        with torch.no_grad():
            if kind == STEPS:
                optimizer.steps.copy_(tensor)
            elif name in places:
                _fill(places[name], kind, tensor)

    if threads == 1:
        for entry in entries:
            fill(entry)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, entries))


def _fill(slot: Slot, kind: str, tensor: Tensor) -> None:
    part = (tensor[slot.rows] if tensor.ndim else tensor).to(slot.weight.device)
    if kind == "master":
        write_master(slot.weight, slot.state, part)
    elif kind == "remainder":
        write_master(slot.weight, slot.state, join16(slot.weight.bfloat16(), part))
    elif kind in slot.state:
        slot.state[kind].copy_(part)
