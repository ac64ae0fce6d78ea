"""R1: AdamW in one pass over weights, gradients and moments, with the gradient clip folded in.

Two kernels walk all tensors through a table of addresses: one sums the squares of the gradients (2 bytes a parameter),
one reads weight, gradient and moments once and writes weight and moments once (14 bytes a parameter in ``bf16``, 18 in
``bf16_compensated``). Numbers and state are those of ``optim.adamw.AdamW``, which stays the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from dm05_train.optim.adamw import AdamW
from dm05_train.optim.clip import clip_to, local

CHUNK = 8192
BLOCK = 1024
WARPS = 4
WALKER_WARPS = 32  # of a program that takes chunk after chunk, each at once: enough loads in flight from few programs
KEYS = ("exp_avg", "exp_avg_sq")


class TensorTable:
    """Addresses of several equally long lists of tensors, and the chunks that cover them, on the device.

    Row ``r`` of ``addresses`` holds where list ``r``'s tensors begin; chunk ``c`` is ``CHUNK`` elements of tensor
    ``owner[c]``, its ``index[c]``-th. Sent anew when a tensor moved, and without a wait: Muon's scratch space moves
    between steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.key: tuple[int, ...] = ()
        self.counts: list[int] = []

    def refresh(self, lists: Sequence[Sequence[Tensor]]) -> None:
        """Point at these tensors (all contiguous, ``lists[i][j]`` as long as ``lists[0][j]``)."""
        key = tuple(t.data_ptr() for tensors in lists for t in tensors)
        if key == self.key:
            return
        counts = [t.numel() for t in lists[0]]
        if counts != self.counts:
            self._lay_out(counts)
        self.aligned = all(address % 16 == 0 for address in key)
        self.addresses = self._send(torch.tensor(key, dtype=torch.int64).view(len(lists), -1))
        self.key = key

    def _lay_out(self, counts: list[int]) -> None:
        """Cut tensors of so many elements into chunks."""
        sizes = torch.tensor(counts, dtype=torch.int64)
        chunks = (sizes + CHUNK - 1) // CHUNK
        owner = torch.repeat_interleave(torch.arange(len(sizes)), chunks)
        first = torch.cumsum(chunks, 0) - chunks
        index = torch.arange(len(owner)) - first[owner]
        self.sizes, self.owner, self.index = (self._send(t) for t in (sizes, owner, index))
        self.partial = torch.empty(len(owner), dtype=torch.float32, device=self.device)
        self.counts = counts

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def __len__(self) -> int:
        return len(self.owner)


@triton.jit
def _base(addresses, row, tensor, count, like, ALIGNED: tl.constexpr):
    """The start of a tensor, as a pointer of ``like``'s type."""
    pointer = tl.load(addresses + row * count + tensor).to(like.dtype)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _square_sum_kernel(
    addresses, sizes, owner, index, partial, like, count, row,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(owner + chunk)
    begin, size = tl.load(index + chunk) * CHUNK, tl.load(sizes + tensor)
    gradient = _base(addresses, row, tensor, count, like, ALIGNED)
    total = tl.zeros((BLOCK,), tl.float32)
    if begin + CHUNK <= size:
        for i in range(0, CHUNK, BLOCK):
            g = tl.load(gradient + begin + i + tl.arange(0, BLOCK)).to(tl.float32)
            total += g * g
    else:
        for i in range(0, CHUNK, BLOCK):
            at = begin + i + tl.arange(0, BLOCK)
            g = tl.load(gradient + at, mask=at < size, other=0.0).to(tl.float32)
            total += g * g
    tl.store(partial + chunk, tl.sum(total, 0))


@triton.jit
def read_weight(weights, remainders, at, inside, COMPENSATED: tl.constexpr):
    """The float32 values at ``at``, as ``precision.read_master`` gives them."""
    w = tl.load(weights + at, mask=inside)
    if COMPENSATED:
        low = tl.load(remainders + at, mask=inside).to(tl.int32)
        old = ((w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    else:
        old = w.to(tl.float32)
    return old


@triton.jit
def write_weight(weights, remainders, new, at, inside, COMPENSATED: tl.constexpr):
    """Store float32 values, as ``precision.write_master`` does."""
    if COMPENSATED:
        bits = new.to(tl.int32, bitcast=True)
        upper = (bits + 0x8000) >> 16
        tl.store(weights + at, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(remainders + at, (bits - (upper << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(weights + at, new.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _update(
    weights, gradients, means, squares, remainders, at, inside, lr, scale, inverse1, inverse2,
    beta1, beta2, eps, weight_decay, COMPENSATED: tl.constexpr,
):  # fmt: skip
    """AdamW on the elements ``at``; ``inside`` is None where all exist (a mask keeps loads narrow)."""
    g = tl.load(gradients + at, mask=inside).to(tl.float32) * scale
    mean = tl.load(means + at, mask=inside).to(tl.float32)
    square = tl.load(squares + at, mask=inside).to(tl.float32)
    old = read_weight(weights, remainders, at, inside, COMPENSATED)
    mean = mean + (g - mean) * (1.0 - beta1)
    square = square * beta2 + g * g * (1.0 - beta2)
    new = old * (1.0 - lr * weight_decay) - lr * inverse1 * (mean / (tl.sqrt(square) * inverse2 + eps))
    write_weight(weights, remainders, new, at, inside, COMPENSATED)
    tl.store(means + at, mean.to(means.dtype.element_ty), mask=inside)
    tl.store(squares + at, square.to(squares.dtype.element_ty), mask=inside)


@triton.jit
def _update_chunk(
    chunk, addresses, sizes, owner, index, count, weight_like, gradient_like, moment_like, remainder_like,
    lr, scale, inverse1, inverse2, beta1, beta2, eps, weight_decay,
    COMPENSATED: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(owner + chunk)
    begin, size = tl.load(index + chunk) * CHUNK, tl.load(sizes + tensor)
    weights = _base(addresses, 0, tensor, count, weight_like, ALIGNED)
    gradients = _base(addresses, 1, tensor, count, gradient_like, ALIGNED)
    means = _base(addresses, 2, tensor, count, moment_like, ALIGNED)
    squares = _base(addresses, 3, tensor, count, moment_like, ALIGNED)
    remainders = _base(addresses, 4 if COMPENSATED else 0, tensor, count, remainder_like, ALIGNED)
    if begin + CHUNK <= size:
        for i in range(0, CHUNK, BLOCK):
            _update(
                weights, gradients, means, squares, remainders, begin + i + tl.arange(0, BLOCK), None,
                lr, scale, inverse1, inverse2, beta1, beta2, eps, weight_decay, COMPENSATED,
            )  # fmt: skip
    else:
        for i in range(0, CHUNK, BLOCK):
            at = begin + i + tl.arange(0, BLOCK)
            _update(
                weights, gradients, means, squares, remainders, at, at < size,
                lr, scale, inverse1, inverse2, beta1, beta2, eps, weight_decay, COMPENSATED,
            )  # fmt: skip


@triton.jit
def _adamw_kernel(
    addresses, sizes, owner, index, count, chunks,
    weight_like, gradient_like, moment_like, remainder_like,
    scalars,  # lr, grad_scale (0: skip), 1 / correction1, 1 / sqrt(correction2)
    beta1, beta2, eps, weight_decay,
    COMPENSATED: tl.constexpr, ALIGNED: tl.constexpr, WALKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """WALKS: fewer programs than chunks, each takes several."""
    scale = tl.load(scalars + 1)
    if scale == 0.0:
        return
    lr, inverse1, inverse2 = tl.load(scalars), tl.load(scalars + 2), tl.load(scalars + 3)
    if WALKS:
        for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
            _update_chunk(
                chunk, addresses, sizes, owner, index, count, weight_like, gradient_like, moment_like, remainder_like,
                lr, scale, inverse1, inverse2, beta1, beta2, eps, weight_decay, COMPENSATED, ALIGNED, CHUNK, BLOCK,
            )  # fmt: skip
    else:
        _update_chunk(
            tl.program_id(0), addresses, sizes, owner, index, count,
            weight_like, gradient_like, moment_like, remainder_like,
            lr, scale, inverse1, inverse2, beta1, beta2, eps, weight_decay, COMPENSATED, ALIGNED, CHUNK, BLOCK,
        )  # fmt: skip


class FusedAdamW(AdamW):
    """``AdamW`` whose step, and the clip before it, are one kernel each. For modes without a separate master copy."""

    def _tables(self) -> tuple[list[nn.Parameter], TensorTable]:
        live = [p for p in self.names if p.grad is not None]
        lists = [[local(p.detach()) for p in live], [local(p.grad) for p in live]]  # type: ignore[arg-type]
        lists += [[self.state[p][key] for p in live] for key in KEYS]
        if self.mode == "bf16_compensated":
            lists.append([self.state[p]["remainder"] for p in live])
        if not hasattr(self, "table"):
            self.table = TensorTable(self.steps.device)
        self.table.refresh(lists)
        return live, self.table

    @torch.no_grad()
    def clip_scale(self, max_norm: float) -> tuple[Tensor, Tensor]:
        """(norm, scale) as ``optim.clip_scale``: scale 0 when the norm is not finite."""
        live, table = self._tables()
        _square_sum_kernel[(len(table),)](
            table.addresses, table.sizes, table.owner, table.index, table.partial, live[0].grad,
            table.addresses.shape[1], 1, ALIGNED=table.aligned, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return clip_to(table.partial.sum().sqrt(), max_norm)

    @torch.no_grad()
    def step(self, lr: Tensor, grad_scale: Tensor) -> None:
        """See ``AdamW.step``."""
        live, table = self._tables()
        go = self.accept(grad_scale)
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        scalars = torch.stack([lr, torch.where(go, grad_scale, 0.0), 1 / correction1, correction2.rsqrt()]).float()
        state = self.state[live[0]]
        compensated = self.mode == "bf16_compensated"
        walks = self.blocks is not None and self.blocks < len(table)
        _adamw_kernel[(self.blocks if walks else len(table),)](
            table.addresses, table.sizes, table.owner, table.index, table.addresses.shape[1], len(table),
            local(live[0].detach()), live[0].grad, state["exp_avg"], state["remainder" if compensated else "exp_avg"],
            scalars, beta1, beta2, self.eps, self.weight_decay,
            COMPENSATED=compensated, ALIGNED=table.aligned, WALKS=walks, CHUNK=CHUNK,
            BLOCK=CHUNK if walks else BLOCK, num_warps=WALKER_WARPS if walks else WARPS,
        )  # fmt: skip
