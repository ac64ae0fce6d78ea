"""What goes through the pipes between the engine and its helper processes, and the main loop of such a process.

::

    length (4 bytes) | marshalled value

A task is a tuple of arguments. Its answer is any number of integers, which tell how far it is, then a tuple of its
result and None or ``(errno, text, path)``, the error that ended the process.
"""

from __future__ import annotations

import marshal
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # these, or typing itself, take longer to import than all else that a helper begins with
    from collections.abc import Callable
    from typing import Any


def framed(value: Any) -> bytes:
    """A value as it goes through a pipe."""
    data = marshal.dumps(value)
    return struct.pack("<I", len(data)) + data


def read_framed(read: Callable[[int], bytes]) -> Any:
    """The next value, of the bytes that ``read`` gives, as many as it is asked for; EOFError when there are no more."""
    head = read(4)
    if len(head) < 4:
        raise EOFError
    return marshal.loads(read(struct.unpack("<I", head)[0]))


def write_all(file: int, data: bytes) -> None:
    """Write all of ``data``, however much the system takes at once."""
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, memoryview(data)[written:])


def serve(work: Callable[..., Any]) -> None:
    """Answer tasks from stdin with what ``work`` returns, until there are no more, one fails or nobody listens."""
    result = error = None
    try:
        while not error:
            task = read_framed(sys.stdin.buffer.read)
            try:
                result = work(*task)
            except OSError as problem:
                error = problem.errno or 0, problem.strerror or "", str(problem.filename)
            write_all(1, framed((result, error)))
    except (EOFError, BrokenPipeError):
        return
