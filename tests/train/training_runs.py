"""A small real workspace (the demo's dataset and checkpoint) and the command line of a run in it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dm05_prep.demo import write_demo
from dm05_prep.index import build_index
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace
from dm05_train.cli import main

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_full_sft_distributed.sh"


def make_workspace(folder: Path, *, episodes: int = 5, frames: int = 20) -> Path:
    """A workspace with an extracted, indexed dataset and the demo's tiny float32 checkpoint; no statistics yet."""
    demo = write_demo(folder / "demo", episodes=episodes, frames=frames)
    root = folder / "workspace"
    joined = folder / "joined.tar"
    joined.write_bytes(b"".join(part.read_bytes() for part in demo.parts))
    with tarfile.open(joined) as archive:
        archive.extractall(root / "data", filter="data")
    joined.unlink()
    shutil.copytree(demo.checkpoint, root / "checkpoints" / "DM05")
    workspace = Workspace(root)
    build_index(workspace, lookup("libero_pi0_all", workspace))
    return root


def flags(root: Path, output: Path, *, steps: int = 6, **more: object) -> list[str]:
    """Flags of a short run; keywords name trainer flags, or others in full with double underscores."""
    plain: dict[str, object] = {
        "trainer_config__num_train_steps": steps,
        "trainer_config__output_dir": output,
        "trainer_config__per_device_train_batch_size": 2,
        "trainer_config__model_max_length": 256,
        "trainer_config__dataloader_num_workers": 0,
        "optimizer_config__base_lr": 1e-3,
        "optimizer_config__warmup_steps": 2,
        "workspace": root,
    }
    for name, value in more.items():
        plain[name if "__" in name or name == "workspace" else f"trainer_config__{name}"] = value
    words: list[str] = []
    for name, value in plain.items():
        flag = "--" + name.replace("__", ".").replace("_", "-")
        if isinstance(value, bool):
            head, _, tail = flag.rpartition(".")
            words.append(flag if value else f"{head}.no-{tail}")
        else:
            words += [flag, str(value)]
    return words


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what torchrun, a platform or a user may have set."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE")
    kept = {k: v for k, v in os.environ.items() if k not in names and not k.startswith("DM05_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable} | more


def start(
    arguments: list[str],
    *,
    script: bool = False,
    file_kb: int | None = None,
    within: Sequence[str] = (),
    **environ: str,
) -> subprocess.Popen[str]:
    """Start a process of ``dm05-train`` (or the launch script).

    Args:
        file_kb: it can write no longer file.
        within: words before the command, such as those that put it into a namespace.
    """
    command = ["bash", str(SCRIPT)] if script else [sys.executable, "-m", "dm05_train"]
    if file_kb is not None:
        command = ["bash", "-c", f'ulimit -f {file_kb}; exec "$@"', "limited", *command]
    return subprocess.Popen(
        [*within, *command, *arguments],
        env=environment(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(arguments: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``dm05-train`` to its end in this process: a new one would spend seconds on importing torch."""
    out, err = io.StringIO(), io.StringIO()
    before, wanted = (dict(os.environ), sys.argv), environment(**environ)
    try:
        os.environ.clear()
        os.environ.update(wanted)
        sys.argv = ["dm05-train", *arguments]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _exit_code()
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        sys.argv = before[1]
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def _exit_code() -> int:
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("a command ends the process")


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a started process."""
    out, err = process.communicate(timeout=280)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def rows(output: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every row."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows(output)]
