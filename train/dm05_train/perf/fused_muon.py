"""Muon's passes over weights, gradients and momentum as one kernel each, its symmetric products at half the work.

One kernel reads gradient and momentum once and writes momentum and direction (8 bytes a parameter where all are BF16),
the other reads the orthogonal update and moves the weight (6 bytes, or 10 with a remainder). Numbers and state are
those of ``optim.muon.Muon``, which stays the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dm05_train.optim.muon import Matrix, Muon
from dm05_train.perf.fused_adamw import BLOCK, CHUNK, WARPS, TensorTable, _base, read_weight, write_weight
from dm05_train.perf.ops.symmetric import newton_schulz, newton_schulz_cost


@triton.jit
def _turn(
    gradients, moments, directions, at, inside, moves, wanted, scale, momentum, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Momentum and direction of the elements ``at``; ``inside`` is None where all of them exist."""
    new = tl.load(moments + at, mask=inside).to(tl.float32)
    direction = new
    if moves:
        gradient = tl.load(gradients + at, mask=inside).to(tl.float32) * scale
        new = new + (gradient - new) * (1.0 - momentum)
        direction = gradient + (new - gradient) * momentum if NESTEROV else new
        tl.store(moments + at, new.to(moments.dtype.element_ty), mask=inside)
    if wanted:
        tl.store(directions + at, direction.to(tl.bfloat16), mask=inside)


@triton.jit
def _direct_kernel(
    addresses, sizes, owner, index, count, gradient_like, moment_like, direction_like,
    ready, wanted, grad_scale, momentum,
    NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    matrix = tl.load(owner + chunk)
    begin, size = tl.load(index + chunk) * CHUNK, tl.load(sizes + matrix)
    moves, needed = tl.load(ready + matrix) != 0, tl.load(wanted + matrix) != 0
    scale = tl.load(grad_scale)
    moments = _base(addresses, 0, matrix, count, moment_like, ALIGNED)
    gradients = _base(addresses, 1, matrix, count, gradient_like, ALIGNED)
    directions = _base(addresses, 2, matrix, count, direction_like, ALIGNED)
    if begin + CHUNK <= size:
        for i in range(0, CHUNK, BLOCK):
            at = begin + i + tl.arange(0, BLOCK)
            _turn(gradients, moments, directions, at, None, moves, needed, scale, momentum, NESTEROV)
    else:
        for i in range(0, CHUNK, BLOCK):
            at = begin + i + tl.arange(0, BLOCK)
            _turn(gradients, moments, directions, at, at < size, moves, needed, scale, momentum, NESTEROV)


@triton.jit
def _shift(weights, updates, remainders, at, inside, keep, step, COMPENSATED: tl.constexpr):
    """New weights of the elements ``at``; ``inside`` is None where all of them exist."""
    old = read_weight(weights, remainders, at, inside, COMPENSATED)
    new = old * keep - step * tl.load(updates + at, mask=inside).to(tl.float32)
    write_weight(weights, remainders, new, at, inside, COMPENSATED)


@triton.jit
def _move_kernel(
    addresses, sizes, owner, index, count, weight_like, update_like, remainder_like,
    ready, scales, rate, weight_decay,
    COMPENSATED: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    matrix = tl.load(owner + chunk)
    if tl.load(ready + matrix) == 0:
        return
    begin, size = tl.load(index + chunk) * CHUNK, tl.load(sizes + matrix)
    lr = tl.load(rate)
    keep, step = 1.0 - lr * weight_decay, lr * tl.load(scales + matrix)
    weights = _base(addresses, 0, matrix, count, weight_like, ALIGNED)
    updates = _base(addresses, 1, matrix, count, update_like, ALIGNED)
    remainders = _base(addresses, 2 if COMPENSATED else 0, matrix, count, remainder_like, ALIGNED)
    if begin + CHUNK <= size:
        for i in range(0, CHUNK, BLOCK):
            _shift(weights, updates, remainders, begin + i + tl.arange(0, BLOCK), None, keep, step, COMPENSATED)
    else:
        for i in range(0, CHUNK, BLOCK):
            at = begin + i + tl.arange(0, BLOCK)
            _shift(weights, updates, remainders, at, at < size, keep, step, COMPENSATED)


class FusedMuon(Muon):
    """``Muon`` whose passes over memory are one kernel each. For modes without a separate master copy."""

    _tables: dict[tuple[str, int, Matrix], TensorTable]
    _vectors: dict[tuple[float, ...], Tensor]

    def direct(
        self, matrices: Sequence[Matrix], ready: Tensor, grad_scale: Tensor, targets: Sequence[Tensor | None]
    ) -> None:
        """See ``Muon.direct``."""
        moments = [matrix.view(self.state[matrix.parameter]["momentum_buffer"]) for matrix in matrices]
        # Where there is no gradient or no target, any address will do: it is not used.
        gradients = [m if (g := matrix.gradient()) is None else g for matrix, m in zip(matrices, moments, strict=True)]
        directions = [m if t is None else t for t, m in zip(targets, moments, strict=True)]
        table = self._table("direct", matrices, [moments, gradients, directions])
        if table is None:
            super().direct(matrices, ready, grad_scale, targets)
            return
        _direct_kernel[(len(table),)](
            table.addresses, table.sizes, table.owner, table.index, len(matrices),
            _like(gradients, matrices[0].parameter.dtype), moments[0], _like(directions, torch.bfloat16),
            ready.to(torch.int32), self._vector([float(t is not None) for t in targets]), grad_scale, self.momentum,
            NESTEROV=self.nesterov, ALIGNED=table.aligned, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def move(self, matrices: Sequence[Matrix], ready: Tensor, updates: Sequence[Tensor], rate: Tensor) -> None:
        """See ``Muon.move``."""
        compensated = self.mode == "bf16_compensated"
        weights = [matrix.view(matrix.parameter) for matrix in matrices]
        lists = [weights, list(updates)]
        if compensated:
            lists.append([matrix.view(self.state[matrix.parameter]["remainder"]) for matrix in matrices])
        table = self._table("move", matrices, lists)
        if table is None or self.mode == "fp32_master":
            super().move(matrices, ready, updates, rate)
            return
        _move_kernel[(len(table),)](
            table.addresses, table.sizes, table.owner, table.index, len(matrices), weights[0], updates[0], lists[-1][0],
            ready.to(torch.int32), self._vector([matrix.scale for matrix in matrices]), rate, self.weight_decay,
            COMPENSATED=compensated, ALIGNED=table.aligned, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip

    def orthogonal(self, stack: Tensor) -> Tensor:
        """See ``Muon.orthogonal``."""
        return newton_schulz(stack, self.ns_steps)

    def cost(self, rows: int, columns: int) -> int:
        """See ``Muon.cost``."""
        return newton_schulz_cost(rows, columns, self.ns_steps)

    def _table(self, name: str, matrices: Sequence[Matrix], lists: Sequence[Sequence[Tensor]]) -> TensorTable | None:
        """The addresses of some tensors on the device; None when the kernels cannot walk them."""
        if not all(tensor.is_contiguous() for tensors in lists for tensor in tensors):
            return None
        if not hasattr(self, "_tables"):
            self._tables, self._vectors = {}, {}
        table = self._tables.setdefault((name, len(matrices), matrices[0]), TensorTable(self.steps.device))
        table.refresh(lists)
        return table if len(table) else None

    def _vector(self, values: list[float]) -> Tensor:
        """A constant float32 vector on the device, sent there once."""
        key = tuple(values)
        if key not in self._vectors:
            self._vectors[key] = torch.tensor(values, dtype=torch.float32, device=self.steps.device)
        return self._vectors[key]


def _like(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A tensor of the type that the used ones among ``tensors`` have."""
    return next((tensor for tensor in tensors if tensor.dtype == dtype), tensors[0])
