"""Muon: the momentum of a weight matrix, made orthogonal, is its update.

The computation is the one of ``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"`` (a test holds the two
together), and matrix by matrix it is torch's own function that orthogonalises. What torch's optimizer lacks is here:
stacks of matrices and work shared over ranks (``orthogonal``, ``exchange``), packed weights, FP32 masters of BF16
weights, and a rate and a clip coefficient that stay on the device, so that a step waits for nothing.

State, keyed and stored like that of ``adamw``: ``state[parameter]["momentum_buffer"]``, a running mean of the gradient
shaped like the parameter, in ``precision.moment_dtype``, and the precision mode's ``remainder`` or ``master``.

A matrix moves when every rank that holds it has a gradient for it; else it keeps its value and momentum on all of them,
so that replicas stay equal. A zero gradient is a gradient: its momentum decays. A step whose ``grad_scale`` is 0 or not
finite changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz

from dm05_train.errors import TrainError
from dm05_train.optim.base import NamedOptimizer
from dm05_train.optim.clip import local
from dm05_train.optim.exchange import Place, Replicas, Shards
from dm05_train.optim.orthogonal import COEFFICIENTS, EPS, cost, deal, in_batches, neighbours, orthogonalise
from dm05_train.optim.precision import Mode, read_master, write_master

Named = tuple[str, nn.Parameter]
EXPERT_MATRIX = re.compile(r"(^|\.)action_expert\.layers\.\d+\.(self_attn|mlp)\.")


def muon_parameters(named_parameters: Iterable[Named]) -> tuple[list[Named], list[Named]]:
    """Part parameters into those Muon moves (the matrices of the action expert's attention and MLP) and the rest."""
    muon: list[Named] = []
    rest: list[Named] = []
    for name, parameter in named_parameters:
        (muon if parameter.ndim == 2 and EXPERT_MATRIX.search(name) else rest).append((name, parameter))
    return muon, rest


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """A matrix: a whole parameter, or some rows of a packed one. ``scale`` multiplies its orthogonal update."""

    parameter: nn.Parameter
    place: Place
    held: slice
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Rows held here, and columns."""
        return self.held.stop - self.held.start, self.place.columns

    def view(self, tensor: Tensor) -> Tensor:
        """The rows of it that this rank holds, of a tensor shaped like the parameter."""
        return local(tensor.detach())[self.held]

    def gradient(self) -> Tensor | None:
        """Those rows of the gradient, if there is one."""
        return None if self.parameter.grad is None else self.view(self.parameter.grad)


class Muon(NamedOptimizer):
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
        names = {parameter: name for name, parameter in named_parameters}
        if not names:
            raise TrainError("Muon was given no matrices", fix="Use --optimizer-config.optim adamw")
        super().__init__(names, ("momentum_buffer",), mode)
        self.momentum, self.nesterov, self.ns_steps = momentum, nesterov, steps
        self.lr_scale, self.weight_decay, self.batched = lr_scale, weight_decay, batched
        self.exchange = _exchange(list(self.names), group)
        self.matrices = [
            Matrix(
                parameter=parameter,
                place=place,
                held=self.exchange.held(place),
                scale=coefficient * max(place.rows, place.columns) ** 0.5,
            )
            for parameter, name in self.names.items()
            for place in _places(name, parameter, (splits or {}).get(name))
        ]
        self._agreed = not self.exchange.groups
        self._presence: tuple[tuple[bool, ...], Tensor] | None = None

    @torch.no_grad()
    def step(self, lr: Tensor, grad_scale: Tensor) -> None:
        """One update from the gradients as they stand; the same call on every rank.

        Args:
            lr: scalar on the device.
            grad_scale: scalar on the device, multiplied into each gradient; 0, infinite or NaN skips the step.
        """
        go = self.accept(grad_scale)
        matrices, ready = self._ready(go)
        if not matrices:
            return
        rate = lr * self.lr_scale
        if self.batched:
            self.move(matrices, ready, self._shared(matrices, ready, grad_scale), rate)
            return
        for matrix, its in zip(matrices, ready.split(1), strict=True):
            self.move([matrix], its, [self._alone(matrix, its, grad_scale)], rate)

    def direct(
        self, matrices: Sequence[Matrix], ready: Tensor, grad_scale: Tensor, targets: Sequence[Tensor | None]
    ) -> None:
        """Move the momentum of each matrix that is ready, then write what is to be orthogonalised.

        Args:
            matrices: some of ``self.matrices``.
            ready: bool [matrices], whether each moves.
            grad_scale: multiplied into each gradient.
            targets: for each matrix, BF16 [held, C] to write to, or None where nobody needs it here.
        """
        for i, (matrix, target) in enumerate(zip(matrices, targets, strict=True)):
            buffer = matrix.view(self.state[matrix.parameter]["momentum_buffer"])
            old, gradient = buffer.float(), matrix.gradient()
            seen = old if gradient is None else torch.where(ready[i], gradient.float() * grad_scale, old)
            new = old.lerp(seen, 1 - self.momentum)
            buffer.copy_(torch.where(ready[i], new, old))
            if target is not None:
                target.copy_(seen.lerp(new, self.momentum) if self.nesterov else new)

    def move(self, matrices: Sequence[Matrix], ready: Tensor, updates: Sequence[Tensor], rate: Tensor) -> None:
        """Add the orthogonal updates (BF16 [held, C]) of the matrices that are ready, and decay those."""
        for i, (matrix, update) in enumerate(zip(matrices, updates, strict=True)):
            weight = matrix.view(matrix.parameter)
            state = {key: matrix.view(value) for key, value in self.state[matrix.parameter].items()}
            old = read_master(weight, state)
            new = old * (1 - rate * self.weight_decay) - rate * matrix.scale * update.float()
            write_master(weight, state, torch.where(ready[i], new, old))

    def orthogonal(self, stack: Tensor) -> Tensor:
        """The matrices of a stack (BF16 [N, R, C], spent) made orthogonal."""
        return orthogonalise(stack, self.ns_steps)

    def cost(self, rows: int, columns: int) -> int:
        """Floating-point operations that a matrix of this shape takes to be made orthogonal."""
        return cost(rows, columns, self.ns_steps)

    def _ready(self, go: Tensor) -> tuple[list[Matrix], Tensor]:
        """The matrices to work on, and a bool [matrices] on the device: whether each moves."""
        if not self.exchange.groups:
            matrices = [matrix for matrix in self.matrices if matrix.parameter.grad is not None]
            return matrices, go.expand(len(matrices))
        if not self._agreed:
            self._agree()
        pattern = tuple(matrix.parameter.grad is not None for matrix in self.matrices)
        if self._presence is None or self._presence[0] != pattern:
            self._presence = pattern, torch.tensor(pattern, dtype=torch.float32, device=go.device)
        present = self._presence[1] * go
        for group in self.exchange.groups:
            dist.all_reduce(present, op=dist.ReduceOp.MIN, group=group)
        return self.matrices, present > 0

    def _agree(self) -> None:
        """Once: ranks with different matrices would wait for each other for ever; say which differ instead."""
        mine = [f"{self.names[m.parameter]} [{m.place.rows}, {m.place.columns}]" for m in self.matrices]
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

    def _alone(self, matrix: Matrix, ready: Tensor, grad_scale: Tensor) -> Tensor:
        """The update of a matrix, computed whole on every rank; the part held here."""
        [direction] = neighbours([matrix.shape], ready.device)
        self.direct([matrix], ready, grad_scale, [direction])
        whole = self.exchange.whole(direction, matrix.place)
        update = _zeropower_via_newtonschulz(whole, COEFFICIENTS, self.ns_steps, EPS)
        return self.exchange.part(update, matrix.place)

    def _shared(self, matrices: Sequence[Matrix], ready: Tensor, grad_scale: Tensor) -> list[Tensor]:
        """All updates: directions to their owners, same shapes together, the parts held here back."""
        places = [matrix.place for matrix in matrices]
        owners = deal([self.cost(place.rows, place.columns) for place in places], self.exchange.size)
        sent = [self.exchange.sends(owner) for owner in owners]
        parts = neighbours([m.shape for m, wanted in zip(matrices, sent, strict=True) if wanted], ready.device)
        left = iter(parts)
        self.direct(matrices, ready, grad_scale, [next(left) if wanted else None for wanted in sent])
        mine = self.exchange.to_owners(parts, places, owners)
        return self.exchange.from_owners(in_batches(self.orthogonal, mine), places, owners, ready.device)


def _places(name: str, parameter: nn.Parameter, splits: tuple[int, ...] | None) -> list[Place]:
    if parameter.ndim != 2:
        raise TrainError(f"Muon moves matrices, {name} has shape {list(parameter.shape)}")
    total, columns = parameter.shape
    splits = splits or (total,)
    if sum(splits) != total or min(splits) < 1:
        raise TrainError(f"{name} has {total} rows, its matrices {list(splits)}")
    starts = [0, *accumulate(splits)]
    return [
        Place(start=start, rows=rows, columns=columns, total=total) for start, rows in zip(starts, splits, strict=False)
    ]


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
