"""Signals while dm05-train starts, and Ctrl-C in what then goes wrong: one line, the signal's exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dm05_train.env import World
from dm05_train.signals import StopSignal
from training_runs import environment, flags

ENDS = {
    signal.SIGINT: (130, "dm05-train: interrupted\n"),
    signal.SIGTERM: (143, "dm05-train: terminated\n"),
    signal.SIGUSR1: (138, "dm05-train: ended by SIGUSR1\n"),
}
COMMANDS = {"train": [], "bench": ["bench"], "eval": ["eval"]}


@pytest.mark.parametrize("number", list(ENDS))
@pytest.mark.parametrize("command", list(COMMANDS))
def test_while_torch_is_loaded(workspace: Path, tmp_path: Path, command: str, number: signal.Signals) -> None:
    words = [*COMMANDS[command], *(flags(workspace, tmp_path) if command != "bench" else [])]
    child = subprocess.Popen(
        [sys.executable, "-m", "dm05_train", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    maps = Path(f"/proc/{child.pid}/maps")
    while child.poll() is None and "libtorch" not in maps.read_text():
        time.sleep(0.005)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == ENDS[number]


def test_ctrl_c_is_what_ended_a_run_whatever_it_broke() -> None:
    def handler(number: int, frame: object) -> None:
        raise AssertionError("the first one is for the run")

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt), StopSignal(World()):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                assert signal.getsignal(signal.SIGINT) is handler
                raise RuntimeError("a module was half loaded") from None
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
