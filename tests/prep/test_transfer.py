"""The transfer loop as a whole: killed and continued, held back, bounded, and alone on its file."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources import carry, partfile, streams
from dm05_prep.sources.checks import Checks
from dm05_prep.sources.partfile import SPAN_BYTES, PartFile
from places import PART, Place, fetch, make_place, random_bytes, ranges

pytestmark = pytest.mark.usefixtures("quiet_environment")

PROGRAM = Path(__file__).with_name("fetch_parts.py")
PARTS = ("libero.tar.part-000", "libero.tar.part-001", "libero.tar.part-002")
PART_SIZE = SPAN_BYTES + (4 << 20) + 17


@pytest.fixture(params=["bos", "hf"])
def place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    service, root = hub_process if request.param == "hf" else bos_process
    return make_place(request.param, service, root, monkeypatch)


@pytest.fixture
def bos_place(bos_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place("bos", *bos_process, monkeypatch)


def start(place: Place, folder: Path, jobs: int = 6) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), "hf" if place.kind == "hf" else "bos", place.uri, place.service.url]
    return subprocess.Popen([*command, str(folder), str(jobs)], stdout=subprocess.PIPE, text=True)


def arrived(folder: Path) -> dict[str, list[int]]:
    """What the state files say about each part that is on its way."""
    found = {}
    for name in PARTS:
        try:
            found[name] = json.loads((folder / f"{name}.part.json").read_text())["done"]
        except FileNotFoundError:
            pass
    return found


def test_killed_again_and_again_no_finished_byte_comes_twice(place: Place, tmp_path: Path) -> None:
    contents = {name: place.put(random_bytes(PART_SIZE), name) for name in PARTS}
    folder = tmp_path / "parts"
    place.service.order(rate=4_000_000)
    kept = dict.fromkeys(PARTS, 0)
    for _ in range(3):
        place.service.order(forget=True)
        child = start(place, folder)
        begun = sum(kept.values())
        while sum(map(sum, arrived(folder).values())) <= begun + 2_000_000 and child.poll() is None:
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.2))
        child.send_signal(signal.SIGKILL)
        child.wait()
        check_no_overlap(place, kept)
        kept = {name: sum(done) for name, done in arrived(folder).items()}
        assert len(kept) == 3 and all(0 < count < PART_SIZE for count in kept.values())
    place.service.order(rate=0, forget=True)
    child = start(place, folder)
    assert child.wait() == 0
    for name, data in contents.items():
        assert (folder / name).read_bytes() == data
        assert place.service.sent(name) == PART_SIZE - kept[name], "no finished byte is asked for again"
    assert sorted(path.name for path in folder.iterdir()) == sorted(PARTS)


def check_no_overlap(place: Place, kept: dict[str, int]) -> None:
    """No run asks for more than what was missing at its start."""
    for name, count in kept.items():
        asked = [request for request in place.service.requests(name) if request["status"] in (200, 206)]
        assert sum(last - first + 1 for first, last in ranges(asked)) <= PART_SIZE - count


def test_memory_stays_small(bos_place: Place, tmp_path: Path) -> None:
    for name in PARTS:
        bos_place.put(random_bytes(3 * SPAN_BYTES), name)
    child = start(bos_place, tmp_path / "parts", jobs=16)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert int(output) < 300


def test_a_progress_that_blocks_holds_the_transfer_back(place: Place, tmp_path: Path, monkeypatch: Any) -> None:
    """The engine keeps the disk from filling by blocking there."""
    monkeypatch.setattr(streams, "UNREPORTED_BYTES", 1 << 20)
    size = 3 * SPAN_BYTES
    place.put(random_bytes(size))
    gate, entered = threading.Event(), threading.Event()

    def progress(count: int) -> None:
        entered.set()
        gate.wait(10)

    thread = threading.Thread(target=lambda: fetch(place.open(), tmp_path / PART, progress=progress))
    thread.start()
    entered.wait(10)
    time.sleep(0.7)
    held = sum(json.loads((tmp_path / f"{PART}.part.json").read_text())["done"])
    gate.set()
    thread.join(20)
    assert held < (1 << 20) + 12 * carry.BUFFER_BYTES
    assert (tmp_path / PART).stat().st_size == size


@pytest.mark.parametrize("side", ["socket", "file", "none"])
def test_a_system_that_cannot_splice(place: Place, tmp_path: Path, monkeypatch: Any, side: str) -> None:
    """Some sandboxes and filesystems refuse it: then the bytes are read and written."""
    real, refused = os.splice, []

    def splice(source: int, target: int, count: int, **offsets: Any) -> int:
        if side == ("file" if offsets else "socket"):
            refused.append(count)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(source, target, count, **offsets)

    monkeypatch.setattr(os, "splice", splice)
    data = place.put(random_bytes(2 * SPAN_BYTES + 12345))
    assert fetch(place.open(), tmp_path / PART).read_bytes() == data
    assert bool(refused) == (side != "none")


def test_no_more_connections_than_jobs(place: Place, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(partfile, "SPAN_BYTES", 64 << 10)
    place.put(random_bytes(2 << 20))
    place.service.order(rate=1_000_000)
    fetch(place.open(jobs=3), tmp_path / PART)
    hosts = {request["client"] for request in place.body_requests()}
    assert 2 <= len(hosts) <= 3, "kept connections, shared by all requests"


def test_files_of_any_small_size(place: Place, tmp_path: Path) -> None:
    source_files = {f"f{size}": place.put(random_bytes(size), f"f{size}") for size in (0, 1, 2, 1023, 1024, 65537)}
    source = place.open()
    for name, data in source_files.items():
        assert fetch(source, tmp_path / name, name).read_bytes() == data


def test_a_file_that_is_there_is_verified_not_fetched(place: Place, tmp_path: Path) -> None:
    data = place.put(random_bytes(100_000))
    target = tmp_path / PART
    target.write_bytes(data)
    seen: list[int] = []
    fetch(place.open(), target, progress=seen.append)
    assert place.service.sent(PART) == 0 and sum(seen) == len(data)
    target.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    fetch(place.open(), target)
    assert target.read_bytes() == data


def test_two_runs_on_one_file(bos_place: Place, tmp_path: Path) -> None:
    bos_place.put(random_bytes(100))
    holder = PartFile(tmp_path / PART, 100, Checks(), None)
    try:
        with pytest.raises(PrepError, match="another run is fetching it"):
            fetch(bos_place.open(), tmp_path / PART)
    finally:
        holder.close()
    fetch(bos_place.open(), tmp_path / PART)


def test_an_error_of_the_caller_ends_the_transfer(place: Place, tmp_path: Path) -> None:
    place.put(random_bytes(2 << 20))

    def progress(count: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        fetch(place.open(), tmp_path / PART, progress=progress)
    assert threading.active_count() == before
    assert (tmp_path / f"{PART}.part").exists()
    fetch(place.open(), tmp_path / PART)


SMALL_DISK = """
mount -t tmpfs -o size=3m none "$1" && shift && exec "$@"
"""


def test_a_full_disk_keeps_what_is_there(bos_place: Place, tmp_path: Path) -> None:
    """A real small filesystem, where another file takes the space while the download runs."""
    shell = ["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", str(tmp_path)]
    try:
        if subprocess.run([*shell, "true"], capture_output=True).returncode:
            pytest.skip("cannot mount a small filesystem here")
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    bos_place.put(random_bytes(2_500_000))
    program = """
import sys, threading
from pathlib import Path
from dm05_prep.errors import PrepError
from dm05_prep.sources import SourceOptions, open_source
uri, endpoint, folder = sys.argv[1:]
source = open_source("bos", uri, kind="dataset", jobs=1, options=SourceOptions(endpoint=endpoint))
file, target, filler = source.files()[0], Path(folder) / "f", Path(folder) / "filler"
def progress(count):
    if not filler.exists():
        filler.write_bytes(bytes(2_000_000))
try:
    source.fetch(file, target, progress=progress, stop=threading.Event())
except PrepError as error:
    print(error)
filler.unlink()
kept = Path(folder, "f.part").exists()
source.fetch(file, target, progress=lambda count: None, stop=threading.Event())
print(kept, target.stat().st_size)
"""
    bos_place.service.order(rate=1_000_000)
    command = [*shell, sys.executable, "-c", program, bos_place.uri, bos_place.service.url, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no space left" in done.stdout and "it goes on" in done.stdout
    assert done.stdout.split()[-2:] == ["True", "2500000"]
    assert bos_place.service.sent(PART) < 2 * 2_500_000
