"""``dm05-train memory``: what a configuration needs per GPU, computed from the model itself.

Weights, gradients and optimizer state are counted parameter by parameter, activations by running the forward pass
without memory (``activations``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace

from dm05_train.activations import BatchShape, activation_bytes
from dm05_train.build import empty_model, precision_mode
from dm05_train.config import TrainConfig, require_number
from dm05_train.model.config import DM05Config
from dm05_train.model.weights import freeze_untrained
from dm05_train.optim.precision import Mode, moment_dtype, weight_dtype
from dm05_train.perf.restructure import restructure
from dm05_train.perf.switches import Switches

GIB = float(2**30)
TEXT_TOKENS = 56
CONTEXT_BYTES = 1.0 * GIB
"""Allowance for the CUDA context, library workspaces and the loader's buffers."""
FRAGMENTATION = 0.04
"""Allowance for what the caching allocator loses between blocks."""


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
    """The model restructured for speed (R16), with prompts padded no further than needed."""


def estimate(config: DM05Config, shape: Shape) -> Memory:
    """What a run of this shape needs per GPU."""
    model = empty_model(config, torch.device("meta"), weight_dtype(shape.mode))
    freeze_untrained(model)
    if shape.trimmed:
        restructure(model)
    every = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    width = weight_dtype(shape.mode).itemsize
    state = 2 * moment_dtype(shape.mode).itemsize + {"bf16_compensated": 2, "fp32_master": 4}.get(shape.mode, 0)
    share = shape.gpus if shape.parallel == "fsdp" else 1
    gradients = trained * width / share
    batch = BatchShape(batch=shape.batch, cameras=shape.cameras, prefix=shape.prefix, chunk=shape.chunk)
    activations = activation_bytes(model, batch, checkpointing=shape.checkpointing)
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
    """What to set when memory is short, the least costly first, and the shape each leads to."""
    steps: list[tuple[str, Shape]] = []
    if shape.batch > 1:
        half = replace(shape, batch=shape.batch // 2, accumulation=shape.accumulation * 2)
        text = f"PER_DEVICE_BATCH={half.batch} --trainer-config.gradient-accumulation-steps {half.accumulation}"
        steps.append((f"{text} (same global batch)" if shape.batch % 2 == 0 else text, half))
    if not switches.on("restructure"):
        steps.append(
            ("DM05_PERF_ENABLE=1 (fused, and prompts padded no further than needed)", replace(shape, trimmed=True))
        )
    if not shape.checkpointing:
        steps.append(("--trainer-config.gradient-checkpointing", replace(shape, checkpointing=True)))
    if shape.gpus > 1 and shape.parallel == "ddp":
        steps.append(("--trainer-config.parallel fsdp", replace(shape, parallel="fsdp", trimmed=False)))
    return steps


def advice(model: DM05Config, shape: Shape, switches: Switches) -> list[str]:
    """One line for each remedy that helps, with what it would need."""
    now, lines = estimate(model, shape).total, []
    for text, changed in remedies(shape, switches):
        if changed.trimmed and not shape.trimmed:
            changed = replace(changed, prefix=min(changed.prefix, _short(model, changed)))
        need = estimate(model, changed).total
        if need < now:
            lines.append(f"{text}: {need / GIB:.1f} GiB")
    if switches.on("cuda_graph"):
        lines.append("DM05_PERF_R18_CUDA_GRAPH=0: what CUDA graphs keep beside that, which is not counted here")
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

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number(self.gpus, "--gpus", least=1)
        if self.gpu_gib is not None:
            require_number(self.gpu_gib, "--gpu-gib", above=0)


def main(arguments: Sequence[str]) -> int:
    """The command; its flags are those of ``dm05-train``."""
    from dm05_train.cli import read_flags

    text = """What a training run needs per GPU, from the same flags as dm05-train.

Examples:
  dm05-train memory --gpus 8
  dm05-train memory --gpu-gib 48 --trainer-config.gradient-checkpointing"""
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
