"""What a backward pass needs kept, counted on tensors without memory.

The forward pass of the real model runs on torch's meta device while every tensor that autograd saves is added up, each
storage once. Kernels of our own are not launched there; what they would write is allocated (without memory) and saved
all the same.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.perf import ops
from dm05_train.perf.ops.common import HAVE_TRITON


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Batch of B samples, V cameras, prefix of L tokens, chunk of T actions."""

    batch: int
    cameras: int
    prefix: int
    chunk: int


def activation_bytes(model: DM05, shape: BatchShape, *, checkpointing: int = 0) -> float:
    """Bytes kept for the backward pass of one batch. ``model`` is on the meta device, plain or restructured.

    With ``checkpointing`` n every n-th layer keeps its inputs alone, and one of them at a time keeps the rest.
    """
    everything = _count(model, shape, vision=0, language=0)
    if not checkpointing:
        return everything
    without_vision = _count(model, shape, vision=1, language=0)
    outside = _count(model, shape, vision=1, language=1)
    kept = _count(model, shape, vision=checkpointing, language=checkpointing)
    config, item = model.config, next(model.parameters()).element_size()
    vision, language = config.vision, config.text
    tokens = shape.batch * shape.cameras * vision.patches_per_side**2
    inputs = tokens * vision.hidden_size * -(-vision.num_layers // checkpointing)
    inputs += shape.batch * shape.prefix * language.hidden_size * -(-language.num_layers // checkpointing)
    inputs *= 2 if model.packed else 1  # a restructured layer takes the residual stream and its norm
    largest = max(
        (everything - without_vision) / vision.num_layers, (without_vision - outside) / max(1, language.num_layers - 1)
    )
    return kept + inputs * item + largest


def _count(model: DM05, shape: BatchShape, *, vision: int, language: int) -> float:
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters and storage._cdata not in seen:
            seen[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    before = model.vision.checkpointing, model.language.checkpointing, model.merge_images
    model.vision.checkpointing, model.language.checkpointing = vision, language
    model.merge_images = merge_images  # type: ignore[method-assign]
    try:
        with _silent_kernels(), _CountAttention(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model.loss(*example(model.config, shape))
    finally:
        model.vision.checkpointing, model.language.checkpointing = before[:2]
        model.merge_images = before[2]  # type: ignore[method-assign]
    return float(sum(seen.values()))


def example(config: DM05Config, shape: BatchShape) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A batch, noise and times of this shape, without memory."""
    tokens = torch.empty(shape.batch, shape.prefix, dtype=torch.int64, device="meta")
    side, channels = config.vision.image_size, config.vision.num_channels
    action = torch.empty(shape.batch, shape.chunk, config.action_dim, device="meta")
    batch = {
        "input_ids": tokens,
        "token_type_ids": tokens,
        "attention_mask": tokens,
        "pixel_values": torch.empty(shape.batch * shape.cameras, channels, side, side, device="meta"),
        "action": action,
        "action_mask": action,
    }
    return batch, torch.empty_like(action), torch.empty(shape.batch, device="meta")


def merge_images(tokens: Tensor, is_image: Tensor, images: Tensor) -> Tensor:
    """``DM05.merge_images`` without its check, for which the meta device has no numbers."""
    return tokens.masked_scatter(is_image[..., None], images)


class _CountAttention(TorchFunctionMode):
    """Stands in for fused attention, which on the meta device would be the plain formula with its large matrices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3])
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        raise NotImplementedError("only counted")


class _Silent:
    """A kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: None


@contextlib.contextmanager
def _silent_kernels() -> Iterator[None]:
    """Send meta tensors through the fused operations as a GPU's would go; nothing is launched.

    Without triton their plain twins are counted, which keep more.
    """
    if not HAVE_TRITON:
        yield
        return
    changed: list[tuple[Any, str, Any]] = []
    for info in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"{ops.__name__}.{info.name}")
        for name, value in list(vars(module).items()):
            kernel = type(value).__module__.startswith("triton.runtime") and hasattr(value, "__getitem__")
            if kernel or name == "use_kernels":
                changed.append((module, name, value))
                setattr(module, name, _Silent() if kernel else lambda tensor: True)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)
