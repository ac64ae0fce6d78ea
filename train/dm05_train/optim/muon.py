"""Muon: the momentum of a weight matrix, made orthogonal, is its update.

The computation is the one of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"`` (a test holds the two
together), and matrix by matrix it is torch's own function that orthogonalises. What torch's optimizer lacks is here:
stacks of matrices and work shared over ranks (``orthogonal``, ``exchange``), packed weights, FP32 masters of BF16
weights, and a rate and a clip coefficient that stay on the device, so that a step waits for nothing.

State, keyed and stored like that of ``adamw``: ``state[parameter]["momentum_buffer"]``, a running mean of the gradient
shaped like the parameter, in ``precision.moment_dtype``, and the precision mode's ``remainder`` or ``master``.

A weight moves when every rank that holds it has a gradient for it; else it keeps its value and momentum on all of them,
so that replicas stay equal. A zero gradient is a gradient: its momentum decays. A step whose ``grad_scale`` is 0 or not
finite changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz

from dm05_train.errors import TrainError
from dm05_train.optim.adamw import local
from dm05_train.optim.exchange import Replicas, Shards
from dm05_train.optim.orthogonal import COEFFICIENTS, EPS, cost, deal, orthogonalise_in_batches
from dm05_train.optim.precision import Mode, extra_state, moment_dtype, read_master, write_master

Named = tuple[str, nn.Parameter]
EXPERT_MATRIX = re.compile(r"(^|\.)action_expert\.layers\.\d+\.(self_attn|mlp)\.")


def muon_parameters(named_parameters: Iterable[Named]) -> tuple[list[Named], list[Named]]:
    """Part parameters into those Muon moves (the matrices of the action expert's attention and MLP) and the rest."""
    muon: list[Named] = []
    rest: list[Named] = []
    for name, parameter in named_parameters:
        (muon if parameter.ndim == 2 and EXPERT_MATRIX.search(name) else rest).append((name, parameter))
    return muon, rest


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter and the matrices stacked in its rows (one, unless it is packed)."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, int]
    splits: tuple[int, ...]
    scale: Tensor
    """float32 [R, 1]: what an orthogonal update is multiplied by."""

    def cost(self, steps: int) -> int:
        """Floating-point operations to orthogonalise its matrices."""
        return sum(cost(rows, self.shape[1], steps) for rows in self.splits)


class Muon:
    """Muon over named matrices.

    Args:
        named_parameters: (name, parameter [R, C]) pairs, the same on all ranks; plain tensors or FSDP2 shards.
        momentum: decay of the running mean of the gradient.
        nesterov: whether the update looks ahead along the momentum.
        steps: Newton-Schulz steps.
        lr_scale: its rate as a multiple of the rate given to ``step``.
        coefficient: an update has ``coefficient * sqrt(max(R, C))`` for singular values, near what AdamW's step has.
        weight_decay: the weight shrinks by ``lr * lr_scale * weight_decay`` of itself each step.
        mode: the precision mode.
        splits: for packed parameters, the rows of each matrix in them, by name.
        batched: same-shape matrices together, shared over ranks; off: matrix by matrix, all of them on every rank.
        group: the ranks that hold the same plain parameters; default: all ranks of this run.

    Raises:
        TrainError: no parameters, a parameter that is no matrix, or splits that do not add up.
    """

    def __init__(
        self,
        named_parameters: Iterable[Named],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        lr_scale: float = 1.0,
        coefficient: float = 0.2,
        weight_decay: float = 0.0,
        mode: Mode,
        splits: Mapping[str, tuple[int, ...]] | None = None,
        batched: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.names = {parameter: name for name, parameter in named_parameters}
        if not self.names:
            raise TrainError("Muon was given no matrices", fix="Use --optimizer-config.optim adamw")
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, steps
        self.lr_scale, self.weight_decay, self.batched = lr_scale, weight_decay, batched
        self.weights = [_weight(n, p, (splits or {}).get(n), coefficient) for p, n in self.names.items()]
        self.exchange = _exchange(list(self.names), group)
        self.steps = torch.zeros((), dtype=torch.float64, device=next(iter(self.names)).device)
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        for parameter in self.names:
            held = local(parameter.detach())
            buffer = torch.zeros_like(held, dtype=moment_dtype(mode))
            self.state[parameter] = {"momentum_buffer": buffer} | extra_state(held, mode)
        self._agreed = not self.exchange.groups
        self._presence: tuple[tuple[bool, ...], Tensor] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters it moves."""
        return list(self.names)

    @torch.no_grad()
    def step(self, lr: Tensor, grad_scale: Tensor) -> None:
        """One update from the gradients as they stand; the same call on every rank.

        Args:
            lr: scalar on the device.
            grad_scale: scalar on the device, multiplied into each gradient; 0, infinite or NaN skips the step.
        """
        go = torch.isfinite(grad_scale) & (grad_scale > 0)
        self.steps += go
        weights, ready = self._ready(go)
        updates = self._shared(weights, ready, grad_scale) if self.batched else self._alone(weights, ready, grad_scale)
        rate = lr * self.lr_scale
        for weight, moves, update in zip(weights, ready, updates, strict=True):
            held, state = local(weight.parameter.detach()), self.state[weight.parameter]
            scale = weight.scale[self.exchange.rows(weight.shape[0])]
            old = read_master(held, state)
            new = old * (1 - rate * self.weight_decay) - rate * scale * update
            write_master(held, state, torch.where(moves, new, old))

    def _ready(self, go: Tensor) -> tuple[list[Weight], list[Tensor]]:
        """The weights to work on, and for each a bool on the device: whether it moves."""
        if not self.exchange.groups:
            weights = [weight for weight in self.weights if weight.parameter.grad is not None]
            return weights, [go] * len(weights)
        if not self._agreed:
            self._agree()
        pattern = tuple(weight.parameter.grad is not None for weight in self.weights)
        if self._presence is None or self._presence[0] != pattern:
            self._presence = pattern, torch.tensor(pattern, dtype=torch.float32, device=go.device)
        present = self._presence[1] * go
        for group in self.exchange.groups:
            dist.all_reduce(present, op=dist.ReduceOp.MIN, group=group)
        return self.weights, list((present > 0).unbind())

    def _agree(self) -> None:
        """Once: ranks with different matrices would wait for each other for ever; say which differ instead."""
        mine = [f"{weight.name} {list(weight.shape)} {list(weight.splits)}" for weight in self.weights]
        for group in self.exchange.groups:
            others: list[list[str]] = [[]] * dist.get_world_size(group)
            dist.all_gather_object(others, mine, group=group)
            for rank, theirs in enumerate(others):
                if theirs != mine:
                    odd = sorted(set(mine) ^ set(theirs)) or ["their order"]
                    raise TrainError(
                        f"Muon has other matrices on rank {rank} than here: {odd[0]}",
                        fix="Freeze and build the model alike on every rank",
                    )
        self._agreed = True

    def _direction(self, weight: Weight, moves: Tensor, grad_scale: Tensor) -> Tensor:
        """Move the momentum; what is to be orthogonalised (BF16, the rows held here)."""
        buffer = self.state[weight.parameter]["momentum_buffer"]
        old = buffer.float()
        gradient = old if weight.parameter.grad is None else local(weight.parameter.grad).float() * grad_scale
        gradient = torch.where(moves, gradient, old)
        new = old.lerp(gradient, 1 - self.momentum)
        buffer.copy_(torch.where(moves, new, old))
        return (gradient.lerp(new, self.momentum) if self.nesterov else new).bfloat16()

    def _alone(self, weights: list[Weight], ready: list[Tensor], grad_scale: Tensor) -> Iterator[Tensor]:
        """Updates one after another, each computed whole on every rank."""
        for weight, moves in zip(weights, ready, strict=True):
            whole = self.exchange.whole(self._direction(weight, moves, grad_scale), weight.shape)
            parts = [
                _zeropower_via_newtonschulz(matrix.clone(), COEFFICIENTS, self.ns_steps, EPS)
                for matrix in whole.split(weight.splits)
            ]
            yield torch.cat(parts)[self.exchange.rows(weight.shape[0])]

    def _shared(self, weights: list[Weight], ready: list[Tensor], grad_scale: Tensor) -> list[Tensor]:
        """All updates: directions to their owners, same shapes together, results back."""
        if not weights:
            return []
        shapes = [weight.shape for weight in weights]
        owners = deal([weight.cost(self.ns_steps) for weight in weights], self.exchange.size)
        parts = []
        for weight, moves, owner in zip(weights, ready, owners, strict=True):
            direction = self._direction(weight, moves, grad_scale)
            if self.exchange.sends(owner):
                parts.append(direction)
        mine = self.exchange.to_owners(parts, shapes, owners)
        splits = [weight.splits for weight, owner in zip(weights, owners, strict=True) if owner == self.exchange.rank]
        matrices = [m for whole, rows in zip(mine, splits, strict=True) for m in whole.split(rows)]
        orthogonalise_in_batches(matrices, self.ns_steps)
        return self.exchange.from_owners(mine, shapes, owners, ready[0].device)


def _weight(name: str, parameter: nn.Parameter, splits: tuple[int, ...] | None, coefficient: float) -> Weight:
    if parameter.ndim != 2:
        raise TrainError(f"Muon moves matrices, {name} has shape {list(parameter.shape)}")
    rows, columns = parameter.shape
    splits = splits or (rows,)
    if sum(splits) != rows or min(splits) < 1:
        raise TrainError(f"{name} has {rows} rows, its matrices {list(splits)}")
    scales = [coefficient * max(part, columns) ** 0.5 for part in splits]
    scale = torch.cat([torch.full((part, 1), s) for part, s in zip(splits, scales, strict=True)])
    return Weight(
        name=name,
        parameter=parameter,
        shape=(rows, columns),
        splits=tuple(splits),
        scale=scale.to(parameter.device),
    )


def _exchange(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> Replicas | Shards:
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not sharded:
        started = dist.is_available() and dist.is_initialized()
        return Replicas(group or (dist.group.WORLD if started else None))
    first = sharded[0]
    same = all(p.device_mesh == first.device_mesh and p.placements == first.placements for p in sharded)
    if len(sharded) < len(parameters) or not same:
        raise TrainError(
            "some of Muon's matrices are sharded and some not, or not alike",
            fix="Shard all layers of the action expert over one mesh",
        )
    return Shards(first)
