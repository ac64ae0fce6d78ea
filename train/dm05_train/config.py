"""Everything a run can be told: frozen dataclasses that are the flags, with their defaults and the rules between them.

A flag beats an environment variable, which beats the default. The environment is read in one place,
``TrainConfig.defaults``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from dm05_schemas.errors import UsageError

C = TypeVar("C", bound="TrainConfig")
Precision = Literal["auto", "fp32", "bf16", "bf16_compensated", "fp32_master"]
MOST_TOKENS, MOST_NS_STEPS = 131_072, 100
LEAST_WORKERS_ALLOWED, WORKERS_A_CORE = 16, 4
MOST_MINUTES = 525_600
"""A year; torch counts its waits in milliseconds and overflows beyond some."""


def _require(good: bool, what: str, flag: str, fix: str) -> None:
    if not good:
        raise UsageError(what, where=flag, fix=fix)


def require_number(value: float, flag: str, *, above: float | None = None, least: float = 0.0) -> None:
    """Refuse what is not finite, or not ``above`` a bound, or under the ``least`` there may be."""
    good = math.isfinite(value) and (value > above if above is not None else value >= least)
    bound = f"above {above:g}" if above is not None else f"of {least:g} or more"
    _require(good, f"{value} is out of range", flag, f"Give a number {bound}")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_workers() -> int:
    """Data workers a rank may have: each holds two batches and starts a Python of its own."""
    return max(LEAST_WORKERS_ALLOWED, WORKERS_A_CORE * usable_cores())


def whole_number(text: str) -> int | None:
    """The number that a variable's text is, None when it is none or has more than 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on."""

    dataset_name: str = "libero_pi0_all"
    """A registered dataset (`dm05-prep datasets` lists them)."""
    norm_stats_root: Path | None = None
    """Folder of the normalisation statistics; missing ones are computed once by rank 0 while the others wait.
    Default: $NORM_STATS_PATH, else WORKSPACE/norm_stats."""
    action_mode: Literal["absolute", "relative"] | None = None
    """What the action targets are relative to. Default: the dataset's own mode."""
    layout: Literal["auto", "jsonl", "pack"] = "auto"
    """Read the dataset's pack, its jsonl and image files, or the pack when there is one (auto)."""
    augment_images: bool = False
    """Crop, turn and recolour the images at random (the same way whenever a sample of an epoch is seen)."""
    val_episodes: float = 0.0
    """Episodes kept out of training, for `dm05-train eval`: their number, or below 1 their share.
    The choice depends on their names alone."""

    def __post_init__(self) -> None:
        _require(
            self.val_episodes >= 0 and (self.val_episodes < 1 or float(self.val_episodes).is_integer()),
            f"{self.val_episodes} is neither a number nor a share of episodes",
            "--data-config.val-episodes",
            "Give a whole number, or a share under 1",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which weights to start from, and the model's shape at run time."""

    model_name_or_path: Path | None = None
    """Released weights start a new run; a checkpoint of a run continues it: optimizer, schedule, RNG, data position.
    Default: WORKSPACE/checkpoints/DM05."""
    chunk_size: int = 10
    """Actions predicted at once."""
    load: Literal["each", "broadcast"] = "each"
    """each: every rank reads the weights itself. broadcast: rank 0 reads and sends them; no shared folder is needed."""

    def __post_init__(self) -> None:
        _require(
            self.chunk_size >= 1,
            f"{self.chunk_size} actions make no chunk",
            "--model-config.chunk-size",
            "Give 1 or more",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights move."""

    optim: Literal["adamw", "muon_adamw"] = "adamw"
    """AdamW for all, or Muon for the matrices of the action expert's layers and AdamW for the rest."""
    base_lr: float = 2.5e-5
    """Peak learning rate."""
    warmup_steps: int = 1000
    """Steps over which the rate rises from 0 to its peak."""
    lr_scheduler: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: down a cosine to `min-lr-ratio` of the peak at the last step, or flat."""
    min_lr_ratio: float = 0.1
    """Where the cosine ends, as a share of the peak."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 1e-10
    """Decoupled weight decay."""
    muon_momentum: float = 0.95
    """Muon: decay of the momentum."""
    muon_nesterov: bool = True
    """Muon: look ahead along the momentum."""
    muon_ns_steps: int = 5
    """Muon: Newton-Schulz steps that make an update orthogonal."""
    muon_lr_scale: float = 1.0
    """Muon: its rate as a multiple of the scheduled one."""
    muon_coefficient: float = 0.2
    """Muon: an update is scaled by this times sqrt(max(rows, columns)), so that its size matches AdamW's."""

    def __post_init__(self) -> None:
        for name in ("base_lr", "eps"):
            require_number(getattr(self, name), f"--optimizer-config.{name.replace('_', '-')}", above=0)
        for name in ("weight_decay", "muon_lr_scale", "muon_coefficient"):
            require_number(getattr(self, name), f"--optimizer-config.{name.replace('_', '-')}")
        _require(
            1 <= self.muon_ns_steps <= MOST_NS_STEPS,
            f"{self.muon_ns_steps} Newton-Schulz steps are out of range",
            "--optimizer-config.muon-ns-steps",
            f"Give 1 to {MOST_NS_STEPS}; 5 are usual",
        )
        _require(
            self.warmup_steps >= 0, "a warm-up cannot be negative", "--optimizer-config.warmup-steps", "Give 0 or more"
        )
        _require(
            0 <= self.min_lr_ratio <= 1,
            "the end of the cosine is a share",
            "--optimizer-config.min-lr-ratio",
            "Give 0 to 1",
        )
        for name in ("beta1", "beta2", "muon_momentum"):
            value = getattr(self, name)
            _require(
                0 <= value < 1,
                f"{value} is no decay",
                f"--optimizer-config.{name.replace('_', '-')}",
                "Give 0 to under 1",
            )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long, how parallel, what to keep."""

    per_device_train_batch_size: int = 10
    """Samples a GPU takes at once (environment: PER_DEVICE_BATCH)."""
    gradient_accumulation_steps: int = 1
    """Batches added up before the weights move."""
    num_train_steps: int = 300
    """Optimizer steps in the whole run (environment: TRAIN_STEPS)."""
    save_strategy: Literal["no", "steps"] = "no"
    """Write a checkpoint every `save-steps` steps, or none.
    A run that is told to stop (SIGTERM, SIGUSR1) always writes one."""
    save_steps: int = 100
    """Steps between checkpoints."""
    save_total_limit: int | None = None
    """Keep only the newest so many of this run's checkpoints. Default: keep all."""
    save_at_end: bool = False
    """Write a checkpoint after the last step."""
    output_dir: Path | None = None
    """Where checkpoints and metrics.jsonl go. Default: `outputs` beside the workspace."""
    resume: Literal["path", "latest", "never"] = "path"
    """path: what `model-name-or-path` is decides. never: take its weights and start anew.
    latest: continue from the newest complete checkpoint in `output-dir`, if there is one."""
    dataloader_num_workers: int = 4
    """Processes a rank uses to read and decode samples; 0 reads in the training process."""
    seed: int = 42
    """Order of the data, noise and times all follow from it."""
    logging_steps: int = 10
    """How often losses are read back from the GPU and shown; metrics.jsonl has a row for every step all the same."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    model_max_length: int = 1024
    """Longest prompt in tokens, images included; a longer task text is cut."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: slower, needs far less memory."""
    gradient_checkpointing_every: int = 1
    """Do that for every n-th layer only: 2 saves half as much and costs half the time."""
    precision: Precision = "auto"
    """bf16: weights and moments in BF16; updates at small rates are rounded away.
    bf16_compensated: the same, with the 16 bits that rounding loses kept beside each weight.
    fp32_master: a float32 copy of the weights. fp32: everything in float32.
    auto: fp32 for float32 weights, else bf16_compensated."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: a whole model on each GPU. fsdp: weights, gradients and moments in shards, for cards too small for ddp."""
    timeout_minutes: float = 10.0
    """How long a rank waits for the others before it gives up."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also write metrics there."""

    def __post_init__(self) -> None:
        for name in (
            "model_max_length",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "num_train_steps",
            "save_steps",
            "logging_steps",
            "gradient_checkpointing_every",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"{value} is too few", f"--trainer-config.{name.replace('_', '-')}", "Give 1 or more")
        _require(
            self.model_max_length <= MOST_TOKENS,
            f"{self.model_max_length} tokens are more than the model has positions for",
            "--trainer-config.model-max-length",
            f"Give {MOST_TOKENS} or less",
        )
        limit = self.save_total_limit
        _require(
            limit is None or limit >= 1,
            f"keeping {limit} checkpoints would delete the last good one",
            "--trainer-config.save-total-limit",
            "Give 1 or more, or leave it out to keep all",
        )
        most, workers = most_workers(), self.dataloader_num_workers
        _require(
            0 <= workers <= most,
            f"{workers} workers cannot be"
            if workers < 0
            else f"{workers} workers a rank are more than the {usable_cores()} cores here can serve",
            "--trainer-config.dataloader-num-workers",
            f"Give 0 to {most}; about one a core is enough",
        )
        _require(
            0 < self.max_grad_norm < math.inf,
            f"a norm of {self.max_grad_norm} " + ("stops all learning" if self.max_grad_norm <= 0 else "is no bound"),
            "--trainer-config.max-grad-norm",
            "Give a positive norm; 1e9 never clips",
        )
        _require(0 <= self.seed < 2**63, f"{self.seed} is out of range", "--trainer-config.seed", "Give 0 to 2**63 - 1")
        _require(
            0 < self.timeout_minutes <= MOST_MINUTES,
            f"a rank cannot wait {self.timeout_minutes:g} minutes for the others",
            "--trainer-config.timeout-minutes",
            f"Give some minutes, such as 10, and {MOST_MINUTES} at most",
        )
        for name in self.report_to:
            package = {"tensorboard": "tensorboard", "wandb": "wandb"}[name]
            _require(
                importlib.util.find_spec(package) is not None,
                f"{name} is not installed",
                "--trainer-config.report-to",
                f"Run: pip install 'dm05[{name}]'",
            )

    @property
    def recomputed_every(self) -> int:
        """Every how many-th layer is recomputed in backward; 0: none."""
        return self.gradient_checkpointing_every if self.gradient_checkpointing else 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    workspace: Path | None = None
    """The workspace. Default: $WORKSPACE_DIR, else the current folder."""
    data_config: DataConfig = field(default_factory=DataConfig)
    model_config: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer_config: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        resume, path = self.trainer_config.resume, self.model_config.model_name_or_path
        _require(
            not (resume == "latest" and path is not None and is_run_checkpoint(path)),
            f"{path} is a checkpoint to continue from, and `latest` may pick another",
            "--trainer-config.resume",
            "Leave the flag out, or point --model-config.model-name-or-path at the released weights",
        )

    @classmethod
    def defaults(cls: type[C], environ: Mapping[str, str]) -> C:
        """The defaults with the environment laid over them.

        Raises:
            UsageError: a variable holds no number where one is due.
        """
        trainer: dict[str, Any] = {}
        for variable, name in (("PER_DEVICE_BATCH", "per_device_train_batch_size"), ("TRAIN_STEPS", "num_train_steps")):
            if text := environ.get(variable):
                count = whole_number(text)
                _require(bool(count), f"{text!r} is no count", f"${variable}", "Give a whole number of 1 or more")
                trainer[name] = count
        stats = environ.get("NORM_STATS_PATH")
        return cls(
            workspace=Path(environ["WORKSPACE_DIR"]) if environ.get("WORKSPACE_DIR") else None,
            data_config=DataConfig(norm_stats_root=Path(stats) if stats else None),
            trainer_config=TrainerConfig(**trainer),
        )

    def global_batch(self, world_size: int) -> int:
        """Samples an optimizer step sees: ranks x per-device batch x accumulation."""
        return (
            world_size
            * self.trainer_config.per_device_train_batch_size
            * self.trainer_config.gradient_accumulation_steps
        )


def is_run_checkpoint(folder: Path) -> bool:
    """Whether a folder is, or by its name should be, a checkpoint of a run and not just weights.

    One whose training state is missing was copied or deleted halfway: to read it as weights would start anew unasked.
    """
    return (folder / "training").is_dir() or re.fullmatch(r"checkpoint-\d+", folder.name) is not None


def as_plain(config: Any) -> dict[str, Any]:
    """A config as JSON-ready values (paths as text), for the start table and the checkpoint."""
    return {
        name: str(value) if isinstance(value, Path) else as_plain(value) if dataclasses.is_dataclass(value) else value
        for name, value in ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    }
