"""``dm05-train memory``: what a configuration needs per GPU, computed from the model itself.

Weights, gradients and optimizer state are counted parameter by parameter. Activations are counted by running the
forward pass of the real model on tensors without memory (torch's meta device) and adding up what autograd keeps for the
backward pass.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dm05_train.build import empty_model, precision_mode
from dm05_train.config import TrainConfig
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import freeze_untrained
from dm05_train.optim.precision import Mode, moment_dtype, weight_dtype
from dm05_train.perf.switches import Switches

GIB = float(2**30)
TEXT_TOKENS = 56
CONTEXT_BYTES = 1.0 * GIB
"""CUDA context, library workspaces and the loader's buffers, as seen on an H200."""
FRAGMENTATION = 0.04
"""Share the caching allocator loses between blocks."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per GPU, part by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    rest: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What memory depends on beside the model."""

    batch: int
    cameras: int
    prefix: int
    chunk: int
    mode: Mode
    checkpointing: bool = False
    accumulation: int = 1
    gpus: int = 1
    parallel: str = "ddp"
    trimmed: bool = False
    """The model restructured for speed: no dead tail of the last language layer."""


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


def activation_bytes(model: DM05, shape: Shape) -> float:
    """What the backward pass of one batch needs kept, in bytes. ``model`` is on the meta device.

    With checkpointing a layer keeps its input alone, and one layer at a time keeps the rest.
    """
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, float] = {}
    layer = [-1]
    by_layer: dict[int, float] = {}
    inputs: dict[int, float] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters and storage._cdata not in seen:
            seen[storage._cdata] = storage.nbytes()
            alive.append(tensor)
            by_layer[layer[0]] = by_layer.get(layer[0], 0.0) + storage.nbytes()
        return tensor

    def enter(number: int) -> Callable[..., None]:
        def hook(module: Any, arguments: tuple[Any, ...]) -> None:
            layer[0] = number
            inputs[number] = arguments[0].numel() * arguments[0].element_size()

        return hook

    def leave(*_: Any) -> None:
        layer[0] = -1

    alive: list[Tensor] = []
    handles = []
    for number, module in enumerate([*model.vision.encoder.layers, *model.language.layers]):
        handles += [module.register_forward_pre_hook(enter(number)), module.register_forward_hook(leave)]
    try:
        with _CountAttention(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model.loss(_batch(model.config, shape), *_noise(model.config, shape))
    finally:
        for handle in handles:
            handle.remove()
    outside = by_layer.pop(-1, 0.0)
    if shape.checkpointing:
        return outside + sum(inputs.values()) + max(by_layer.values())
    return outside + sum(by_layer.values())


def _batch(config: DM05Config, shape: Shape) -> dict[str, Tensor]:
    tokens = torch.empty(shape.batch, shape.prefix, dtype=torch.int64, device="meta")
    side, channels = config.vision.image_size, config.vision.num_channels
    action = torch.empty(shape.batch, shape.chunk, config.action_dim, device="meta")
    return {
        "input_ids": tokens,
        "token_type_ids": tokens,
        "attention_mask": tokens,
        "pixel_values": torch.empty(shape.batch * shape.cameras, channels, side, side, device="meta"),
        "action": action,
        "action_mask": action,
    }


def _noise(config: DM05Config, shape: Shape) -> tuple[Tensor, Tensor]:
    noise = torch.empty(shape.batch, shape.chunk, config.action_dim, device="meta")
    return noise, torch.empty(shape.batch, device="meta")


def merge_images(tokens: Tensor, is_image: Tensor, images: Tensor) -> Tensor:
    """``DM05.merge_images`` without its check, for which the meta device has no numbers."""
    return tokens.masked_scatter(is_image[..., None], images)


def estimate(config: DM05Config, shape: Shape) -> Memory:
    """What a run of this shape needs per GPU."""
    model = empty_model(config, torch.device("meta"), weight_dtype(shape.mode))
    model.merge_images = merge_images  # type: ignore[method-assign]
    freeze_untrained(model)
    every = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    width = weight_dtype(shape.mode).itemsize
    state = 2 * moment_dtype(shape.mode).itemsize + {"bf16_compensated": 2, "fp32_master": 4}.get(shape.mode, 0)
    share = shape.gpus if shape.parallel == "fsdp" else 1
    gradients = trained * width / share
    activations = activation_bytes(model, shape)
    if shape.gpus == 1 and shape.accumulation == 1:
        # Gradients come into being while activations go, so only the larger of the two is ever there.
        gradients = max(0.0, gradients - activations)
    weights = every * width / share
    if share > 1:
        weights += 2 * max(sum(p.numel() for p in layer.parameters()) for layer in model.language.layers) * width
    kept = weights + gradients + trained * state / share + activations
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=trained * state / share,
        activations=activations,
        rest=CONTEXT_BYTES + FRAGMENTATION * kept,
    )


def shape_of(config: TrainConfig, model: DM05Config, mode: Mode, *, cameras: int, gpus: int, trimmed: bool) -> Shape:
    """The shape of a run; a trimmed prefix is the images and a task of a sentence."""
    trainer = config.trainer_config
    short = cameras * (model.mm_tokens_per_image + 4) + TEXT_TOKENS
    return Shape(
        batch=trainer.per_device_train_batch_size,
        cameras=cameras,
        prefix=min(-(-short // 8) * 8, trainer.model_max_length) if trimmed else trainer.model_max_length,
        chunk=config.model_config.chunk_size,
        mode=mode,
        checkpointing=trainer.gradient_checkpointing,
        accumulation=trainer.gradient_accumulation_steps,
        gpus=gpus,
        parallel=trainer.parallel,
        trimmed=trimmed,
    )


def remedies(shape: Shape, switches: Switches) -> list[tuple[str, Shape]]:
    """What to try when memory is short, the least costly first: what to set, and the shape it leads to."""
    steps: list[tuple[str, Shape]] = []
    if shape.batch > 1:
        half = replace(shape, batch=shape.batch // 2, accumulation=shape.accumulation * 2)
        text = f"PER_DEVICE_BATCH={half.batch} --trainer-config.gradient-accumulation-steps {half.accumulation}"
        steps.append((f"{text} (same global batch)" if shape.batch % 2 == 0 else text, half))
    if not switches.on("restructure"):
        steps.append(("DM05_PERF_ENABLE=1 (prompts padded no further than needed)", replace(shape, trimmed=True)))
    if not shape.checkpointing:
        steps.append(("--trainer-config.gradient-checkpointing", replace(shape, checkpointing=True)))
    if switches.on("cuda_graph"):
        steps.append(("DM05_PERF_R18_CUDA_GRAPH=0 (a graph keeps its memory between steps)", shape))
    if shape.gpus > 1 and shape.parallel == "ddp":
        steps.append(("--trainer-config.parallel fsdp", replace(shape, parallel="fsdp")))
    return steps


def advice(model: DM05Config, shape: Shape, switches: Switches) -> list[str]:
    """One line a remedy, with what it would need."""
    lines = []
    for text, changed in remedies(shape, switches):
        if changed.trimmed and not shape.trimmed:
            changed = replace(changed, prefix=min(changed.prefix, _short(model, changed)))
        lines.append(f"{text}: {estimate(model, changed).total / GIB:.1f} GiB")
    return lines


def _short(model: DM05Config, shape: Shape) -> int:
    return -(-(shape.cameras * (model.mm_tokens_per_image + 4) + TEXT_TOKENS) // 8) * 8


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(TrainConfig):
    """A training run whose memory is asked for."""

    gpus: int = 1
    """GPUs of the run."""
    gpu_gib: float | None = None
    """Memory of a GPU, to say whether it fits. Default: this machine's first GPU, if there is one."""


def main(arguments: Sequence[str]) -> int:
    """The command; its flags are those of ``dm05-train``."""
    from dm05_train.cli import read_flags

    text = "What a training run needs per GPU, from the same flags as dm05-train.\n\n  dm05-train memory --gpus 8"
    config = read_flags(MemoryConfig, MemoryConfig.defaults(os.environ), arguments, "dm05-train memory", text)
    workspace, switches = Workspace.resolve(config.workspace), Switches.from_env(os.environ)
    spec = lookup(config.data_config.dataset_name, workspace)
    folder = config.model_config.model_name_or_path or workspace.checkpoint_dir
    model = DM05Config.from_json(folder)
    mode = precision_mode(config, folder)
    cameras = len(spec.image_keys)
    shape = shape_of(config, model, mode, cameras=cameras, gpus=config.gpus, trimmed=switches.on("restructure"))
    need = estimate(model, shape)
    print(f"per GPU, batch {shape.batch}, prefix of {shape.prefix} tokens, {shape.cameras} cameras, {mode}")
    for f in fields(Memory):
        print(f"  {f.name:12} {getattr(need, f.name) / GIB:7.2f} GiB")
    print(f"  {'together':12} {need.total / GIB:7.2f} GiB")
    size = config.gpu_gib
    if size is None and torch.cuda.is_available():
        size = torch.cuda.get_device_properties(0).total_memory / GIB
    if size is not None and need.total > size * GIB:
        print(f"does not fit a GPU of {size:.0f} GiB. What would:" if size else "", file=sys.stdout)
    elif size is not None:
        print(f"fits a GPU of {size:.0f} GiB with {size - need.total / GIB:.1f} GiB to spare. With less memory:")
    else:
        print("with less memory:")
    for line in advice(model, shape, switches):
        print(f"  {line}")
    return 0
