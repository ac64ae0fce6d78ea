"""The acceleration switches: what the environment asks for.

Each is 1 or 0 and on by default but for FP8, all under the master ``DM05_PERF_ENABLE`` (off by default: the plain
reference path).
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from dm05_schemas.errors import UsageError

from dm05_train.config import whole_number

TRUE, FALSE = {"1", "true", "on", "yes"}, {"0", "false", "off", "no"}
MOST_MB = 1_000_000
PRECISIONS = {"highest": "highest", "high": "high", "medium": "medium", "1": "high", "0": "highest"}
# Variables that begin with DM05_ and are read elsewhere, and the beginning of those that dm05-prep reads.
OTHERS = {"DM05_DATASETS"}
PREP = "DM05_PREP_"


def _switch(variable: str, what: str, *, default: bool = True) -> bool:
    return field(default=default, metadata={"variable": variable, "what": what})


@dataclass(frozen=True, kw_only=True)
class Switches:
    """What is asked for; what applies on this machine is said by ``perf.accelerate``."""

    enable: bool = _switch("DM05_PERF_ENABLE", "master switch; off is the plain reference path", default=False)
    log: bool = _switch("DM05_PERF_LOG", "report switches, fallbacks and the step-time breakdown", default=False)
    fused_adamw: bool = _switch("DM05_PERF_R1_FUSED_ADAMW", "one-pass optimizer step, gradient clip folded in")
    ddp_bucket: bool = _switch("DM05_PERF_R5_DDP_BUCKET", "large DDP buckets, gradients as bucket views")
    async_loss: bool = _switch("DM05_PERF_R7_ASYNC_LOSS_AR", "loss logged without a host sync in the step")
    compile_suffix: bool = _switch("DM05_PERF_R8_COMPILE_SUFFIX_LOOP", "torch.compile of the action-expert layers")
    tf32_matmul: bool = _switch("DM05_PERF_R10_TF32_MATMUL", "TF32 for float32 matmuls")
    cudnn_benchmark: bool = _switch("DM05_PERF_R10_CUDNN_BENCHMARK", "cuDNN autotuning")
    language_sync: bool = _switch("DM05_PERF_R13_GEMMA3_FORWARD_SYNC", "language forward without host-device sync")
    compile_vision: bool = _switch("DM05_PERF_R14_COMPILE_SIGLIP", "torch.compile of the vision layers")
    restructure: bool = _switch("DM05_PERF_R16_MODULE_REORDER", "packed weights, no dead tail, trimmed prefix")
    cuda_graph: bool = _switch("DM05_PERF_R18_CUDA_GRAPH", "forward and backward as CUDA graphs")
    fp8_mlp: bool = _switch("DM05_PERF_FP8_MLP", "FP8 matmuls in the language MLPs, on top of R16", default=False)
    muon_batched_gather: bool = _switch("DM05_MUON_BATCHED_GATHER", "Muon in batches, shared over ranks")
    ddp_static_graph: bool = _switch("DM05_DDP_STATIC_GRAPH", "DDP static graph")
    bucket_cap_mb: int = 512
    matmul_precision: str = "high"

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Switches:
        """Read the environment; an unknown ``DM05_*`` name is a warning that offers the nearest real one.

        Raises:
            UsageError: a value is neither 1 nor 0, or not a number or precision where one is due.
        """
        values: dict[str, bool | int | str] = {}
        for name, variable in cls.variables().items():
            if (text := environ.get(variable)) is not None:
                values[name] = _read_bool(variable, text)
        if text := environ.get("DM05_DDP_BUCKET_CAP_MB") or environ.get("DDP_BUCKET_MB"):
            megabytes = whole_number(text)
            if megabytes is None or not 1 <= megabytes <= MOST_MB:
                raise UsageError(
                    f"{text!r} is not a number of megabytes",
                    where="DM05_DDP_BUCKET_CAP_MB",
                    fix=f"Give a number such as 512, and {MOST_MB} at most",
                )
            values["bucket_cap_mb"] = megabytes
        if text := environ.get("DM05_PERF_R10_MATMUL_PRECISION"):
            if text not in PRECISIONS:
                raise UsageError(
                    f"{text!r} is not a precision",
                    where="DM05_PERF_R10_MATMUL_PRECISION",
                    fix="Use highest, high or medium; 1 means high, 0 highest",
                )
            values["matmul_precision"] = PRECISIONS[text]
        _warn_unknown(environ, set(cls.variables().values()))
        switches = cls(**values)  # type: ignore[arg-type]
        if switches.enable and not switches.tf32_matmul and values.get("matmul_precision", "highest") != "highest":
            idle, needed = "DM05_PERF_R10_MATMUL_PRECISION", "DM05_PERF_R10_TF32_MATMUL"
            warnings.warn(f"{idle} does nothing while {needed} is 0: both are one setting of torch", stacklevel=2)
        return switches

    @classmethod
    def variables(cls) -> dict[str, str]:
        """Field name -> environment variable, of the 1/0 switches."""
        return {f.name: f.metadata["variable"] for f in fields(cls) if "variable" in f.metadata}

    def on(self, name: str) -> bool:
        """Whether a switch counts: asked for, and the master is on (the log reports without it too)."""
        return bool(getattr(self, name)) and (self.enable or name == "log")

    def table(self) -> list[tuple[str, str, str]]:
        """(variable, 1 or 0 as it counts, what it does) of every switch."""
        rows = []
        for f in fields(self):
            if "variable" in f.metadata:
                rows.append((f.metadata["variable"], str(int(self.on(f.name))), f.metadata["what"]))
        return rows


def _read_bool(variable: str, text: str) -> bool:
    value = text.strip().lower()
    if value in TRUE:
        return True
    if value in FALSE or value == "":
        return False
    raise UsageError(f"{text!r} is neither 1 nor 0", where=variable, fix=f"Set {variable}=1 or {variable}=0")


def _warn_unknown(environ: Mapping[str, str], known: set[str]) -> None:
    known = known | {"DM05_DDP_BUCKET_CAP_MB", "DM05_PERF_R10_MATMUL_PRECISION"} | OTHERS
    for name in sorted(n for n in environ if n.startswith("DM05_") and not n.startswith(PREP) and n not in known):
        begun = sorted(real for real in known if real.startswith(f"{name}_"))
        near = begun or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        warnings.warn(f"{name} is not a switch of dm05-train and does nothing{hint}", stacklevel=3)
