"""Orthogonalisation of matrices: the Newton-Schulz iteration of Muon on a whole stack at once.

A matrix ``U S V^T`` is brought near ``U V^T`` by five steps of an odd polynomial in its singular values, all in BF16.
The polynomial is the one of ``torch.optim.Muon``; it does not converge to 1 but into a band around it, 0.68 to 1.21,
which singular values down to 1/500 of the matrix's Frobenius norm reach in five steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
# Elements of a stack worked on at once: 1 GiB of BF16, and three times that as scratch space.
STACK_ELEMENTS = 1 << 29

Shape = tuple[int, int]


def orthogonalise(stack: Tensor, steps: int) -> Tensor:
    """Orthogonalise every matrix of a stack.

    Args:
        stack: BF16 ``[N, R, C]``; overwritten.
        steps: Newton-Schulz steps.

    Returns:
        BF16 ``[N, R, C]``; a zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    norms = torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True, dtype=torch.float32)
    stack.div_(norms.clamp_(min=EPS))
    tall = stack.shape[1] > stack.shape[2]
    for _ in range(steps):
        gram = stack.mT @ stack if tall else stack @ stack.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        left, right = (stack, polynomial) if tall else (polynomial, stack)
        stack = torch.baddbmm(stack, left, right, beta=a)
    return stack


def in_batches(orthogonal: Callable[[Tensor], Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalise BF16 matrices ``[R, C]``, those of one shape together; results are new, arguments spent.

    Args:
        orthogonal: what does it to a stack [N, R, C].
        matrices: of any shapes, in any order.
    """
    by_shape: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(number)
    results: dict[int, Tensor] = {}
    for shape, numbers in by_shape.items():
        limit = max(1, STACK_ELEMENTS // max(1, shape.numel()))
        for start in range(0, len(numbers), limit):
            part = numbers[start : start + limit]
            results |= zip(part, orthogonal(_stack([matrices[i] for i in part])).unbind(), strict=True)
    return [results[number] for number in range(len(matrices))]


def neighbours(shapes: Sequence[Shape], device: torch.device) -> list[Tensor]:
    """Uninitialised BF16 matrices, those of one shape next to each other in memory: a stack of them needs no copy."""
    flat = torch.empty(sum(rows * columns for rows, columns in shapes), dtype=torch.bfloat16, device=device)
    made: dict[int, Tensor] = {}
    start = 0
    for number in sorted(range(len(shapes)), key=lambda i: shapes[i]):
        rows, columns = shapes[number]
        made[number] = flat[start : start + rows * columns].view(rows, columns)
        start += rows * columns
    return [made[number] for number in range(len(shapes))]


def _stack(matrices: Sequence[Tensor]) -> Tensor:
    """``[N, R, C]`` of contiguous matrices: the memory they lie in when they are neighbours, else a copy."""
    first = matrices[0]
    rows, columns = first.shape
    step = rows * columns
    apart = {m.storage_offset() - first.storage_offset() - i * step for i, m in enumerate(matrices)}
    if apart == {0} and len({m.untyped_storage().data_ptr() for m in matrices}) == 1:
        return first.as_strided((len(matrices), rows, columns), (step, columns, 1))
    return torch.stack(list(matrices))


def cost(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations to orthogonalise a matrix."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def deal(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank that does each piece of work: the dearest first, each to the rank with the least so far."""
    loads = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += costs[index]
    return owners
