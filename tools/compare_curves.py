"""Loss curves of the plain path and of others: same data, same noise and times, one after the other.

    python tools/compare_curves.py --workspace demo/dm05 --out curves                      (the demo's tiny model)
    python tools/compare_curves.py --workspace demo/dm05 --out curves --full               (the released sizes)

All are runs of ``dm05-train`` with its own loader, optimizer and metrics; they differ in their switches alone. Two
paths are controls, other than the ones beside them by rounding alone: ``tf32`` is the plain path with float32 matmuls
rounded to TF32, ``no-r8`` has all on but the compiled expert. What they lead away by, rounding alone can do. With
``--full`` the model has the released config, the demo's tokenizer and generated weights (11 GB in ``--out``, removed at
the end).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from dm05_train.bench import build
from dm05_train.checkpoint import write_tensors
from dm05_train.model.config import RELEASED, DM05Config
from dm05_train.model.weights import EMBEDDING, LM_HEAD, state_for_saving
from dm05_train.perf.switches import Switches
from dm05_train.plot import plot_curves, read_curve, smoothed

ALONE = dict.fromkeys(Switches.variables().values(), "0")
PATHS: dict[str, dict[str, str]] = {
    "all-off": {"DM05_PERF_ENABLE": "0"},
    "all-on": {"DM05_PERF_ENABLE": "1"},
    "fp8": {"DM05_PERF_ENABLE": "1", "DM05_PERF_FP8_MLP": "1"},
    "no-r8": {"DM05_PERF_ENABLE": "1", "DM05_PERF_R8_COMPILE_SUFFIX_LOOP": "0"},
    "tf32": ALONE | {"DM05_PERF_ENABLE": "1", "DM05_PERF_R10_TF32_MATMUL": "1"},
}
TOLERANCE = 0.02


@dataclass(frozen=True)
class Options:
    """What to run."""

    workspace: Path
    """Workspace with a prepared dataset and a checkpoint."""
    out: Path
    """Folder for the two runs and the picture."""
    steps: int = 300
    per_device_batch: int = 4
    base_lr: float = 2.5e-5
    full: bool = False
    """Released sizes with generated weights, and not the workspace's checkpoint."""
    paths: tuple[Literal["all-off", "all-on", "fp8", "no-r8", "tf32"], ...] = ("all-off", "all-on")
    """What to run; all are compared with the first."""


def full_size_config(small: Path) -> dict[str, Any]:
    """The released config with the special tokens of the tokenizer in ``small``, and its chunk length."""
    config, tiny = (json.loads(path.read_text("utf-8")) for path in (RELEASED, small / "config.json"))
    for name in ("pad_token_id", "chunk_size"):
        config[name] = tiny[name]
    for name in ("image_token_index", "boi_token_index", "eoi_token_index"):
        config["vlm_config"][name] = tiny["vlm_config"][name]
    return config


def write_full_size(folder: Path, small: Path) -> None:
    """A checkpoint of released sizes with generated BF16 weights, beside the small files of ``small``."""
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = full_size_config(small)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = state_for_saving(build(DM05Config.from_dict(config), "bf16", device))
    on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", on_host, {LM_HEAD: EMBEDDING})


def train(options: Options, checkpoint: Path, output: Path, switches: dict[str, str]) -> float:
    """One run of dm05-train; gives its seconds."""
    flags: dict[str, object] = {
        "--workspace": options.workspace,
        "--model-config.model-name-or-path": checkpoint,
        "--optimizer-config.base-lr": options.base_lr,
        "--optimizer-config.warmup-steps": options.steps // 10,
        "--trainer-config.num-train-steps": options.steps,
        "--trainer-config.per-device-train-batch-size": options.per_device_batch,
        "--trainer-config.output-dir": output,
        "--trainer-config.save-strategy": "no",
        "--trainer-config.logging-steps": 50,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    environ = {n: v for n, v in os.environ.items() if not n.startswith("DM05_")} | switches
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "dm05_train", *words], env=environ, check=True)
    return time.perf_counter() - began


def differences(one: list[float], other: list[float]) -> list[float]:
    """Relative differences of two smoothed curves, step by step."""
    pairs = zip(smoothed(one), smoothed(other), strict=True)
    return [abs(a - b) / a for a, b in pairs]


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    small = options.workspace / "checkpoints" / "DM05"
    checkpoint = options.out / "DM05" if options.full else small
    options.out.mkdir(parents=True)
    if options.full:
        write_full_size(checkpoint, small)
    curves = []
    for name in options.paths:
        folder = options.out / name
        seconds = train(options, checkpoint, folder, PATHS[name])
        curves.append(read_curve(folder))
        print(f"{name}: {seconds:.0f} s, loss {curves[-1].losses[0]:.4f} -> {curves[-1].losses[-1]:.4f}", flush=True)
    if options.full:
        shutil.rmtree(checkpoint)
    for name, curve in zip(options.paths[1:], curves[1:], strict=True):
        found = differences(curves[0].losses, curve.losses)
        inside = "within" if max(found) <= TOLERANCE else "NOT within"
        mean = sum(found) / len(found)
        print(f"{name}: smoothed, {mean:.2%} away in the mean and {max(found):.2%} at most: {inside} {TOLERANCE:.0%}")
    print(plot_curves(curves, options.out / "curves.png"))


if __name__ == "__main__":
    main()
