"""Parts that arrive while others are read: in order, within the disk that one part takes, gone when done."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from dm05_prep.durable import disk_bytes, free_start, keep_tail
from dm05_prep.errors import PrepError
from dm05_prep.extract import ExtractOptions
from dm05_prep.prefetch import READING, Fetcher
from dm05_prep.sources.base import RemoteFile
from tars import HOME, CopyingSource, honest, memory_folder, parts_of, run, split, tree, wanted, write_parts

PART_BYTES = 4 << 20
FILES = {f"{HOME}image/e/{index:04d}.jpg": random.Random(index).randbytes(60_000) for index in range(420)}


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    made = memory_folder(tmp_path, 128 << 20)
    yield made
    if made != tmp_path:
        shutil.rmtree(made)


@dataclass(frozen=True)
class FailingSource(CopyingSource):
    """Loses its connection at one part."""

    fails_at: str = ""

    def fetch(self, file: RemoteFile, target: Path, *, progress: Callable[[int], None], stop: threading.Event) -> Path:
        if file.name == self.fails_at:
            raise PrepError("connection lost", where=file.name)
        return super().fetch(file, target, progress=progress, stop=stop)


class Watch:
    """Samples what a folder takes on disk, until left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peak, self._stop = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, sum(disk_bytes(path) for path in self.folder.glob("*")))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def test_at_most_one_part_on_disk(tmp_path: Path) -> None:
    """However fast parts arrive: one part, and the rest of the member on the border (and a page or two)."""
    write_parts(tmp_path / "p", split(honest(FILES), PART_BYTES))
    source = CopyingSource(tmp_path / "p")
    with Watch(tmp_path / "parts") as watch:
        result = run(source, tmp_path / "set", ExtractOptions(batch_bytes=1 << 20))
    slack = 60_000 + 4 * (1 << 16)
    assert PART_BYTES <= watch.peak <= PART_BYTES + slack
    assert PART_BYTES <= result.peak_part_bytes <= PART_BYTES + slack
    assert tree(tmp_path / "set") == wanted(FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "set"]


def test_kept_parts_stay_whole(tmp_path: Path) -> None:
    write_parts(tmp_path / "p", split(honest(FILES), PART_BYTES))
    source = CopyingSource(tmp_path / "p")
    run(source, tmp_path / "set", ExtractOptions(keep_parts=True))
    assert tree(tmp_path / "parts") == tree(tmp_path / "p")
    fetched = list(source.fetched)
    run(source, tmp_path / "again", ExtractOptions(keep_parts=True))
    assert source.fetched == fetched and tree(tmp_path / "again") == wanted(FILES)


def test_parts_of_an_earlier_run_are_used(tmp_path: Path) -> None:
    parts = split(honest(FILES), PART_BYTES)
    write_parts(tmp_path / "p", parts)
    write_parts(tmp_path / "parts", parts[:2])
    source = CopyingSource(tmp_path / "p")
    run(source, tmp_path / "set")
    assert source.fetched == [f"libero.tar.part-{index:03d}" for index in range(2, len(parts))]
    assert not (tmp_path / "parts").exists()


def test_a_source_that_fails_leaves_the_work_done(tmp_path: Path) -> None:
    parts = split(honest(FILES), PART_BYTES)
    write_parts(tmp_path / "p", parts)
    failing = FailingSource(tmp_path / "p", fails_at="libero.tar.part-003")
    with pytest.raises(PrepError, match="connection lost"):
        run(failing, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    source = CopyingSource(tmp_path / "p")
    result = run(source, tmp_path / "set")
    assert result.resumed_at > 2 * PART_BYTES
    assert not {"libero.tar.part-000", "libero.tar.part-001"} & set(source.fetched)
    assert tree(tmp_path / "set") == wanted(FILES)


def test_later_parts_arrive_while_the_first_is_read(tmp_path: Path) -> None:
    write_parts(tmp_path / "p", split(bytes(5 << 20), 1 << 20))
    source = CopyingSource(tmp_path / "p")
    parts = parts_of(source)
    fetcher = Fetcher(source, parts, tmp_path / "parts", keep=False)
    try:
        assert fetcher.path(0).name == "libero.tar.part-000" + READING
        time.sleep(0.3)
        assert source.fetched == ["libero.tar.part-000", "libero.tar.part-001"]
        assert fetcher.peak_bytes <= (1 << 20) + source.block_bytes
        fetcher.free(1 << 20)
        assert fetcher.path(1).stat().st_size == 1 << 20
        assert not (tmp_path / "parts/libero.tar.part-000.reading").exists()
    finally:
        fetcher.close()


def test_begun_parts_without_a_journal_are_whole_or_dropped(tmp_path: Path) -> None:
    data = [random.Random(index).randbytes(1 << 20) for index in range(3)]
    write_parts(tmp_path / "p", data)
    source = CopyingSource(tmp_path / "p")
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "libero.tar.part-000.reading").write_bytes(data[0])
    (folder / "libero.tar.part-001.reading").write_bytes(data[1])
    assert free_start(folder / "libero.tar.part-001.reading", 1 << 19)
    fetcher = Fetcher(source, parts_of(source), folder, keep=True)
    try:
        assert [fetcher.path(index).read_bytes() for index in range(3)] == data
        assert source.fetched == ["libero.tar.part-001", "libero.tar.part-002"]
    finally:
        fetcher.close()


def test_giving_back_the_start_of_a_file(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(1 << 20)
    for name, give_back in (("holes", free_start), ("copy", keep_tail)):
        path = tmp_path / name
        path.write_bytes(data)
        give_back(path, 900_000 // 4096 * 4096)
        kept = path.read_bytes()
        assert len(kept) == len(data) and kept[900_000:] == data[900_000:] and not any(kept[:800_000])
        assert disk_bytes(path) < 200_000
