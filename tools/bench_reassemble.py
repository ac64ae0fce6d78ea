"""Reassembly next to ``cat parts | tar -x``: time with checksums on, peak extra disk, memory.

    python tools/bench_reassemble.py                     2 GiB of 30 KB files in parts of 256 MiB
    python tools/bench_reassemble.py --gib 8 --repeats 5 --folder /data/scratch

All read the same parts, in turn, into folders that did not exist. Ours keeps a CRC-32 of every part, or compares the
SHA-256 that a source published, and ends with everything durable on disk; tar checks nothing and leaves the writing to
the system, so the median time with a sync after it is shown too. CPU is what the processes used, without what the
system does for them later (writing to the disk). Then the parts are copied in as a download would bring them, and what
they take on disk is sampled.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from dm05_prep.console import human_bytes
from dm05_prep.durable import disk_bytes, sync_filesystem
from dm05_prep.extract import extract
from dm05_prep.parts import order_parts
from dm05_prep.sources.base import RemoteFile
from dm05_prep.sources.local import LocalSource

INSIDE = ("libero", "libero_pi0_all")
FRAMES = 200
TAR = "cat | tar -x"
CHILD = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from bench_reassemble import extract_local
extract_local(Path(sys.argv[1]), Path.cwd())
"""


class PartWriter:
    """A file object that cuts what is written to it into parts and sums them up."""

    def __init__(self, folder: Path, part_bytes: int) -> None:
        self._folder, self._part_bytes = folder, part_bytes
        self._file: BinaryIO | None = None
        self._left = self._count = 0
        self._sum = hashlib.sha256()
        self.sums: list[str] = []

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            if not self._left:
                self.close()
                self._file = (self._folder / f"libero.tar.part-{self._count:03d}").open("wb")
                self._left, self._sum = self._part_bytes, hashlib.sha256()
                self._count += 1
            assert self._file
            piece = view[: self._left]
            self._file.write(piece)
            self._sum.update(piece)
            self._left -= len(piece)
            view = view[len(piece) :]
        return len(data)

    def close(self) -> None:
        if self._file:
            self._file.close()
            self.sums.append(f"{self._sum.hexdigest()}  {Path(self._file.name).name}\n")
            self._file = None


class CopySource(LocalSource):
    """Copies parts in, as fast as the disk allows; then they are the engine's to delete."""

    def fetch(self, file: RemoteFile, target: Path, *, progress: Callable[[int], None], stop: threading.Event) -> Path:
        with (self.path / file.name).open("rb") as old, target.open("wb") as new:
            while not stop.is_set() and (data := old.read(1 << 20)):
                new.write(data)
                progress(len(data))
        return target


class Sampler:
    """The most that ``value`` was, asked every ``seconds`` by a thread."""

    def __init__(self, value: Callable[[], int], seconds: float) -> None:
        self._value, self._seconds, self._peak = value, seconds, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self._peak = max(self._peak, self._value())

    def stop(self) -> int:
        """End the thread; the peak."""
        self._stop.set()
        self._thread.join()
        return self._peak


def write_parts(folder: Path, total_bytes: int, part_bytes: int) -> int:
    """The archive, with a SHA256SUMS beside its parts; the number of files in it."""
    rnd = random.Random(0)
    noise = rnd.randbytes(4 << 20)
    writer = PartWriter(folder, part_bytes)
    count = written = 0
    with tarfile.open(fileobj=cast(BinaryIO, writer), mode="w|", format=tarfile.USTAR_FORMAT) as tar:
        while written < total_bytes:
            size, start = rnd.randrange(25_000, 35_000), rnd.randrange(3 << 20)
            name = f"{'/'.join(INSIDE)}/image/episode_{count // FRAMES:06d}/camera_0/{count % FRAMES:06d}.jpg"
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(noise[start : start + size]))
            count += 1
            written += size
    writer.close()
    (folder / "SHA256SUMS").write_text("".join(writer.sums))
    return count


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time reassembly against cat and tar."""

    gib: float = 2.0
    """Size of the archive."""
    part_mib: int = 256
    """Size of a part."""
    repeats: int = 3
    """Rounds; each way runs once in each, and each round begins with the next way."""
    folder: Path | None = None
    """Where to work (default: the system's folder for temporary files)."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run.

    Attributes:
        seconds, synced: until the command ended, and until the disk had everything.
        cpu: processor seconds of the command and all its children, user and system.
        memory: most bytes that all its processes together had in memory, shared pages counted for each (RSS).
    """

    seconds: float
    synced: float
    cpu: float
    memory: int


def main(bench: Bench) -> None:
    """Make the parts, run all ways in turn, print a table."""
    with tempfile.TemporaryDirectory(prefix="dm05-bench-", dir=bench.folder) as name:
        folder = Path(name).resolve()
        parts = folder / "parts"
        parts.mkdir()
        count = write_parts(parts, int(bench.gib * (1 << 30)), bench.part_mib << 20)
        size = sum(path.stat().st_size for path in parts.glob("*.part-*"))
        print(f"{count:,} files, {human_bytes(size)} in parts of {bench.part_mib} MiB, parts in the page cache")
        plain = folder / "no sums"
        plain.mkdir()
        for path in parts.glob("*.part-*"):
            (plain / path.name).hardlink_to(path)
        ways = {
            TAR: ["sh", "-c", f"cat {parts}/*.part-* | tar -x"],
            "ours, CRC-32": [sys.executable, "-c", CHILD, str(plain)],
            "ours, SHA-256": [sys.executable, "-c", CHILD, str(parts)],
        }
        runs: dict[str, list[Measured]] = {way: [] for way in ways}
        _run_in_turn(ways, runs, bench.repeats, folder)
        _show(runs)
        _measure_disk(parts, folder / "copied", bench.part_mib << 20)


def _run_in_turn(ways: dict[str, list[str]], runs: dict[str, list[Measured]], rounds: int, folder: Path) -> None:
    """Every round begins with another way, so that what a run leaves to the next one falls on all alike."""
    names = list(ways)
    theirs = folder / f"{TAR} 0"
    for number in range(rounds):
        first = number % len(names)
        for way in names[first:] + names[:first]:
            target = folder / f"{way} {number}"
            runs[way].append(_measure(ways[way], target))
            if target == theirs:
                continue
            if number == 0:
                tree = theirs / "/".join(INSIDE)
                subprocess.run(["diff", "-r", "-x", ".dm05-*", tree, target / INSIDE[-1]], check=True)
            shutil.rmtree(target)
    shutil.rmtree(theirs)


def _show(runs: dict[str, list[Measured]]) -> None:
    print(f"{'':<14} {'best':>6} {'median':>7} {'of tar':>12} {'synced':>7} {'CPU':>6} {'memory':>10}   runs")
    usual = [run.seconds for run in runs[TAR]]
    for way, measured in runs.items():
        seconds = [run.seconds for run in measured]
        best, middle = min(seconds), statistics.median(seconds)
        print(f"{way:<14} {best:5.2f}s {middle:6.2f}s", end=" ")
        print(f"{best / min(usual):5.2f} / {middle / statistics.median(usual):4.2f}", end=" ")
        print(f"{statistics.median(run.synced for run in measured):6.2f}s", end=" ")
        print(f"{statistics.median(run.cpu for run in measured):5.2f}s", end=" ")
        print(f"{human_bytes(max(run.memory for run in measured)):>10}", end="   ")
        print(" ".join(f"{value:.2f}" for value in seconds))


def _measure(command: list[str], target: Path) -> Measured:
    target.mkdir()
    sync_filesystem(target)
    start = time.monotonic()
    child = subprocess.Popen(command, cwd=target)
    memory = Sampler(lambda: memory_of(child.pid), 0.05)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    peak = memory.stop()
    assert child.returncode == 0, command
    sync_filesystem(target)
    synced = time.monotonic() - start
    return Measured(seconds=seconds, synced=synced, cpu=usage.ru_utime + usage.ru_stime, memory=peak)


def memory_of(pid: int) -> int:
    """Bytes that a process and all below it have in memory, what several share counted for each."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                total = int(line.split()[1]) * 1024
        children = [word for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]
    except OSError:  # it has ended
        return total
    return total + sum(memory_of(int(child)) for child in children)


def extract_local(parts: Path, target: Path) -> None:
    """What the measured process does: extract the parts in a folder to ``target``."""
    source = LocalSource(parts)
    ordered = order_parts(source.files())
    result = extract(source, ordered, target / INSIDE[-1], INSIDE, parts_folder=target / "unused")
    kind = "sha256:" if (parts / "SHA256SUMS").exists() else "crc32:"
    assert all(digest and digest.startswith(kind) for *_, digest in result.record.parts)


def _measure_disk(parts: Path, work: Path, part_bytes: int) -> None:
    """Parts copied in and deleted: what they take at most."""
    source = CopySource(parts, owns_parts=True)
    arrived = work / "parts"
    arrived.mkdir(parents=True)
    sampler = Sampler(lambda: sum(disk_bytes(path) for path in arrived.glob("*")), 0.005)
    start = time.monotonic()
    extract(source, order_parts(source.files()), work / INSIDE[-1], INSIDE, parts_folder=arrived)
    seconds, peak = time.monotonic() - start, sampler.stop()
    print(f"parts not kept {seconds:.2f} s with copying them in; they took at most {human_bytes(peak)}, ", end="")
    print(f"{peak / part_bytes:.4f} of a part")
    assert not arrived.exists()


if __name__ == "__main__":
    import tyro  # not needed in the process that is measured

    main(tyro.cli(Bench, description=__doc__))
