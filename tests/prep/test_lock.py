"""One run at a time: the second is told who works, and a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dm05_prep.dataset import _locked
from dm05_prep.errors import PrepError
from dm05_prep.lock import LOCK_NAME, WorkspaceLock
from dm05_schemas.workspace import Workspace

HOLD = """
import sys, time
from pathlib import Path
from dm05_prep.lock import WorkspaceLock
with WorkspaceLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        with pytest.raises(PrepError, match=rf"process {holder.pid} on .* since 20\d\d-.*\(-c {tmp_path}\)"):
            WorkspaceLock(tmp_path).__enter__()
        holder.send_signal(signal.SIGKILL)
    with WorkspaceLock(tmp_path):
        assert (tmp_path / LOCK_NAME).exists()
    assert not (tmp_path / LOCK_NAME).exists()


def test_one_of_many_at_a_time(tmp_path: Path) -> None:
    """Processes that come and go: never two inside, nothing left."""
    script = """
import sys, time
from pathlib import Path
from dm05_prep.errors import PrepError
from dm05_prep.lock import WorkspaceLock
folder, got = Path(sys.argv[1]), 0
end = time.monotonic() + 30
while got < 30 and time.monotonic() < end:
    try:
        with WorkspaceLock(folder):
            mark = folder / "inside"
            mark.touch(exist_ok=False)
            mark.unlink()
            got += 1
    except PrepError:
        time.sleep(0.001)
assert got == 30
"""
    runs = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert os.listdir(tmp_path) == []


def test_workspaces_that_share_a_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the folder is the inner one of the first workspace."""
    monkeypatch.delenv("DATA_PATH", raising=False)
    with _locked(Workspace.resolve(tmp_path / "a")):
        monkeypatch.setenv("DATA_PATH", str(tmp_path / "a" / "data"))
        with pytest.raises(PrepError, match=f"process {os.getpid()} on"), _locked(Workspace.resolve(tmp_path / "b")):
            pytest.fail("two at once")
    assert os.listdir(tmp_path) == []
