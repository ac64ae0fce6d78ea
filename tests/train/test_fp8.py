"""FP8 matmuls of the language MLP: kernels pinned to their twins, and how near the whole comes to BF16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dm05_train.perf.ops import fp8
from dm05_train.perf.ops.gelu import gated_mlp
from torch import Tensor


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture()
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Compares an operation's kernel, in Triton's interpreter, with its twin."""
    pytest.importorskip("triton")

    def compare(operation: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> None:
        results = []
        for kernels in (True, False):
            with monkeypatch.context() as patched:
                patched.setattr(fp8, "use_kernels", lambda x, kernels=kernels: kernels)
                results.append(operation(*inputs))
        for got, want in zip(*results, strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            if got.dtype == fp8.FP8:
                want, got = want.float(), got.float()
                carried = torch.frexp(want).mantissa.abs() == 0.5  # rounded up to a power of two: halved there
                off = (got - want).abs()[~carried]
                assert bool((off <= want.abs()[~carried] / 7 + 2**-9).all())  # a tie may go either way, 1/8 apart,
                assert float((off > 0).float().mean()) < 0.02  # and there are few of them
            else:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

    return compare


@pytest.mark.parametrize("width", [20, 64])
def test_rows(both: Callable[..., None], width: int) -> None:
    both(fp8.quantise_rows, torch.randn(5, width).bfloat16(), None)
    both(fp8.quantise_rows, torch.randn(5, width).bfloat16(), torch.rand(width))


@pytest.mark.parametrize(("rows", "width"), [(70, 20), (64, 300)])
def test_weights(both: Callable[..., None], rows: int, width: int) -> None:
    both(fp8.quantise_weight, torch.randn(rows, width).bfloat16())


def test_gelu(both: Callable[..., None]) -> None:
    gate_up, g_act = torch.randn(3, 2 * 2100), torch.randn(3, 2100)
    both(fp8.gelu_quantised, gate_up)
    both(fp8.gelu_backward_quantised, gate_up, g_act, torch.rand(2 * 2100))


def test_a_row_of_zeros_stays_one() -> None:
    q, scales = fp8.quantise_rows(torch.zeros(2, 16))
    assert bool((q.float() == 0).all()) and bool(torch.isfinite(scales).all())


def test_large_and_small_rows_keep_their_precision() -> None:
    """Rows of very different sizes, as tokens have: each is as exact as the format, 1 part in 16."""
    x = torch.randn(6, 64) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9])[:, None]
    q, scales = fp8.quantise_rows(x)
    error = (q.float() * scales - x).abs().amax(1)
    assert bool((error <= x.abs().amax(1) / 16).all())


def test_the_mlp_is_near_the_bf16_one() -> None:
    h = torch.randn(2, 24, 64).bfloat16()
    weights = (torch.randn(2 * 96, 64).bfloat16() / 8, torch.randn(64, 96).bfloat16() / 10)
    wanted = torch.randn(2, 24, 64).bfloat16()
    results = []
    for mlp in (fp8.gated_mlp_fp8, gated_mlp):
        leaves = [t.clone().requires_grad_() for t in (h, *weights)]
        out = mlp(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, wanted)])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        error = float(((got.float() - want.float()).norm() / want.float().norm()).detach())
        assert 1e-4 < error < 0.08  # E4M3 rounds a factor by 2.6%, up to six meet; no error would mean BF16 was used
