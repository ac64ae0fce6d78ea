"""A run that was stopped, in any way, and continued has the losses of one that was not, to the last bit."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from real_commands import TRAIN, losses, prep, prepare, rows, start, train

STEPS = 14
SETTINGS = (
    *("--trainer-config.num-train-steps", str(STEPS), "--trainer-config.per-device-train-batch-size", "4"),
    *("--trainer-config.save-strategy", "steps", "--trainer-config.save-steps", "5"),
    *("--trainer-config.logging-steps", "1", "--trainer-config.gradient-accumulation-steps", "2"),
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    prep("demo", folder, "--episodes", "3", "--frames", "20").succeeded()
    return prepare(folder / "parts", folder / "DM05", folder / "dm05")


@pytest.fixture(scope="module")
def unbroken(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    output = tmp_path_factory.mktemp("unbroken")
    train("--workspace", workspace, "--trainer-config.output-dir", output, *SETTINGS).succeeded()
    curve = losses(output)
    assert len(curve) == STEPS and curve[0] != curve[1]
    return curve


def wait_for_step(process: subprocess.Popen[str], output: Path, step: int) -> None:
    """Until the run has logged ``step``."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        metrics = output / "metrics.jsonl"
        if metrics.is_file() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} in time")


def newest_checkpoint(output: Path) -> Path:
    return max(path for path in output.iterdir() if path.name.startswith("checkpoint-"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR1])
def test_told_to_stop_it_saves_and_ends_well(
    how: signal.Signals, workspace: Path, unbroken: list[float], tmp_path: Path
) -> None:
    flags = ("--workspace", workspace, "--trainer-config.output-dir", tmp_path, *SETTINGS)
    process = start("dm05-train", *flags, *TRAIN)
    wait_for_step(process, tmp_path, 2)
    process.send_signal(how)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    checkpoint = newest_checkpoint(tmp_path)
    assert 2 <= int(checkpoint.name[-6:]) < STEPS
    assert checkpoint.name in out
    train(*flags, "--model-config.model-name-or-path", checkpoint).succeeded()
    assert losses(tmp_path) == unbroken
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, STEPS + 1))


def test_killed_it_goes_on_from_the_last_checkpoint(workspace: Path, unbroken: list[float], tmp_path: Path) -> None:
    flags = ("--workspace", workspace, "--trainer-config.output-dir", tmp_path, *SETTINGS)
    process = start("dm05-train", *flags, *TRAIN)
    wait_for_step(process, tmp_path, 8)
    process.kill()
    process.communicate()
    checkpoint = newest_checkpoint(tmp_path)
    train(*flags, "--model-config.model-name-or-path", checkpoint).succeeded()
    assert losses(tmp_path) == unbroken
