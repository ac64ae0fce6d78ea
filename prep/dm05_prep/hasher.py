"""Checksums of bytes and of files; also a process of its own, since a thread would take turns with the interpreter.

As a process it takes tasks ``(algorithm, path)``, tells the bytes summed so far, and answers with the digest.
"""

from __future__ import annotations

import hashlib
import os
import zlib

from dm05_prep.pipe import TYPE_CHECKING, framed, serve, write_all

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 1 << 20
_STEP_BYTES = 8 << 20


class _Hash:
    def __init__(self, name: str, prefix: bytes = b"") -> None:
        self._hash = hashlib.new(name, prefix, usedforsecurity=False)

    def update(self, data: memoryview) -> None:
        self._hash.update(data)

    def value(self) -> str | int:
        return self._hash.hexdigest()


class _Crc:
    def __init__(self, step: Callable[[memoryview, int], int]) -> None:
        self._step, self._crc = step, 0

    def update(self, data: memoryview) -> None:
        self._crc = self._step(data, self._crc)

    def value(self) -> str | int:
        return self._crc & 0xFFFFFFFF


def _crc32c(_size: int) -> _Crc:
    import crc32c

    return _Crc(crc32c.crc32c)


# name -> makes the running sum of a file of so many bytes
SUMS: dict[str, Callable[[int], _Hash | _Crc]] = {
    "sha256": lambda _size: _Hash("sha256"),
    "md5": lambda _size: _Hash("md5"),
    "git_sha1": lambda size: _Hash("sha1", b"blob %d\0" % size),
    "crc32": lambda _size: _Crc(zlib.crc32),
    "crc32c": _crc32c,
}


def read_file(path: str, take: Callable[[memoryview], None], keep_on: Callable[[int], bool]) -> bool:
    """Give ``take`` the bytes of a file in order.

    Args:
        keep_on: told the bytes given so far every few MiB and at the end; False is returned when it says no.
    """
    buffer = memoryview(bytearray(READ_BYTES))
    done = told = 0
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            take(buffer[:count])
            done += count
            if done - told >= _STEP_BYTES:
                told = done
                if not keep_on(done):
                    return False
    return keep_on(done)


def sum_file(algorithm: str, path: str, keep_on: Callable[[int], bool]) -> str:
    """The ``algorithm``, of ``SUMS``, of a file in lower-case hex; "" when ``keep_on`` says no to :func:`read_file`."""
    sums = SUMS[algorithm](os.path.getsize(path))
    if not read_file(path, sums.update, keep_on):
        return ""
    value = sums.value()
    return value if isinstance(value, str) else f"{value:08x}"


def main() -> None:
    """Work until there are no more tasks or the parent process is gone."""
    parent = os.getppid()

    def tell(done: int) -> bool:
        write_all(1, framed(done))
        return os.getppid() == parent

    serve(lambda algorithm, path: sum_file(algorithm, path, tell))
