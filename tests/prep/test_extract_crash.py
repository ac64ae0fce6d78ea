"""Killed at any step, the next run goes on from the last durable point to the same result."""

from __future__ import annotations

import fcntl
import gzip
import io
import os
import random
import shutil
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.extract import ExtractOptions
from dm05_prep.journal import Journal, Record
from dm05_prep.parts import order_parts
from dm05_prep.sources.base import RemoteFile, Source
from dm05_prep.sources.local import LocalSource
from dm05_prep.writer import _Helper
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import (
    HOME,
    CopyingSource,
    closed,
    honest,
    killed_at,
    member,
    memory_folder,
    run,
    some_files,
    split,
    tree,
    wanted,
    write_parts,
)

STEP_BY_STEP = ExtractOptions(batch_bytes=0, block_bytes=700)
IN_BATCHES = ExtractOptions(batch_bytes=4000, block_bytes=900)
WITH_HELPERS = ExtractOptions(batch_bytes=4000, block_bytes=900, writers=2, alone_bytes=0)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = memory_folder(tmp_path)
    yield made
    if made != tmp_path:
        shutil.rmtree(made)


@dataclass(frozen=True)
class NotingSource(LocalSource):
    """A folder of parts that notes which ones are opened."""

    opened: list[str] = field(default_factory=list)

    def fetch(self, file: RemoteFile, target: Path, **more: object) -> Path:  # type: ignore[override]
        self.opened.append(file.name)
        return self.path / file.name


def check_after_kill(target: Path, due: dict[str, bytes]) -> None:
    """Whatever is at the target is complete."""
    if target.exists() and Record.load(target):
        assert tree(target) == due


def finish(source: Source, target: Path, due: dict[str, bytes], options: ExtractOptions) -> None:
    """Run to the end and compare everything."""
    result = run(source, target, options)
    assert tree(target) == due
    assert (result.record.files, result.record.bytes) == (len(due), sum(map(len, due.values())))
    assert not target.with_name(target.name + ".partial").exists()
    assert not (target.parent / "parts").exists()


@pytest.mark.parametrize("options", [STEP_BY_STEP, IN_BATCHES, WITH_HELPERS], ids=["steps", "batches", "helpers"])
@pytest.mark.parametrize("copied", [False, True])
def test_killed_at_every_step(folder: Path, options: ExtractOptions, copied: bool) -> None:
    """One kill at each step of a small extraction in turn."""
    files = {f"{HOME}image/e{index // 3}/{index}.jpg": random.Random(index).randbytes(1300) for index in range(7)}
    write_parts(folder / "p", split(honest(files), 3000))
    for step in range(1, 1000):
        target = folder / str(step) / "set"
        source: Source = CopyingSource(folder / "p") if copied else LocalSource(folder / "p")
        killed = killed_at(step, lambda source=source, target=target: run(source, target, options))  # type: ignore[misc]
        check_after_kill(target, wanted(files))
        if not killed:
            assert step > 30
            break
        finish(source, target, wanted(files), options)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kills=st.lists(st.integers(1, 120), min_size=1, max_size=6),
    copied=st.booleans(),
    batch=st.sampled_from([0, 3000, 20_000]),
)
def test_killed_again_and_again(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kills: list[int], copied: bool, batch: int
) -> None:
    folder, rnd = memory_folder(tmp_path_factory.mktemp("w")), random.Random(seed)
    files = some_files(rnd, 14, 5000)
    write_parts(folder / "p", split(honest(files, "pax"), rnd.randrange(1500, 9000)), sums=rnd.random() < 0.5)
    options = ExtractOptions(batch_bytes=batch, block_bytes=rnd.randrange(500, 5000))
    source: Source = CopyingSource(folder / "p", block_bytes=700) if copied else LocalSource(folder / "p")
    for step in kills:
        killed_at(step, lambda: run(source, folder / "set", options))
        check_after_kill(folder / "set", wanted(files))
    finish(source, folder / "set", wanted(files), options)


@pytest.mark.parametrize("copied", [False, True])
def test_finished_parts_are_not_read_again(folder: Path, copied: bool) -> None:
    files = {f"{HOME}{index:02d}": random.Random(index).randbytes(2500) for index in range(20)}
    local = write_parts(folder / "p", split(honest(files), 6000))
    parts = order_parts(local.files())
    for step in (60, 90, 120):
        target = folder / str(step) / "set"
        begin: Source = CopyingSource(folder / "p") if copied else local
        assert killed_at(step, lambda begin=begin, target=target: run(begin, target, STEP_BY_STEP))  # type: ignore[misc]
        journal = Journal.load(target.with_name("set.partial") / "journal.json")
        assert journal and journal.point.offset
        first = parts.index_at(journal.point.offset)
        held = {path.name for path in (target.parent / "parts").glob("*")}
        if copied:
            assert not held & {part.name for part in parts.parts[:first]}
            again: Source = CopyingSource(folder / "p")
            finish(again, target, wanted(files), STEP_BY_STEP)
            assert not set(again.fetched) & {part.name for part in parts.parts[:first]}  # type: ignore[attr-defined]
        else:
            noting = NotingSource(folder / "p")
            finish(noting, target, wanted(files), STEP_BY_STEP)
            assert noting.opened == [part.name for part in parts.parts[first:]]


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
@pytest.mark.parametrize("copied", [False, True])
def test_other_archives_go_on_too(folder: Path, kind: str, copied: bool) -> None:
    """They read from the start again and write only what is missing."""
    files = {f"{HOME}{index:02d}": random.Random(index).randbytes(1500) for index in range(9)}
    archive = gzip.compress(honest(files))
    if kind == "zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as out:
            for name, data in files.items():
                out.writestr(name, data)
        archive = buffer.getvalue()
    write_parts(folder / "p", split(archive, 4000), name=f"libero.{kind}.part-{{:03d}}")
    for step in (*range(20, 140, 12), 1000):
        target = folder / str(step) / "set"
        source: Source = CopyingSource(folder / "p") if copied else LocalSource(folder / "p")
        killed_at(step, lambda source=source, target=target: run(source, target, STEP_BY_STEP))  # type: ignore[misc]
        check_after_kill(target, wanted(files))
        if not target.exists():
            finish(source, target, wanted(files), STEP_BY_STEP)


def test_links_and_folders_survive_too(folder: Path) -> None:
    archive = closed(
        member(HOME + "empty/", flag=b"5"),
        member(HOME + "a/x", b"content"),
        member(HOME + "b/y", flag=b"1", target=HOME.encode() + b"a/x"),
        member(HOME + "b/z", flag=b"2", target=b"../a/x"),
        member(HOME + "c/last", b"1" * 900),
    )
    source = write_parts(folder / "p", split(archive, 1500))
    for step in range(1, 1000):
        target = folder / str(step) / "set"
        killed = killed_at(step, lambda target=target: run(source, target, STEP_BY_STEP))  # type: ignore[misc]
        result = run(source, target, STEP_BY_STEP)
        assert tree(target) == {"a/x": b"content", "b/y": b"content", "b/z": b"content", "c/last": b"1" * 900}
        assert (target / "b/z").is_symlink() and (target / "empty").is_dir() and result.record.files == 4
        assert (target / "b/y").stat().st_nlink == 2
        if not killed:
            break


def test_a_damaged_part_replaced_after_a_kill(folder: Path) -> None:
    """What was read wrongly before the damage showed is not kept, whatever was durable by then."""
    files = {f"{HOME}{index:02d}": random.Random(index).randbytes(1024) for index in range(24)}
    whole = split(honest(files), 512 * 9)  # members of three blocks: every third part begins with a header
    bad = list(whole)
    bad[3], bad[6] = bad[6], bad[3]
    bad[4] = whole[1]
    source = write_parts(folder / "p", bad)
    for step in (70, 100, 1000):
        if not killed_at(step, lambda: _ignore_failure(source, folder / "set")):
            break
    assert not (folder / "set").exists()
    write_parts(folder / "p", whole)
    finish(source, folder / "set", wanted(files), replace(STEP_BY_STEP, writers=0))


def test_waits_for_what_a_killed_run_left_writing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"{HOME}x": b"content"}
    source = write_parts(folder / "p", split(honest(files), 3000))
    (folder / "w").mkdir()
    helper = os.open(folder / "w", os.O_RDONLY)
    fcntl.flock(helper, fcntl.LOCK_EX)
    with monkeypatch.context() as patch:
        patch.setattr("dm05_prep.ledger._GUARD_SECONDS", 0.1)
        with pytest.raises(PrepError, match="another process is writing here"):
            run(source, folder / "w" / "set")
    assert os.listdir(folder / "w") == []
    threading.Timer(0.3, os.close, [helper]).start()
    started = time.monotonic()
    finish(source, folder / "w" / "set", wanted(files), STEP_BY_STEP)
    assert time.monotonic() - started >= 0.25


def test_a_helper_killed_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with an error, and the next one goes on to the same tree."""
    files = {f"{HOME}{index // 50}/{index:03d}": random.Random(index).randbytes(1500) for index in range(600)}
    source = write_parts(folder / "p", split(honest(files), 100_000))
    submit, helpers = _Helper.submit, []

    def kill_third(helper: _Helper, *task: Any) -> None:
        helpers.append(helper)
        if len(helpers) == 3:
            helper._child._process.kill()
            helper._child._process.wait()
        submit(helper, *task)

    monkeypatch.setattr(_Helper, "submit", kill_third)
    with pytest.raises(PrepError, match="killed by signal 9"):
        run(source, folder / "set", WITH_HELPERS)
    assert all(helper._child._process.poll() is not None for helper in helpers)
    finish(source, folder / "set", wanted(files), WITH_HELPERS)


def _ignore_failure(source: Source, target: Path) -> None:
    try:
        run(source, target, STEP_BY_STEP)
    except PrepError:
        pass
