"""The installed commands in processes of their own, and what a good error looks like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent

# Variables of the person who runs the tests must not reach the commands.
FOREIGN = ("WORKSPACE_DIR", "DATA_PATH", "NORM_STATS_PATH", "PER_DEVICE_BATCH", "TRAIN_STEPS", "DM05_DATASETS")

# The tiny demo model learns fast; a real run takes the defaults.
TRAIN = (
    *("--trainer-config.model-max-length", "128"),
    *("--trainer-config.dataloader-num-workers", "0"),
    *("--optimizer-config.base-lr", "3e-3"),
    *("--optimizer-config.warmup-steps", "20"),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    def succeeded(self) -> Outcome:
        """Itself, after checking that the exit code is 0."""
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self

    def failed(self, code: int, *words: str) -> Outcome:
        """Itself, after checking the exit code, that stderr is one line, and that it holds every word."""
        text = f"exit code {self.code}\n{self.out}\n{self.err}"
        lines = [line for line in self.err.splitlines() if not line.startswith("warning: ")]
        assert self.code == code, text
        assert len(lines) == 1 and ": error: " in lines[0], text
        assert "Traceback" not in self.out + self.err and "bug in the tool" not in self.err, text
        for word in words:
            assert word in lines[0], f"{word!r} is not in: {lines[0]}"
        return self


def environment(**changes: str) -> dict[str, str]:
    """The environment of a command: this one's without what would change its meaning."""
    plain = {key: value for key, value in os.environ.items() if key not in FOREIGN and not key.startswith("DM05_")}
    return {**plain, "OMP_NUM_THREADS": "1", **changes}


def call(name: str, *args: str | Path, timeout: float = 280, cwd: Path | None = None, **env: str) -> Outcome:
    """Run an installed command and wait for it."""
    line = [str(BIN / name), *map(str, args)]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment(**env), check=False
    )
    return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)


def prep(*args: str | Path, **env: str) -> Outcome:
    """``dm05-prep``."""
    return call("dm05-prep", *args, **env)


def train(*args: str | Path, timeout: float = 280, **env: str) -> Outcome:
    """``dm05-train`` with the settings that suit the demo model."""
    return call("dm05-train", *args, *TRAIN, timeout=timeout, **env)


def start(name: str, *args: str | Path) -> subprocess.Popen[str]:
    """Start an installed command without waiting."""
    line = [str(BIN / name), *map(str, args)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def rows(output: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def losses(output: Path) -> list[float]:
    """The loss of every step."""
    return [row["loss"] for row in rows(output)]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its content."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def prepare(parts: Path, checkpoint: Path, workspace: Path) -> Path:
    """A workspace from a demo's parts and checkpoint, by the commands a person would use."""
    prep("dataset", "--source", "local", "--uri", parts, "--workspace", workspace).succeeded()
    prep("model", "--source", "local", "--uri", checkpoint, "--workspace", workspace).succeeded()
    return workspace
