"""Symmetric products of a stack of matrices, plus multiples of another symmetric stack and of the identity.

Only the blocks on and below the diagonal are computed, half the work; each is written twice, mirrored. Newton-Schulz is
made of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dm05_train.optim.orthogonal import COEFFICIENTS, EPS
from dm05_train.perf.ops.common import HAVE_TRITON, use_kernels

SEGMENT = 3
BLOCK, BLOCK_K, WARPS, STAGES = 128, 64, 8, 3  # the best of six, or near it, on an H200 at all of the model's shapes

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _symmetric(
        a, b, other, factors, out, M, K, a_batch, a_row, a_column, alpha, beta, gamma,
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
        if b is None:
            right = a + column[None, :] * a_row + k[:, None] * a_column
            right_step = BLOCK_K * a_column
        else:
            right = b + n * M * M + column[None, :] * M + k[:, None]
            right_step = BLOCK_K
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            if EVEN:
                x, y = tl.load(left), tl.load(right)
            else:
                x = tl.load(left, mask=(row[:, None] < M) & (first + k[None, :] < K), other=0.0)
                y = tl.load(right, mask=(column[None, :] < M) & (first + k[:, None] < K), other=0.0)
            total = tl.dot(x, y, total)
            left += BLOCK_K * a_column
            right += right_step
        total *= alpha
        here = row[:, None] * M + column[None, :]
        inside = None if EVEN else (row[:, None] < M) & (column[None, :] < M)
        if other is not None:
            total += beta * tl.load(other + n * M * M + here, mask=inside).to(tl.float32)
        total += tl.where(row[:, None] == column[None, :], gamma, 0.0)
        if factors is not None:
            total *= tl.load(factors + n)
        block = total.to(out.dtype.element_ty)
        across = tl.trans(block)
        if i == j:
            block = tl.where(row[:, None] >= column[None, :], block, across)
        tl.store(out + here, block, mask=inside)
        if i != j:
            there = column[:, None] * M + row[None, :]
            tl.store(out + there, across, mask=None if EVEN else (column[:, None] < M) & (row[None, :] < M))


def symmetric_product(
    a: Tensor,
    b: Tensor | None = None,
    other: Tensor | None = None,
    factors: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``factors_n (alpha A_n B_n^T + beta other_n + gamma I)``, summed in float32.

    Args:
        a: [N, M, K], with any strides.
        b: [N, M, M], symmetric and contiguous, where A (then [N, M, M] too) and B commute; default: A.
        other: [N, M, M], symmetric and contiguous.
        factors: float32 [N] on the device; default: all 1.
        dtype: of the result; default: that of ``a``.

    Returns:
        [N, M, M].
    """
    function = symmetric_product_kernel if use_kernels(a) else symmetric_product_plain
    return function(a, b, other, factors, alpha, beta, gamma, dtype or a.dtype)


def symmetric_product_kernel(
    a: Tensor,
    b: Tensor | None,
    other: Tensor | None,
    factors: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    dtype: torch.dtype,
) -> Tensor:
    """The kernel."""
    count, rows, columns = a.shape
    blocks = -(-rows // BLOCK)
    out = a.new_empty((count, rows, rows), dtype=dtype)
    _symmetric[(blocks * (blocks + 1) // 2, count)](
        a, b, other, factors, out, rows, columns, *a.stride(), alpha, beta, gamma,
        EVEN=rows % BLOCK == 0 and columns % BLOCK_K == 0,
        BLOCK=BLOCK, BLOCK_K=BLOCK_K, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return out


def symmetric_product_plain(
    a: Tensor,
    b: Tensor | None,
    other: Tensor | None,
    factors: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    dtype: torch.dtype,
) -> Tensor:
    """Its plain twin."""
    product = torch.tril(a.float() @ (a if b is None else b).float().mT)
    total = alpha * (product + torch.tril(product, -1).mT) + gamma * torch.eye(a.shape[1], device=a.device)
    if other is not None:
        total += beta * other.float()
    if factors is not None:
        total *= factors[:, None, None]
    return total.to(dtype)


def newton_schulz(stack: Tensor, steps: int) -> Tensor:
    """``optim.orthogonal.orthogonalise`` with a third to a half of its operations; the stack is not changed.

    A step is ``X <- P X`` with ``P = a I + b G + c G^2``, ``G = X X^T``, and turns G into ``P G P``: several steps are
    taken on G, which is small, and only their product meets X. G is held in FP16, which its values fit: its rounding
    grows twelve-fold a step in the direction of small singular values, so after SEGMENT steps G is computed anew from
    X. Against float64 the result is about as near as that of the reference, or nearer.
    """
    tall = stack.shape[1] > stack.shape[2]
    factors: Tensor | None = (
        torch.linalg.vector_norm(stack, dim=(1, 2), dtype=torch.float32).clamp_(min=EPS).reciprocal()
    )
    for first in range(0, steps, SEGMENT):
        square = None if factors is None else factors.square()
        gram = symmetric_product(stack.mT if tall else stack, factors=square, dtype=torch.float16)
        whole = _steps_on_gram(gram, min(SEGMENT, steps - first), factors, stack.dtype)
        stack = stack @ whole if tall else whole @ stack
        factors = None
    return stack


def _steps_on_gram(gram: Tensor, steps: int, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What ``steps`` steps multiply a matrix by, whose Gram matrix this is (times ``factors``, in ``dtype``)."""
    a, b, c = COEFFICIENTS
    whole: Tensor | None = None
    for left in reversed(range(steps)):
        ends: dict[str, Any] = {} if left else {"factors": factors, "dtype": dtype}
        first = ends if whole is None else {}
        polynomial = symmetric_product(gram, other=gram, alpha=c, beta=b, gamma=a, **first)
        whole = polynomial if whole is None else symmetric_product(polynomial, whole, **ends)
        if left:
            gram = symmetric_product(symmetric_product(polynomial, gram), polynomial)
    assert whole is not None
    return whole


def newton_schulz_cost(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations of ``newton_schulz`` on a matrix."""
    short, long = sorted((rows, columns))
    segments = -(-steps // SEGMENT)
    return segments * 3 * short * short * long + (4 * steps - 3 * segments) * short**3
