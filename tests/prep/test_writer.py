"""The writer: the same files with and without helper processes, errors with the file they are about."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path

import pytest
from dm05_prep import child
from dm05_prep.errors import PrepError
from dm05_prep.writer import TreeWriter

DATA = random.Random(0).randbytes(1 << 20)


@pytest.fixture
def part(tmp_path: Path) -> Path:
    path = tmp_path / "part"
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_the_same_files(tmp_path: Path, part: Path, helpers: int) -> None:
    rnd = random.Random(1)
    due = {}
    (tmp_path / "tree").mkdir()
    writer = TreeWriter(tmp_path / "tree", helpers, alone_bytes=20_000, guard=0)
    try:
        for index in range(500):
            path = f"e{index // 90}/c{index % 2}/{index}" if index % 7 else str(index)
            size = rnd.choice([0, 1, 4096, rnd.randrange(20_000)])
            offset = rnd.randrange(len(DATA) - size)
            due[path] = DATA[offset : offset + size]
            if index % 50 == 3:
                writer.file(path, (due[path][:10], due[path][10:]))
            else:
                writer.copy(path, part, offset, size)
        writer.link("e0/link", "c0/2")
        writer.same_file("again", "e5/c1/499")
        writer.wait()
        due |= {"e0/link": due["e0/c0/2"], "again": due["e5/c1/499"]}
        found = {
            p.relative_to(tmp_path / "tree").as_posix(): p.read_bytes()
            for p in (tmp_path / "tree").rglob("*")
            if p.is_file()
        }
        assert found == due
    finally:
        writer.close()


@pytest.mark.parametrize("helpers", [0, 2])
def test_errors_name_the_file(tmp_path: Path, part: Path, helpers: int) -> None:
    for harm, kind in (("exists", FileExistsError), ("link", FileExistsError), ("short", OSError)):
        root = tmp_path / harm
        (root / "d").mkdir(parents=True)
        (tmp_path / "outside").write_text("mine")
        if harm == "exists":
            (root / "d/x").write_text("there")
        elif harm == "link":
            (root / "d/x").symlink_to(tmp_path / "outside")
        writer = TreeWriter(root, helpers, alone_bytes=0, guard=0)
        writer.copy("d/x", part, len(DATA) - 10 if harm == "short" else 0, 100)
        with pytest.raises(kind) as caught:
            writer.wait()
        writer.close()
        assert str(caught.value.filename) == "d/x"
        assert (tmp_path / "outside").read_text() == "mine"


@pytest.mark.parametrize("busy", [False, True])
def test_a_helper_that_is_killed(tmp_path: Path, part: Path, busy: bool) -> None:
    """What was handed over never counts as written then, however often one asks."""
    (tmp_path / "tree").mkdir()
    writer = TreeWriter(tmp_path / "tree", 1, alone_bytes=0, guard=0)
    writer.copy("x", part, 0, 10)
    writer.wait()
    process = writer._helpers[0]._child._process
    os.kill(process.pid, signal.SIGSTOP if busy else signal.SIGKILL)
    with contextlib.suppress(PrepError):
        for index in range(150):  # more than two tasks
            if index == (100 if busy else 0):
                process.kill()
                process.wait()
            writer.copy(f"d/{index}", part, 0, 10)
    for _ in range(2):
        with pytest.raises(PrepError, match="killed by signal 9"):
            writer.wait()
    writer.close()


def test_helpers_end_with_their_parent(tmp_path: Path, part: Path) -> None:
    (tmp_path / "tree").mkdir()
    child = os.fork()
    if not child:
        writer = TreeWriter(tmp_path / "tree", 2, alone_bytes=0, guard=0)
        writer.copy("x", part, 0, 10)
        writer.wait()
        (tmp_path / "pids").write_text(" ".join(str(helper._child.pid) for helper in writer._helpers))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    for pid in (tmp_path / "pids").read_text().split():
        for _ in range(500):
            if not Path(f"/proc/{pid}").exists() or ") Z" in Path(f"/proc/{pid}/stat").read_text():
                break
            signal.sigtimedwait([], 0.01)
        else:
            pytest.fail("a helper outlived its parent")


@pytest.mark.parametrize("task_bytes", [10, 200])
def test_a_helper_that_is_stopped(tmp_path: Path, part: Path, monkeypatch: pytest.MonkeyPatch, task_bytes: int) -> None:
    """It is waited for when it only takes its time; stopped, it ends the run, also with its pipe full."""
    monkeypatch.setattr(child, "LOOK_SECONDS", 0.1)
    (tmp_path / "tree").mkdir()
    writer = TreeWriter(tmp_path / "tree", 1, alone_bytes=0, guard=0)
    writer.copy("x", part, 0, 10)
    writer.wait()
    pid = writer._helpers[0]._child.pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(PrepError, match=rf"helper process that writes files \({pid}\) is stopped"):
        for index in range(700):
            writer.copy(f"d/{index:0{task_bytes}}", part, 0, 10)
        writer.wait()
    writer.close()
    assert not Path(f"/proc/{pid}").exists()
