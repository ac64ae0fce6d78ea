"""Symmetric products and the Newton-Schulz iteration made of them, against float64; the kernel in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dm05_train.optim.orthogonal import COEFFICIENTS, EPS, orthogonalise
from dm05_train.perf.ops.symmetric import newton_schulz, symmetric_product_kernel, symmetric_product_plain


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(256, 64), (128, 192), (300, 70), (16, 200), (1, 1)])
def test_the_kernel_agrees_with_its_twin(rows: int, columns: int, transposed: bool, dtype: torch.dtype) -> None:
    a = torch.randn(2, columns, rows).mT if transposed else torch.randn(2, rows, columns)
    a = a.to(dtype)
    other = symmetric_product_plain(torch.randn(2, rows, 8).to(dtype), None, None, None, 1.0, 0.0, 0.0, dtype)
    scaled = torch.tensor([0.5, 2.0])
    for arguments in (
        (None, None, None, 1.0, 0.0, 0.0, dtype),
        (None, other, scaled, 2.0, -4.75, 3.5, torch.float32),
    ):
        got = symmetric_product_kernel(a, *arguments)
        want = symmetric_product_plain(a, *arguments)
        assert torch.equal(got, got.mT)
        limit = 1e-5 if dtype == torch.float32 else 2**-10
        assert float((got - want).abs().max()) <= limit * float(want.abs().max())


@pytest.mark.parametrize("size", [1, 70, 256])
def test_the_product_of_two_that_commute(size: int) -> None:
    a = symmetric_product_plain(torch.randn(2, size, size), None, None, None, 1 / size, 0.0, 0.0, torch.float32)
    b = symmetric_product_plain(a, None, a, None, 2.0, -4.75, 3.5, torch.float32)
    got = symmetric_product_kernel(a, b, None, None, 1.0, 0.0, 0.0, torch.float32)
    want = symmetric_product_plain(a, b, None, None, 1.0, 0.0, 0.0, torch.float32)
    assert torch.equal(got, got.mT)
    assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())
    assert float((want - a @ b).abs().max()) <= 1e-4 * float(want.abs().max())


def matrix(kind: str, rows: int, columns: int) -> Tensor:
    """A matrix whose singular values fall off as ``kind`` says."""
    count = min(rows, columns)
    u, _, vt = torch.linalg.svd(torch.randn(rows, columns), full_matrices=False)
    order = torch.arange(1, count + 1).float()
    values = {
        "condition 50": torch.logspace(0, -1.7, count),
        "power law": 1 / order,
        "steep": order**-2,
        "half the rank": (order <= count // 2).float(),
        "rank 8": (order <= 8).float(),
        "rank 1": (order <= 1).float(),
    }
    return torch.randn(rows, columns) if kind == "random" else u * values[kind] @ vt


def exact(x: Tensor, steps: int = 5) -> Tensor:
    """The iteration in float64."""
    a, b, c = COEFFICIENTS
    x = x.double() / x.double().norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        polynomial = b * gram + c * gram @ gram
        x = a * x + (polynomial @ x if x.shape[0] <= x.shape[1] else x @ polynomial)
    return x


@pytest.mark.parametrize("kind", ["random", "condition 50", "power law", "steep", "half the rank", "rank 8", "rank 1"])
@pytest.mark.parametrize("shape", [(96, 96), (64, 160), (160, 64)])
def test_newton_schulz_is_as_near_float64_as_the_reference(shape: tuple[int, int], kind: str) -> None:
    """At every size of gradient the distance is that of the reference's BF16, or less; all singular values that are not
    tiny lie in the band."""
    base = matrix(kind, *shape)
    for size in (1e-6, 1.0, 1e4, 1e15):
        stack = (size * base).bfloat16()[None]
        want = exact(stack[0])
        ours = newton_schulz(stack, 5)[0].double()
        reference = orthogonalise(stack.clone(), 5)[0].double()
        assert (ours - want).norm() < 1.1 * (reference - want).norm()
        held = torch.linalg.svdvals(stack[0].float())
        values = torch.linalg.svdvals(ours)[held > held.norm() / 500]
        assert values.min() > 0.66 and values.max() < 1.23


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 7, 9])
def test_other_numbers_of_steps(steps: int) -> None:
    for shape in ((96, 96), (64, 160), (160, 64)):
        stack = matrix("power law", *shape).bfloat16()[None]
        want = exact(stack[0], steps)
        ours, reference = newton_schulz(stack, steps)[0].double(), orthogonalise(stack.clone(), steps)[0].double()
        assert (ours - want).norm() < 1.3 * (reference - want).norm()


def test_newton_schulz_of_nothing_and_of_next_to_nothing() -> None:
    """Zero stays zero, beside others; below a norm of EPS the update fades as the reference's does."""
    stack = torch.randn(3, 40, 24).bfloat16()
    stack[1] = 0
    stack[2] *= 1e-12
    before = stack.clone()
    ours, reference = newton_schulz(stack, 5), orthogonalise(stack.clone(), 5)
    assert torch.equal(stack, before)
    assert torch.equal(ours[1], torch.zeros_like(ours[1]))
    assert float((ours[2] - reference[2]).norm() / reference[2].norm()) < 0.02
    assert torch.equal(ours[:1], newton_schulz(stack[:1], 5))
