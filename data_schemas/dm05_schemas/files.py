"""Publishing a file: written under a temporary name beside it, then renamed; and the syncing and locking it takes."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def expanded(path: Path | str) -> Path:
    """``~`` replaced; left as it is for a user without a home folder, where pathlib raises."""
    return Path(os.path.expanduser(path))


def cache_home() -> Path:
    """$XDG_CACHE_HOME, else ~/.cache; below the temporary folder for a user without a home folder, as in containers."""
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        home = f"{tempfile.gettempdir()}/dm05-{os.getuid()}"
    return Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block that names no file (a full disk) then names ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Make ``path`` hold ``data``, whole or not at all; a symlink's target is replaced, permissions are kept.

    Raises:
        OSError: the folder cannot be written or the disk is full; nothing is left behind.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:80]}.{secrets.token_hex(6)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with naming(target), os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_path(path: Path) -> None:
    """Have the bytes of a file, or the names in a folder, on the disk before returning."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether another holds the lock of a folder; True as well where that cannot be told."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, where its file system has locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
