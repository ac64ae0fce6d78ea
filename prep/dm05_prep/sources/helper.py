"""Other downloaders, in a child process that can be killed: hf_transfer, and the hub's own xet.

Neither can be trusted with the last word: hf_transfer ignores Ctrl-C, has no timeout, deletes its target on a failure
and takes a body with holes for success; xet hangs where its storage hosts cannot be reached. So each works on a file
of its own, ``NAME.helper``, is watched, and its result counts only when it meets the published sums.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dm05_schemas.files import sync_path

from dm05_prep.sources.checks import Checks, file_differences
from dm05_prep.sources.retry import Stopped

HELPER_MIN_BYTES = 32 << 20
_POLL_S = 0.1


class HelperFailed(Exception):
    """The helper did not bring the file; the text says why, without secrets."""


def run_helper(
    job: Mapping[str, object],
    target: Path,
    size: int,
    checks: Checks,
    *,
    stall_s: float,
    progress: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Bring ``target`` by the tool that ``job`` names (see :mod:`dm05_prep.sources.helper_child`).

    Args:
        stall_s: the child is killed when its file does not grow for so long.

    Raises:
        HelperFailed: fetch it another way; nothing is left behind.
        Stopped: ``stop`` was set.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(target.name + ".helper")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        reported = _watch(_start({**job, "folder": str(folder)}), folder, size, stall_s, progress, stop)
        path = folder / "file" if job["tool"] == "hf_transfer" else folder / str(job["name"])
        if not path.is_file():
            raise HelperFailed("it left no file")
        wrong = file_differences(path, size, checks, stop)
        if wrong is None:
            raise Stopped
        if wrong:
            raise HelperFailed("; ".join(wrong))
        sync_path(path)
        os.replace(path, target)
        progress(size - reported)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(job: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """The child; the job goes in by stdin, since arguments can be seen by everyone on the machine."""
    child = subprocess.Popen(
        [sys.executable, "-m", "dm05_prep.sources.helper_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin is not None
    try:
        child.stdin.write(json.dumps(job).encode())
        child.stdin.close()
    except OSError:
        pass  # it is gone already; its exit code tells
    return child


def _watch(
    child: subprocess.Popen[bytes],
    folder: Path,
    size: int,
    stall_s: float,
    progress: Callable[[int], None],
    stop: threading.Event,
) -> int:
    """Wait for the child, report growth; the number of bytes reported."""
    reported, grown_at = 0, time.monotonic()
    try:
        while child.poll() is None:
            if stop.wait(_POLL_S):
                raise Stopped
            stored = min(size, _stored(folder))
            if stored > reported:
                progress(stored - reported)
                reported, grown_at = stored, time.monotonic()
            if time.monotonic() - grown_at > stall_s:
                raise HelperFailed(f"nothing came for {stall_s:.0f} s")
        if child.returncode:
            raise HelperFailed(_complaint(child))
        return reported
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stderr is not None:
            child.stderr.close()


def _stored(folder: Path) -> int:
    """Bytes on the disk under ``folder``: files there have holes, so their sizes say nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            pass
    return total


def _complaint(child: subprocess.Popen[bytes]) -> str:
    """The one line that the child wrote about its failure."""
    assert child.stderr is not None
    lines = child.stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines and child.returncode == 1 else f"exit code {child.returncode}"
