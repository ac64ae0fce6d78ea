"""Counting the frames of episode files at the speed of reading them.

Newlines are counted over bytes. A file in which every line starts with ``{`` has no blank lines, so its newlines are
its frames; any other is looked at line by line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import crc32c
import numpy as np
from dm05_schemas.episode import blank_line, foreign_encoding, too_few_frames
from dm05_schemas.errors import DataError
from dm05_schemas.findings import finding
from dm05_schemas.index import EpisodeEntry

_NEWLINE, _BRACE = 10, 123


class Counted(NamedTuple):
    """What the bytes of one episode file say: frames, size in bytes, CRC-32C."""

    frames: int
    size: int
    crc32c: int


def count_bytes(data: bytes | bytearray | memoryview, path: Path | str) -> Counted:
    """Frames, size and checksum of the bytes of an episode file; ``path`` names it in errors.

    Raises:
        DataError: no frames, one frame, a blank line or UTF-16, with file and line.
    """
    view = memoryview(data)
    array = np.frombuffer(view, dtype=np.uint8)
    ends = np.flatnonzero(array == _NEWLINE)
    frames = len(ends)
    plain = frames > 1 and array[0] == _BRACE and ends[-1] == len(array) - 1
    if not plain or (array[ends[:-1] + 1] != _BRACE).any():
        frames = _count_carefully(bytes(view), path)
    return Counted(frames, len(array), crc32c.crc32c(view))


def count_files(paths: Sequence[str]) -> list[EpisodeEntry]:
    """Index entries of episode files.

    Raises:
        DataError: as :func:`count_bytes`, or a file changed while it was read.
    """
    buffer = bytearray(1 << 20)
    return [_count_file(path, buffer) for path in paths]


def _count_file(path: str, buffer: bytearray) -> EpisodeEntry:
    handle = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(handle)
        if len(buffer) <= status.st_size:
            buffer.extend(bytes(status.st_size + 1 - len(buffer)))
        view = memoryview(buffer)
        size = os.readv(handle, [view])
        while size < status.st_size and (read := os.readv(handle, [view[size:]])):
            size += read
    finally:
        os.close(handle)
    if size != status.st_size:
        raise DataError("changed while it was read", where=path, fix="Run the command again")
    frames, _, checksum = count_bytes(view[:size], path)
    view.release()
    return EpisodeEntry(frames, size, status.st_mtime_ns, checksum)


def _count_carefully(data: bytes, path: Path | str) -> int:
    encoding = foreign_encoding(data)
    if encoding:
        raise finding("utf16", path, None, f"is {encoding}, not UTF-8").error()
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        blank = blank_line(line.removesuffix(b"\r"))
        if blank:
            raise finding("blank-line", path, number, blank).error()
    for found in too_few_frames(path, len(lines)):
        raise found.error()
    return len(lines)
