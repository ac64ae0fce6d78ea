"""``dm05-train memory``: what a configuration needs per GPU, computed from the model itself.

Weights, gradients and optimizer state are counted parameter by parameter, activations by running the forward pass
without memory (``activations``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from dm05_schemas.commands import aiming
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace

from dm05_train.activations import BatchShape, activation_bytes, example
from dm05_train.build import empty_model, precision_mode
from dm05_train.config import TrainConfig, require_number
from dm05_train.model.config import RELEASED, DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import freeze_untrained
from dm05_train.optim.precision import Mode, moment_dtype, weight_dtype
from dm05_train.perf.ops.fp8 import gated_mlp_fp8
from dm05_train.perf.restructure import restructure
from dm05_train.perf.switches import Switches
from dm05_train.snapshot import SPARE_GPU_BYTES
from dm05_train.start import absolute

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
    graphs: float
    """The batch where CUDA graphs find it."""
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
    checkpointing: int = 0
    """Every how many-th layer is recomputed in backward; 0: none."""
    accumulation: int = 1
    gpus: int = 1
    parallel: str = "ddp"
    trimmed: bool = False
    """The model restructured for speed (R16; not under FSDP), with prompts padded no further than needed."""
    graphs: bool = False
    """Forward and backward as CUDA graphs (R18)."""
    fp8: bool = False
    """FP8 matmuls in the language MLPs: an eight-bit copy of their weights is kept for the backward pass."""

    @property
    def shards(self) -> int:
        """Into how many parts weights, gradients and moments are split."""
        return self.gpus if self.parallel == "fsdp" else 1


def _model(config: DM05Config, shape: Shape) -> DM05:
    """The model as a run of this shape has it, without memory."""
    model = empty_model(config, torch.device("meta"), weight_dtype(shape.mode))
    freeze_untrained(model)
    if shape.trimmed and shape.shards == 1:
        restructure(model)
        if shape.fp8:
            model.language.gated_mlp = gated_mlp_fp8  # type: ignore[assignment]
    return model


def _numbers(model: DM05) -> tuple[int, int]:
    """Parameters, and those of them that are trained."""
    every = sum(p.numel() for p in model.parameters())
    return every, sum(p.numel() for p in model.parameters() if p.requires_grad)


def _state_bytes(mode: Mode) -> int:
    """Bytes of optimizer state for each trained parameter."""
    return 2 * moment_dtype(mode).itemsize + {"bf16_compensated": 2, "fp32_master": 4}.get(mode, 0)


def snapshot_bytes(config: DM05Config, shape: Shape) -> float:
    """What a checkpoint's copy takes beside a run, from the first one on: weights and optimizer state once more.

    The GPUs of machine 0 share it, except that one takes all weights. Shards are gathered on the host.
    """
    if shape.shards > 1:
        return 0.0
    every, trained = _numbers(_model(config, shape))
    weights = every * weight_dtype(shape.mode).itemsize
    return float(max(weights, (weights + trained * _state_bytes(shape.mode)) / shape.gpus))


def estimate(config: DM05Config, shape: Shape) -> Memory:
    """What a run of this shape needs per GPU; see ``snapshot_bytes`` for what checkpoints take beside it."""
    model = _model(config, shape)
    every, trained = _numbers(model)
    width, state, share = weight_dtype(shape.mode).itemsize, _state_bytes(shape.mode), shape.shards
    gradients = trained * width / share
    batch = BatchShape(batch=shape.batch, cameras=shape.cameras, prefix=shape.prefix, chunk=shape.chunk)
    activations = activation_bytes(model, batch, checkpointing=shape.checkpointing)
    if shape.gpus == 1 and shape.accumulation == 1:
        # Gradients come into being while activations go, so only the larger of the two is ever there.
        gradients = max(0.0, gradients - activations)
    elif shape.gpus > share:
        # DDP's buckets come on top (R5 off), or twice while the second step orders them anew (docs/multi_gpu.md).
        gradients *= 2
    weights = every * width / share
    if share > 1:
        weights += 2 * max(sum(p.numel() for p in layer.parameters()) for layer in model.language.layers) * width
    graphs = float(sum(t.nbytes for t in example(config, batch)[0].values())) if shape.graphs else 0.0
    kept = weights + gradients + trained * state / share + activations + graphs
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=trained * state / share,
        activations=activations,
        graphs=graphs,
        rest=CONTEXT_BYTES + FRAGMENTATION * kept,
    )


def shape_of(
    config: TrainConfig,
    model: DM05Config,
    mode: Mode,
    *,
    cameras: int,
    gpus: int,
    trimmed: bool,
    graphs: bool = False,
    fp8: bool = False,
) -> Shape:
    """The shape of a run; a trimmed prefix is the images and a task of a sentence."""
    trainer = config.trainer_config
    short = cameras * (model.mm_tokens_per_image + 4) + TEXT_TOKENS
    return Shape(
        batch=trainer.per_device_train_batch_size,
        cameras=cameras,
        prefix=min(-(-short // 8) * 8, trainer.model_max_length) if trimmed else trainer.model_max_length,
        chunk=config.model_config.chunk_size,
        mode=mode,
        checkpointing=trainer.recomputed_every,
        accumulation=trainer.gradient_accumulation_steps,
        gpus=gpus,
        parallel=trainer.parallel,
        trimmed=trimmed,
        graphs=graphs,
        fp8=fp8,
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
            (
                "DM05_PERF_ENABLE=1 (fused, and prompts padded no further than needed)",
                replace(shape, trimmed=True, graphs=shape.shards == 1),
            )
        )
    flag = "--trainer-config.gradient-checkpointing"
    if not shape.checkpointing:
        steps.append((f"{flag} {flag}-every 2", replace(shape, checkpointing=2)))
    if shape.checkpointing != 1:
        steps.append((flag if not shape.checkpointing else f"{flag}-every 1", replace(shape, checkpointing=1)))
    if shape.gpus > 1 and shape.parallel == "ddp":
        steps.append(("--trainer-config.parallel fsdp", replace(shape, parallel="fsdp", graphs=False)))
    if shape.fp8:
        steps.append(("DM05_PERF_FP8_MLP=0", replace(shape, fp8=False)))
    if shape.graphs:
        steps.append(
            (
                "DM05_PERF_R18_CUDA_GRAPH=0 (the rest of a step may then use the graphs' own memory, too)",
                replace(shape, graphs=False),
            )
        )
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
    return lines


def checkpoints_line(snapshot: float, need: Memory, gpu_gib: float | None) -> str:
    """Where the copy that a checkpoint is written from goes; it needs no room on the GPU, but takes it if there is."""
    if not snapshot:
        return "checkpoints: shards are gathered on the host, nothing more on the GPU"
    copy, free = f"{snapshot / GIB:.2f} GiB", f"{(need.total + snapshot + SPARE_GPU_BYTES) / GIB:.1f} GiB"
    fast = f"copied on the GPU, {copy} more from the first one on"
    slow = f"copied to page-locked memory of the host, {copy} there"
    if gpu_gib is None:
        return f"checkpoints: {fast}, where a GPU has {free} in all; else {slow} and nothing more on the GPU"
    if need.total + snapshot + SPARE_GPU_BYTES < gpu_gib * GIB:
        return f"checkpoints: {fast}"
    return f"checkpoints: {slow}, nothing more on the GPU (a copy there would take {free} in all)"


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


def model_settings(config: TrainConfig, workspace: Workspace) -> Path:
    """Where the model's sizes are read: the checkpoint that is named, else the workspace's, else the released sizes.

    The weights themselves need not be there: the answer decides which machine to fetch them to.
    """
    named = config.model_config.model_name_or_path
    if named is not None:
        return absolute(named)
    if (workspace.checkpoint_dir / "config.json").exists():
        return workspace.checkpoint_dir
    print(f"{workspace.checkpoint_dir} holds no checkpoint yet: these are the numbers of the released model")
    return RELEASED


def main(arguments: Sequence[str]) -> int:
    """The command; its flags are those of ``dm05-train``."""
    from dm05_train.cli import read_flags

    text = """What a training run needs per GPU, from the same flags as dm05-train.

Examples:
  dm05-train memory --gpus 8                 without weights in the workspace: of the released model
  dm05-train memory --gpu-gib 48 --trainer-config.gradient-checkpointing"""
    config = read_flags(MemoryConfig, MemoryConfig.defaults(os.environ), arguments, "dm05-train memory", text)
    workspace, switches = Workspace.resolve(config.workspace), Switches.from_env(os.environ)
    spec = lookup(config.data_config.dataset_name, workspace)
    settings = model_settings(config, workspace)
    with aiming(workspace, spec.name):
        model = DM05Config.from_json(settings)
        mode = precision_mode(config, settings)
    sharded = config.gpus > 1 and config.trainer_config.parallel == "fsdp"
    shape = shape_of(
        config,
        model,
        mode,
        cameras=len(spec.image_keys),
        gpus=config.gpus,
        trimmed=switches.on("restructure"),
        graphs=switches.on("cuda_graph") and not sharded,
        fp8=switches.on("fp8_mlp"),
    )
    need = estimate(model, shape)
    print(f"per GPU, batch {shape.batch}, prefix of {shape.prefix} tokens, {shape.cameras} cameras, {mode}")
    for f in fields(Memory):
        print(f"  {f.name:12} {getattr(need, f.name) / GIB:7.2f} GiB")
    print(f"  {'together':12} {need.total / GIB:7.2f} GiB")
    size = config.gpu_gib
    if size is None and torch.cuda.is_available():
        size = torch.cuda.get_device_properties(0).total_memory / GIB
    print(checkpoints_line(snapshot_bytes(model, shape), need, size))
    if size is not None and need.total > size * GIB:
        print(f"does not fit a GPU of {size:.0f} GiB. What would:" if size else "", file=sys.stdout)
    elif size is not None:
        print(f"fits a GPU of {size:.0f} GiB with {size - need.total / GIB:.1f} GiB to spare. With less memory:")
    else:
        print("with less memory:")
    for line in advice(model, shape, switches):
        print(f"  {line}")
    return 0
