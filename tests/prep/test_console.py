"""What long work says where no terminal is: a plain line now and then, and nothing when it is short or ``--quiet``."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from dm05_prep import console
from dm05_prep.console import LogLines, progress
from tars import honest, split, write_parts
from test_dataset import FILES
from test_dataset_remote import PAD

ALWAYS = """
from dm05_prep import console
console.FIRST_LINE_S, console.LINE_EVERY_S = 0, 0
from dm05_prep.cli import main
main()
"""


def prep(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ALWAYS, *map(str, words)], capture_output=True, text=True, timeout=60)


def test_every_long_stage_says_now_and_then_how_far_it_is(tmp_path: Path) -> None:
    write_parts(tmp_path / "p", split(honest({**FILES, **PAD}), 400_000))
    words = ["dataset", "--uri", tmp_path / "p", "--workspace", tmp_path / "w"]
    done = prep(*words)
    line = r"extract: [\d.]+ [KM]?i?B of 3\.\d MiB \(\d+%\), [\d.]+ [KM]?i?B/s(, [\d.]+ s left)?, \d+ files"
    assert done.returncode == 0 and re.fullmatch(line, done.stderr.splitlines()[0])
    assert {line.split(":")[0] for line in done.stderr.splitlines()} == {"extract", "episodes", "statistics"}
    assert prep(*words, "--force", "--quiet").stderr == ""


def test_a_line_when_it_is_due_and_no_other(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.3)
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.6)
    with progress(1000, "episodes", "report") as lines:
        assert isinstance(lines, LogLines)
        started, said = time.monotonic(), []
        while time.monotonic() < started + 1.2:
            lines.update()
            time.sleep(0.01)
            if text := capfd.readouterr().err:
                said.append(time.monotonic() - started)
                assert re.fullmatch(r"report: \d+ of 1,000 episodes \(\d+%\), \d+/s, [\d.]+ s left\n", text)
    assert said == pytest.approx([0.3, 0.9], abs=0.2)


def test_what_an_earlier_run_left_is_no_rate(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.6)
    with progress(1 << 30, "B", "model") as lines:
        lines.update(1 << 29)
        for _ in range(8):
            time.sleep(0.1)
            lines.update(10 << 20)
    said = re.fullmatch(r"model: 5\d\d\.0 MiB of 1\.0 GiB \(5\d%\), ([\d.]+) MiB/s, .* left\n", capfd.readouterr().err)
    assert said and float(said[1]) < 110


def test_a_few_first_bytes_foretell_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As when the first member of an archive is read, and then the next part has to come."""
    monkeypatch.setattr(console, "FIRST_LINE_S", 0)
    with progress(1 << 30, "B", "extract") as lines:
        lines.update(512)
    assert re.fullmatch(r"extract: 512 B of 1\.0 GiB \(0%\), [\d.]+ [KM]?i?B/s\n", capfd.readouterr().err)


def test_updates_that_come_rarely_and_units_without_a_total(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.1)
    with progress(None, "frames", "pack") as lines:
        time.sleep(0.2)
        lines.update(5000)
    assert re.fullmatch(r"pack: 5,000 frames, 2\d,\d\d\d/s\n", capfd.readouterr().err)


def test_a_terminal_has_its_bar() -> None:
    code = "import time\nfrom dm05_prep.console import progress\nwith progress(9, 'B', 'x') as bar:\n"
    code += " bar.update()\n time.sleep(1.1)\n bar.update()"
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True)
    assert b"%|" in os.read(ours, 1000)
