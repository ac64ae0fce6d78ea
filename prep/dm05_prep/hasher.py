"""The checksum of a file; also runs as a process of its own, since a thread would take turns with the interpreter.

As a process it is ``python hasher.py``: tasks come in on stdin, each a length (4 bytes) and a marshalled
``(algorithm, path)``; now and then the number of bytes summed so far goes out (8 bytes), and at the end of a file
eight bytes of ones and, in the framing of the tasks, ``(digest, errno, text)``. It needs nothing but the standard
library.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import struct
import sys
import zlib
from collections.abc import Callable

END = b"\xff" * 8
STEP_BYTES = 8 << 20
_READ_BYTES = 1 << 20


def sum_file(algorithm: str, path: str, keep_on: Callable[[int], bool]) -> str:
    """The ``algorithm`` ("crc32", or a name of hashlib) of a file in lower-case hex.

    Args:
        keep_on: told the bytes summed so far every ``STEP_BYTES``; "" is returned when it says no.
    """
    crc, digest = 0, None if algorithm == "crc32" else hashlib.new(algorithm, usedforsecurity=False)
    buffer = memoryview(bytearray(_READ_BYTES))
    done = told = 0
    with open(path, "rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := file.readinto(buffer):
            if digest:
                digest.update(buffer[:count])
            else:
                crc = zlib.crc32(buffer[:count], crc)
            done += count
            if done - told >= STEP_BYTES:
                told = done
                if not keep_on(done):
                    return ""
    return digest.hexdigest() if digest else f"{crc:08x}"


def main() -> None:
    """Work until stdin ends or the parent process is gone."""
    parent, tasks = os.getppid(), sys.stdin.buffer

    def keep_on(done: int) -> bool:
        os.write(1, struct.pack("<Q", done))
        return os.getppid() == parent

    while len(head := tasks.read(4)) == 4:
        algorithm, path = marshal.loads(tasks.read(struct.unpack("<I", head)[0]))
        try:
            answer = sum_file(algorithm, path, keep_on), 0, ""
        except BrokenPipeError:
            return
        except OSError as error:
            answer = "", error.errno or 0, error.strerror or ""
        data = marshal.dumps(answer)
        os.write(1, END + struct.pack("<I", len(data)) + data)


if __name__ == "__main__":
    main()
