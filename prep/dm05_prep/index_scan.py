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
from dm05_schemas.episode_lines import blank_line, foreign_encoding, too_few_frames
from dm05_schemas.errors import DataError
from dm05_schemas.findings import finding
from dm05_schemas.index import EpisodeEntry

_NEWLINE, _BRACE = 10, 123


class Counted(NamedTuple):
    """What the bytes of one episode file say: frames, size in bytes, CRC-32C."""

    frames: int
    size: int
    crc32c: int


class FileCounter:
    """Counts files one after the other in the same memory; new memory for each would cost more than the counting."""

    def __init__(self, size: int = 1 << 20) -> None:
        self._grow(size)

    def count(self, path: str) -> EpisodeEntry:
        """The index entry of one file.

        Raises:
            DataError: as :func:`count_bytes`, or the file changed while it was read.
        """
        handle = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(handle)
            if len(self._buffer) <= status.st_size:
                self._grow(status.st_size + 1)
            view = memoryview(self._buffer)
            size = os.readv(handle, [view])
            while size < status.st_size and (read := os.readv(handle, [view[size:]])):
                size += read
        finally:
            os.close(handle)
        if size != status.st_size:
            raise DataError("changed while it was read", where=path, fix="Run the command again")
        frames, _, checksum = self.count_bytes(view[:size], path)
        return EpisodeEntry(frames, size, status.st_mtime_ns, checksum)

    def count_bytes(self, view: memoryview, path: Path | str) -> Counted:
        """See :func:`count_bytes`."""
        array = np.frombuffer(view, dtype=np.uint8)
        size = len(array)
        if size > len(self._newline):
            self._grow(size)
        newline, brace = self._newline[:size], self._brace[: max(size - 1, 0)]
        np.equal(array, _NEWLINE, out=newline)
        frames = int(np.count_nonzero(newline))
        plain = frames > 1 and array[0] == _BRACE and array[-1] == _NEWLINE
        if plain:
            np.equal(array[1:], _BRACE, out=brace)
            np.logical_and(brace, newline[:-1], out=brace)
            plain = np.count_nonzero(brace) == frames - 1
        return Counted(frames if plain else _count_carefully(bytes(view), path), size, crc32c.crc32c(view))

    def _grow(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._newline, self._brace = np.empty((2, size), dtype=np.bool_)


def count_bytes(data: bytes | bytearray | memoryview, path: Path | str) -> Counted:
    """Frames, size and checksum of the bytes of an episode file; ``path`` names it in errors.

    Raises:
        DataError: no frames, one frame, a blank line or UTF-16, with file and line.
    """
    return FileCounter(len(data)).count_bytes(memoryview(data), path)


def count_files(paths: Sequence[str]) -> list[EpisodeEntry]:
    """Index entries of episode files; errors as those of :meth:`FileCounter.count`."""
    counter = FileCounter()
    return [counter.count(path) for path in paths]


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
        if b"\r" in line.removesuffix(b"\r") and len(lines) == 1:  # old Mac line ends: not one frame
            raise finding("lone-cr", path, number, "carriage return without line feed").error()
    for found in too_few_frames(path, len(lines)):
        raise found.error()
    return len(lines)
