"""Applies the switches to a built model, and says of each what became of it on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from dm05_schemas.files import cache_home

from dm05_train.env import World
from dm05_train.model.dm05 import DM05
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.muon import Muon
from dm05_train.optim.precision import Mode
from dm05_train.parallel import wrap
from dm05_train.perf.merge import remove_syncs
from dm05_train.perf.ops.common import HAVE_TRITON
from dm05_train.perf.ops.fp8 import gated_mlp_fp8
from dm05_train.perf.restructure import restructure
from dm05_train.perf.switches import Switches


@dataclass(kw_only=True)
class Acceleration:
    """What the switches come to here: ``fallbacks`` names each that was asked for and does not apply, and why."""

    switches: Switches
    world: World
    parallel: str
    mode: Mode
    optim: str = "adamw"
    fallbacks: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, reason in self._reasons().items():
            if reason is not None and self.switches.on(name):
                self.fallbacks[name] = reason

    def _reasons(self) -> dict[str, str | None]:
        no_gpu = None if self.world.device.type == "cuda" else "no GPU"
        sharded = "FSDP shards the model layer by layer" if self.world.size > 1 and self.parallel == "fsdp" else None
        alone = "one process, no DDP" if self.world.size == 1 else sharded
        no_triton = None if HAVE_TRITON else "triton is not installed"
        master = "the fused step keeps no separate master weights" if self.mode == "fp32_master" else None
        return {
            "fused_adamw": no_gpu or no_triton or sharded or master,
            "ddp_bucket": alone,
            "ddp_static_graph": alone,
            "compile_suffix": no_gpu or no_triton or sharded,
            "compile_vision": no_gpu or no_triton or sharded,
            "tf32_matmul": no_gpu,
            "cudnn_benchmark": no_gpu,
            "restructure": f"{sharded}: prompts are trimmed, the rest is not done" if sharded else None,
            "cuda_graph": no_gpu or sharded or (None if self.switches.on("language_sync") else "R13 is off: it syncs"),
            "fp8_mlp": no_gpu or no_triton or sharded or self._no_fp8(),
            "muon_batched_gather": None if self.optim == "muon_adamw" else f"the optimizer is {self.optim}",
        }

    def _no_fp8(self) -> str | None:
        if not self.switches.on("restructure"):
            return "R16 is off"
        if self.mode == "fp32":
            return "float32 weights"
        older = torch.cuda.get_device_capability(self.world.device) < (8, 9)
        return "this GPU has no FP8 matmuls" if older else None

    def on(self, name: str) -> bool:
        """Whether a switch is asked for and applies here."""
        return self.switches.on(name) and name not in self.fallbacks

    @property
    def trims(self) -> bool:
        """Whether prompts are padded no further than needed: R16 does that even where it cannot rebuild the model."""
        return self.switches.on("restructure")

    def state(self, name: str) -> str:
        """What became of a switch: on, off, or in part."""
        if self.on(name):
            return "on"
        return "in part" if name == "restructure" and self.trims else "off"

    def report(self) -> list[str]:
        """A line for every switch: on, off, or what it fell back to and why."""
        lines = []
        for name, variable in Switches.variables().items():
            state = self.state(name)
            lines.append(f"{variable}: {state}" + (f" ({self.fallbacks[name]})" if name in self.fallbacks else ""))
            if name == "tf32_matmul":
                precision = self.switches.matmul_precision if self.on(name) else "highest"
                lines.append(f"DM05_PERF_R10_MATMUL_PRECISION: {precision}")
        return lines

    def prepare(self, model: DM05) -> None:
        """Change a loaded model in place, before it is wrapped and before its optimizer is made."""
        if self.on("tf32_matmul"):
            torch.set_float32_matmul_precision(self.switches.matmul_precision)
            torch.backends.cudnn.allow_tf32 = True
        if self.on("cudnn_benchmark"):
            torch.backends.cudnn.benchmark = True
        if self.on("language_sync"):
            remove_syncs(model)
        if self.on("restructure"):
            restructure(model)
        if self.on("fp8_mlp"):
            model.language.gated_mlp = gated_mlp_fp8  # type: ignore[assignment]
        if self.on("compile_suffix") or self.on("compile_vision"):
            _share_compile_cache()
        if self.on("compile_suffix"):
            for layer in model.expert.layers:
                layer.compile(dynamic=False)
        if self.on("compile_vision") and not self.on("restructure"):
            for layer in model.vision.encoder.layers:
                layer.compile(dynamic=False)

    def wrap(self, model: DM05) -> torch.nn.Module:
        """The model in DDP or FSDP as the switches have it; alone, the model itself."""
        return wrap(
            model,
            self.world,
            self.parallel,
            bucket_mb=self.switches.bucket_cap_mb if self.on("ddp_bucket") else None,
            static_graph=self.on("ddp_static_graph"),
            graphed=self.on("cuda_graph"),
        )

    def adamw(self) -> type[AdamW]:
        """The class of the AdamW step."""
        if not self.on("fused_adamw"):
            return AdamW
        from dm05_train.perf.fused_adamw import FusedAdamW

        return FusedAdamW

    def muon(self) -> type[Muon]:
        """The class of the Muon step."""
        if not self.on("fused_adamw"):
            return Muon
        from dm05_train.perf.fused_muon import FusedMuon

        return FusedMuon

    def backward(
        self, loss_of: Callable[..., torch.Tensor], wrapped: torch.nn.Module, say: Callable[[str], None]
    ) -> Callable[..., torch.Tensor] | None:
        """Forward and backward through CUDA graphs, or None where they do not apply."""
        if not self.on("cuda_graph"):
            return None
        from dm05_train.perf.graphs import GraphedBackward

        parameters = [p for p in wrapped.parameters() if p.requires_grad]
        syncs = partial(getattr, wrapped, "require_backward_grad_sync", True)
        warm_up = 11 if self.world.size > 1 else 3  # DDP rebuilds its buckets and times itself in its first steps
        return GraphedBackward(loss_of, parameters, syncs=syncs, warm_up=warm_up, say=say)


def _share_compile_cache() -> None:
    """One compile cache a user, kept between runs; ranks of a machine may write it together (files are renamed in)."""
    cache = cache_home()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(cache, "dm05", f"inductor-torch{torch.__version__}"))
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(cache, "dm05", f"triton-torch{torch.__version__}"))
