"""``A A^T`` of a stack of matrices, plus a multiple of another symmetric stack and of the identity: half the work.

Only the blocks on and below the diagonal are computed; each is written twice, mirrored. Newton-Schulz on these products
needs no other pass over memory than its matmuls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dm05_train.optim.orthogonal import COEFFICIENTS, EPS
from dm05_train.perf.ops.common import HAVE_TRITON, use_kernels

BLOCK, BLOCK_K, WARPS, STAGES = 128, 64, 8, 3  # the best of six, or near it, on an H200 at all of the model's shapes

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _symmetric(
        a, other, factors, out, M, K, a_batch, a_row, a_column, alpha, beta, gamma,
        EVEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """Program (t, n): block t of the lower triangle (row by row) of matrix n; EVEN: nothing sticks out."""
        t, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
        i = ((tl.sqrt_rn(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
        j = t - i * (i + 1) // 2
        row, column, k = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
        a += n * a_batch
        out += n * M * M
        left = a + row[:, None] * a_row + k[None, :] * a_column
        right = a + column[None, :] * a_row + k[:, None] * a_column
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if EVEN:
                x, y = tl.load(left), tl.load(right)
            else:
                x = tl.load(left, mask=(row[:, None] < M) & (first + k[None, :] < K), other=0.0)
                y = tl.load(right, mask=(column[None, :] < M) & (first + k[:, None] < K), other=0.0)
            total = tl.dot(x, y, total)
            left += BLOCK_K * a_column
            right += BLOCK_K * a_column
        total *= alpha
        here = row[:, None] * M + column[None, :]
        inside = None if EVEN else (row[:, None] < M) & (column[None, :] < M)
        if other is not None:
            total += beta * tl.load(other + n * M * M + here, mask=inside).to(tl.float32)
        total += tl.where(row[:, None] == column[None, :], gamma, 0.0)
        if factors is not None:
            total *= tl.load(factors + n)
        block = total.to(out.dtype.element_ty)
        tl.store(out + here, block, mask=inside)
        if i != j:
            there = column[:, None] * M + row[None, :]
            tl.store(out + there, tl.trans(block), mask=None if EVEN else (column[:, None] < M) & (row[None, :] < M))


def symmetric_product(
    a: Tensor,
    other: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
) -> Tensor:
    """``factors_n (alpha A_n A_n^T + beta other_n + gamma I)``, summed in float32.

    Args:
        a: [N, M, K], with any strides.
        other: [N, M, M], symmetric and contiguous.
        factors: float32 [N] on the device; default: all 1.

    Returns:
        [N, M, M] in the type of ``a``.
    """
    function = symmetric_product_kernel if use_kernels(a) else symmetric_product_plain
    return function(a, other, factors, alpha, beta, gamma)


def symmetric_product_kernel(
    a: Tensor, other: Tensor | None, factors: Tensor | None, alpha: float, beta: float, gamma: float
) -> Tensor:
    """The kernel."""
    count, rows, columns = a.shape
    blocks = -(-rows // BLOCK)
    out = a.new_empty(count, rows, rows)
    _symmetric[(blocks * (blocks + 1) // 2, count)](
        a, other, factors, out, rows, columns, *a.stride(), alpha, beta, gamma,
        EVEN=rows % BLOCK == 0 and columns % BLOCK_K == 0,
        BLOCK=BLOCK, BLOCK_K=BLOCK_K, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out


def symmetric_product_plain(
    a: Tensor, other: Tensor | None, factors: Tensor | None, alpha: float, beta: float, gamma: float
) -> Tensor:
    """Its plain twin."""
    total = alpha * (a.float() @ a.float().mT) + gamma * torch.eye(a.shape[1], device=a.device)
    if other is not None:
        total += beta * other.float()
    if factors is not None:
        total *= factors[:, None, None]
    return total.to(a.dtype)


def newton_schulz(stack: Tensor, steps: int) -> Tensor:
    """``optim.orthogonal.orthogonalise`` by symmetric products; the stack is not changed.

    The norm of a matrix is read off its Gram matrix, and as ``a X + P X`` is ``(a I + P) X`` each step ends in one
    matmul. Against float64 its result is about as far off as that of the reference, or less.
    """
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    factors = None
    for step in range(steps):
        gram = symmetric_product(stack.mT if tall else stack)
        if step == 0:
            square = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32).clamp_(min=EPS**2)
            gram.div_(square[:, None, None])  # before it is squared, which could overflow
            factors = square.rsqrt()
        polynomial = symmetric_product(gram, gram, factors, alpha=c, beta=b, gamma=a)
        stack = stack @ polynomial if tall else polynomial @ stack
        factors = None
    return stack
