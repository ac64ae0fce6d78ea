"""Archives for tests: honest ones through tarfile, hostile ones header by header; parts on disk; trees as dicts."""

from __future__ import annotations

import atexit
import hashlib
import io
import itertools
import os
import random
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dm05_prep.extract import Extracted, ExtractOptions, extract
from dm05_prep.parts import PartSet, order_parts
from dm05_prep.sources.base import RemoteFile, Source
from dm05_prep.sources.local import LocalSource

SUBSET = ("libero", "libero_pi0_all")
HOME = "libero/libero_pi0_all/"
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def header(
    name: bytes,
    size: int = 0,
    flag: bytes = b"0",
    *,
    target: bytes = b"",
    raw_size: bytes | None = None,
    prefix: bytes = b"",
) -> bytes:
    """One ustar header block with a right checksum, whatever it says."""
    block = bytearray(512)
    block[0 : len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0001750\0", b"0001750\0"
    block[124:136] = raw_size if raw_size is not None else b"%011o\0" % size
    block[136:148] = b"%011o\0" % 1_700_000_000
    block[148:156] = b" " * 8
    block[156:157] = flag
    block[157 : 157 + len(target)] = target
    block[257:265] = b"ustar\x0000"
    block[345 : 345 + len(prefix)] = prefix
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str | bytes, data: bytes = b"", flag: bytes = b"0", **more: bytes) -> bytes:
    """A whole member: header, data, padding."""
    raw = name.encode() if isinstance(name, str) else name
    return header(raw, len(data), flag, **more) + data + bytes(-len(data) % 512)  # type: ignore[arg-type]


def closed(*members: bytes, record: int = 10240) -> bytes:
    """Members and an end mark, padded to a record."""
    body = b"".join(members) + bytes(1024)
    return body + bytes(-len(body) % record)


def honest(files: dict[str, bytes], form: str = "ustar", folders: bool = True) -> bytes:
    """A tar of ``files`` as a well-behaved tool writes it."""
    buffer = io.BytesIO()
    made: set[str] = set()
    with tarfile.open(fileobj=buffer, mode="w", format=FORMATS[form]) as tar:
        for name, data in files.items():
            for end in [index for index, letter in enumerate(name) if letter == "/"] if folders else []:
                if name[:end] not in made:
                    made.add(name[:end])
                    info = tarfile.TarInfo(name[:end])
                    info.type = tarfile.DIRTYPE
                    tar.addfile(info)
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.uid = len(data), 0o4777, 12345
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def split(archive: bytes, size: int) -> list[bytes]:
    """Parts of ``size`` bytes, the last one shorter."""
    return [archive[start : start + size] for start in range(0, len(archive), size)]


def write_parts(
    folder: Path, parts: list[bytes], *, sums: bool = False, name: str = "libero.tar.part-{:03d}"
) -> LocalSource:
    """Put parts into a new folder; ``sums`` publishes their SHA-256."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index, data in enumerate(parts):
        path = folder / name.format(index)
        path.write_bytes(data)
        lines.append(f"{hashlib.sha256(data).hexdigest()}  {path.name}\n")
    if sums:
        (folder / "SHA256SUMS").write_text("".join(lines))
    return LocalSource(folder)


def run(source: Source, target: Path, options: ExtractOptions | None = None) -> Extracted:
    """The engine on the parts of a folder."""
    parts = order_parts(source.files(), place=source.description)
    return extract(source, parts, target, SUBSET, parts_folder=target.parent / "parts", options=options)


def parts_of(source: LocalSource) -> PartSet:
    """The ordered parts of a folder."""
    return order_parts(source.files(), place=source.description)


def tree(folder: Path) -> dict[str, bytes]:
    """path -> content of every file below ``folder``, but for the tool's own record."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".dm05-")
    }


def wanted(files: dict[str, bytes]) -> dict[str, bytes]:
    """What of ``files`` belongs to the dataset, by its path in it."""
    return {name[len(HOME) :]: data for name, data in sorted(files.items()) if name.startswith(HOME)}


def some_files(rnd: random.Random, count: int = 12, largest: int = 6000) -> dict[str, bytes]:
    """Episodes of the wanted and another subset, mixed, with a few long and Chinese names."""
    files = {}
    for index in range(count):
        home = HOME if rnd.random() < 0.7 or index == 0 else "libero/libero_goal/"
        episode = rnd.choice(["e0", "e1", "任务一"]) if rnd.random() < 0.3 else f"episode_{index // 4}"
        long = "x" * rnd.choice([1, 90, 130]) if rnd.random() < 0.15 else ""
        size = rnd.choice([0, 1, 511, 512, 513, rnd.randrange(largest)])
        files[f"{home}image/{episode}/{long}{index:04d}.jpg"] = rnd.randbytes(size)
    return files


@dataclass(frozen=True)
class CopyingSource:
    """A source whose parts have to be fetched: copies them from a folder, block by block, and notes which."""

    folder: Path
    fetched: list[str] = field(default_factory=list)
    block_bytes: int = 1 << 16
    owns_parts: bool = True

    @property
    def description(self) -> str:
        return f"copies of {self.folder}"

    def files(self) -> list[RemoteFile]:
        return LocalSource(self.folder).files()

    def fetch(self, file: RemoteFile, target: Path, *, progress: Callable[[int], None], stop: threading.Event) -> Path:
        if target.exists():
            return target
        self.fetched.append(file.name)
        unfinished = target.with_name(target.name + ".part")
        with (self.folder / file.name).open("rb") as old, unfinished.open("wb") as new:
            while data := old.read(self.block_bytes):
                new.write(data)
                new.flush()
                progress(len(data))
                if stop.is_set():
                    return target
        os.replace(unfinished, target)
        return target


def killed_at(event: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in a process that is killed at its ``event``-th step on the disk; False when it got through."""
    steps = {
        "open",
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.truncate",
        "os.link",
        "os.symlink",
        "os.listdir",
    }
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    try:
        counter = itertools.count(1)

        def hook(name: str, arguments: object) -> None:
            if name in steps and next(counter) == event:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def memory_folder(fallback: Path, needed_bytes: int = 48 << 20) -> Path:
    """A new folder in memory where the system has such, for tests that make everything durable at every step."""
    shared = Path("/dev/shm")
    if not (shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > needed_bytes):
        return fallback
    folder = Path(tempfile.mkdtemp(prefix="dm05-test-", dir=shared))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
