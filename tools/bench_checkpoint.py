"""Loading and saving at full size: how long training stands still, how long the work takes, what memory it needs.

    python tools/bench_checkpoint.py --folder SCRATCH [--config tests/golden/dm05_config.json]

Generated weights, AdamW state of a few made-up steps; a step is matrix products of about ``--step-seconds`` and the
real optimizer. On a GPU machine at full size it writes about 38 GB into the folder and removes it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from dm05_train import snapshot as snapshots
from dm05_train.build import empty_model
from dm05_train.checkpoint import checkpoint_entries
from dm05_train.config import ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig
from dm05_train.env import World
from dm05_train.loop import Run
from dm05_train.model.config import DM05Config
from dm05_train.model.weights import freeze_untrained, generate_weights, load_weights
from dm05_train.optim.adamw import AdamW
from dm05_train.optim.precision import Mode, weight_dtype
from dm05_train.optim.state import restore
from dm05_train.saver import Saver
from dm05_train.snapshot import take_snapshot

GB = 1e9
READERS = 8


@dataclass(frozen=True)
class Options:
    """What to measure."""

    folder: Path
    """Where the checkpoint is written."""
    config: Path = Path(__file__).parents[1] / "tests" / "golden" / "dm05_config.json"
    """config.json of the model."""
    precision: Mode = "bf16_compensated"
    """Precision mode, which decides how much state there is."""
    step_seconds: float = 0.2
    """Length of the made-up forward and backward pass."""
    host_copy: bool = True
    """Also measure a snapshot that finds no room on the GPU."""


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    sync()
    began = time.perf_counter()
    result = work()
    sync()
    return time.perf_counter() - began, result


def host_peak_gb(*, reset: bool = False) -> float:
    """Largest resident set of this process, pages of mapped files included; NaN where the system does not say."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return _status_gb("VmHWM")


def private_gb() -> float:
    """Resident memory of this process that is no mapped file; NaN where the system does not say."""
    return _status_gb("RssAnon")


def _status_gb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / GB
    return float("nan")


def forget(folder: Path) -> None:
    """Ask the system to drop the files from its cache, so that a read is from the disk."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def adamw_class() -> type[AdamW]:
    if not torch.cuda.is_available():
        return AdamW
    from dm05_train.perf.fused_adamw import FusedAdamW

    return FusedAdamW


def make_run(options: Options, world: World) -> Run:
    config = DM05Config.from_json(options.config)
    model = empty_model(config, world.device, weight_dtype(options.precision))
    generate_weights(model)
    freeze_untrained(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = adamw_class()(named, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, mode=options.precision)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    return Run(
        config=TrainConfig(
            model_config=ModelConfig(), optimizer_config=OptimizerConfig(), trainer_config=TrainerConfig()
        ),
        world=world,
        model=model,
        wrapped=model,
        optimizer=optimizer,
        batches=iter(()),
        dataset_size=1,
        seed=0,
        name="bench",
        precision=options.precision,
    )


class Steps:
    """Made-up training steps: matrix products, then the optimizer under the rule that real steps follow."""

    def __init__(self, run: Run, seconds: float) -> None:
        self.run, self.scale = run, torch.ones((), device=run.world.device)
        self.a = torch.randn(4096, 4096, device=run.world.device, dtype=torch.bfloat16)
        self.count = 1
        timed(lambda: [self.a @ self.a for _ in range(20)])
        once, _ = timed(lambda: [self.a @ self.a for _ in range(20)])
        self.count = max(1, int(seconds / once * 20))

    def __call__(self) -> None:
        for _ in range(self.count):
            self.a @ self.a
        wait_for_copy(self.run)
        self.run.optimizer.step(self.run.lr, self.scale)

    def time(self, number: int) -> list[float]:
        return [timed(self)[0] for _ in range(number)]


def wait_for_copy(run: Run) -> None:
    """The rule of a real step: weights may not change while they are copied."""
    if run.copying is not None:
        run.copying.before_update()
        run.copying = None


def save(run: Run, saver: Saver | None, steps: Steps, usual: float, found: dict[str, Any], name: str) -> None:
    """Take a snapshot (and write it): what the call and the steps after it cost."""
    began = time.perf_counter()
    snapshot = take_snapshot(run)
    if saver is not None:
        saver.save(snapshot)
    call = time.perf_counter() - began
    after = steps.time(6)
    found[f"{name}_call_s"] = call
    found[f"{name}_steps_after_s"] = [round(t, 3) for t in after]
    found[f"{name}_stall_s"] = call + after[0] - usual
    if saver is not None:
        saver.wait()
        found[f"{name}_background_s"] = time.perf_counter() - began


def main(options: Options) -> None:
    """Measure and print one line of JSON a result."""
    world = World.from_env({})
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    seconds, run = timed(lambda: make_run(options, world))
    found["generate_s"] = seconds
    steps = Steps(run, options.step_seconds)
    usual = sorted(steps.time(8))[4]
    found["step_s"] = usual

    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    extras = {"config.json": options.config.read_bytes()}
    saver = Saver(world, options.folder, extras=extras, keep=1, say=lambda text: print(text, flush=True))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        found["device_before_gb"] = torch.cuda.memory_allocated() / GB
    anonymous = private_gb()
    save(run, saver, steps, usual, found, "save")
    found["save_host_gb"] = private_gb() - anonymous
    if torch.cuda.is_available():
        found["save_device_peak_gb"] = torch.cuda.max_memory_allocated() / GB
    checkpoint = saver.last
    assert checkpoint is not None
    found["checkpoint_gb"] = sum(p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()) / GB
    print(json.dumps(found), flush=True)
    if options.host_copy and torch.cuda.is_available():
        run.buffers.device, spare = None, snapshots.SPARE_GPU_BYTES
        torch.cuda.empty_cache()
        snapshots.SPARE_GPU_BYTES = 1 << 60
        found["host_buffer_s"], _ = timed(lambda: take_snapshot(run))
        wait_for_copy(run)
        save(run, None, steps, usual, found, "host_copy")
        snapshots.SPARE_GPU_BYTES, run.buffers.host = spare, None
        print(json.dumps(found), flush=True)

    for cache in ("cold", "warm"):
        if cache == "cold":
            forget(checkpoint)
        host_peak_gb(reset=True)
        anonymous = private_gb()
        found[f"load_{cache}_s"], _ = timed(lambda: load_weights(run.model, checkpoint))
        found[f"load_{cache}_private_gb"] = private_gb() - anonymous
        found[f"load_{cache}_host_peak_gb"] = host_peak_gb()
        print(json.dumps(found), flush=True)
    found["restore_s"], _ = timed(
        lambda: restore(run.optimizer, run.model, checkpoint_entries(checkpoint), threads=READERS)
    )
    print(json.dumps(found), flush=True)

    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}, indent=1))
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main(tyro.cli(Options))
