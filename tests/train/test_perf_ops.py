"""Each fused operation pinned to its plain twin, gradients included, in Triton's interpreter (no GPU needed)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dm05_train.model.config import RopeConfig
from dm05_train.model.layers import rope_table
from dm05_train.perf.ops import gelu, heads, layer_norm, prefix, rms, vision_heads


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def compare(fused: Callable[..., object], plain: Callable[..., object], inputs: list[object]) -> None:
    """Same outputs and same gradients from the same inputs, to float32 rounding."""
    results = []
    for function in (fused, plain):
        torch.manual_seed(1)
        out = function(*inputs)
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor)]
        total = sum((o * torch.randn(o.shape)).sum() for o in outs)
        grads = torch.autograd.grad(total, [t for t in inputs if isinstance(t, Tensor) and t.requires_grad])  # type: ignore[arg-type]
        results.append([*outs, *grads])
    for got, want in zip(*results, strict=True):
        assert got.shape == want.shape
        assert float((got - want).abs().max()) <= 2e-5 * float(want.abs().max()) + 1e-7


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("width", [20, 64])
def test_add_rms_norm(width: int) -> None:
    inputs = [randn(2, 5, width), randn(2, 5, width), randn(width), randn(width), 1e-6]
    compare(rms._AddRMSNorm.apply, rms.add_rms_norm_plain, inputs)


@pytest.mark.parametrize("width", [20, 64])
def test_add_layer_norm(width: int) -> None:
    inputs = [randn(2, 5, width), randn(width), randn(2, 5, width), randn(width), randn(width), 1e-6]
    compare(layer_norm._AddLayerNorm.apply, layer_norm.add_layer_norm_plain, inputs)


def test_gated_gelu() -> None:
    compare(gelu._GatedGELU.apply, gelu.gated_gelu_plain, [randn(3, 4, 2 * 1100)])


def test_vision_mlp() -> None:
    compare(gelu._VisionMLP.apply, gelu.vision_mlp_plain, [randn(2, 70, 12), randn(20, 12), randn(20), randn(12, 20)])


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 24)])
def test_split_heads(q_heads: int, kv_heads: int, head_dim: int) -> None:
    positions = torch.arange(7).repeat(2, 1)
    rope = rope_table(positions, head_dim, RopeConfig(theta=10000.0, factor=1.0))
    inputs = [randn(2, 7, (q_heads + 2 * kv_heads) * head_dim), rope, randn(head_dim), randn(head_dim), q_heads, 1e-6]

    def fused(qkv: Tensor, rope: tuple[Tensor, Tensor], *rest: object) -> object:
        return heads._SplitHeads.apply(qkv, *rope, *rest)

    compare(fused, heads.split_heads_plain, inputs)


@pytest.mark.parametrize("window", [3, 100])
def test_prefix_attention(window: int) -> None:
    blocks = torch.tensor([[0, 1, 1, 1, 0, 2, 2, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]])
    real = torch.tensor([[1] * 9 + [0] * 2, [1] * 7 + [0] * 4]).bool()
    inputs = [randn(2, 4, 11, 16), randn(2, 2, 11, 16), randn(2, 2, 11, 16), blocks, real, window, 0.25]
    compare(prefix._PrefixAttention.apply, prefix.prefix_attention_plain, inputs)


def test_vision_qkv() -> None:
    inputs = [randn(2, 40, 12), randn(36, 12), randn(36), 3]
    compare(vision_heads._VisionQKV.apply, vision_heads.vision_qkv_plain, inputs)
