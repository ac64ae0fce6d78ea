"""Making what was written survive a power cut, and giving disk space back early."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from dm05_schemas.files import naming, replace_file, sync_path

_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_LIBC = ctypes.CDLL(None, use_errno=True)


def write_durable(path: Path, data: bytes) -> None:
    """Replace a file, and have its name too on the disk before returning."""
    replace_file(path, data)
    sync_path(path.parent)


def sync_filesystem(folder: Path) -> None:
    """Make everything written so far to the filesystem of ``folder`` durable."""
    if not hasattr(_LIBC, "syncfs"):
        os.sync()
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _LIBC.syncfs(handle):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(handle)


def free_start(path: Path, length: int) -> bool:
    """Give back the disk space of the first ``length`` bytes of a file and keep its size; False if impossible."""
    if not hasattr(_LIBC, "fallocate64"):
        return False
    handle = os.open(path, os.O_RDWR)
    try:
        call = _LIBC.fallocate64
        return not call(handle, _KEEP_SIZE_AND_PUNCH, ctypes.c_int64(0), ctypes.c_int64(length))
    finally:
        os.close(handle)


def keep_tail(path: Path, start: int) -> None:
    """Replace a file by a sparse one of the same size that holds only the bytes from ``start`` on."""
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(temporary), path.open("rb") as old, temporary.open("wb") as new:
        size = os.fstat(old.fileno()).st_size
        old.seek(start)
        new.seek(start)
        while data := old.read(1 << 20):
            new.write(data)
        new.truncate(size)
        new.flush()
        os.fsync(new.fileno())
    os.replace(temporary, path)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, each of which is in the next, up to the first that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def disk_bytes(path: Path) -> int:
    """What a file takes on disk, at most its size; 0 when there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0
    return min(stat.st_size, stat.st_blocks * 512)
