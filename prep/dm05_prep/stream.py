"""One ordered stream of bytes over the parts of an archive.

Only what is asked for is read: passing over the data of a member costs nothing, wherever it ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from dm05_prep.checksums import Checksums
from dm05_prep.errors import PrepError
from dm05_prep.parts import PartSet

BLOCK_BYTES = 1 << 20
_LEAST_BYTES = 1 << 12  # read at once for a header; more of them may follow closely


class EndOfStreamError(Exception):
    """The stream ended inside what was asked for."""


class ByteStream(Protocol):
    """What the readers of archives read from."""

    @property
    def offset(self) -> int:
        """Bytes consumed so far, from the start of the archive."""
        ...

    @property
    def size(self) -> int | None:
        """Length of the stream, None when it is known only at its end."""
        ...

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer only at the end."""
        ...

    def pieces(self, count: int) -> Iterator[bytes]:
        """The next ``count`` bytes piece by piece; EndOfStreamError when there are fewer."""
        ...

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes; EndOfStreamError when there are fewer."""
        ...

    def where(self, offset: int) -> str:
        """The part and byte of an offset, for messages."""
        ...

    def part_at(self, offset: int) -> str:
        """The name of the part that holds an offset."""
        ...


class PartStream:
    """The bytes of ``parts`` from ``start`` on.

    Args:
        open_part: gives the path of part ``index``, waiting for it to arrive if need be.
        checksums: told of every part as it is opened.
        block_bytes: how much is read at once at most.
    """

    def __init__(
        self,
        parts: PartSet,
        open_part: Callable[[int], Path],
        *,
        start: int = 0,
        checksums: Checksums | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.parts = parts
        self.size: int | None = parts.size
        self._open_part, self._checksums, self._block_bytes = open_part, checksums, block_bytes
        self._data, self._pos = b"", 0
        self._next = start  # offset of the first byte after what is in memory
        self._file, self._path = -1, Path()
        self._start = self._end = start  # of the part that is open

    @property
    def offset(self) -> int:
        """Bytes consumed so far, from the start of the archive."""
        return self._next - len(self._data) + self._pos

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer only at the end."""
        gathered = b""
        while True:
            start, end = self._pos, self._pos + count - len(gathered)
            piece = self._data[start:end]
            self._pos += len(piece)
            gathered = gathered + piece if gathered else piece
            if len(gathered) == count or not self._fill(count - len(gathered)):
                return gathered

    def pieces(self, count: int) -> Iterator[bytes]:
        """The next ``count`` bytes piece by piece; EndOfStreamError when there are fewer."""
        while count:
            piece = self.take(min(count, self._block_bytes))
            if not piece:
                raise EndOfStreamError
            count -= len(piece)
            yield piece

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes; EndOfStreamError when there are fewer."""
        position = self._pos + count
        if position <= len(self._data):
            self._pos = position
            return
        target = self.offset + count
        if target > self.parts.size:
            raise EndOfStreamError
        self._data, self._pos = b"", 0
        while target > self._end:
            self._next = self._end
            self._open_next()
        self._next = target

    def place(self, count: int) -> tuple[Path, int] | None:
        """The file and offset in it where the next ``count`` bytes are, None when they are not all in one part."""
        offset = self.offset
        if offset < self._start or offset + count > self._end or self._file < 0:
            return None
        return self._path, offset - self._start

    def where(self, offset: int) -> str:
        """The part and byte of an offset, for messages."""
        return self.parts.where(offset)

    def part_at(self, offset: int) -> str:
        """The name of the part that holds an offset."""
        return self.parts.parts[self.parts.index_at(offset)].name

    def close(self) -> None:
        """Give back the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _fill(self, count: int) -> bool:
        """Read on, about ``count`` bytes; False at the end of the last part. Only called when the data is used up."""
        if self._next == self._end and not self._open_next():
            return False
        count = min(max(count, _LEAST_BYTES), self._block_bytes, self._end - self._next)
        try:
            data = os.pread(self._file, count, self._next - self._start)
        except OSError as error:
            raise PrepError(f"cannot be read: {error.strerror}", where=self.where(self._next)) from error
        if not data:
            raise PrepError("the file ends here", where=self.where(self._next), fix="It changed while it was read")
        self._next += len(data)
        self._data, self._pos = data, 0
        return True

    def _open_next(self) -> bool:
        """Open the part that holds the next byte."""
        self.close()
        if self._next == self.parts.size:
            return False
        index = self.parts.index_at(self._next)
        part = self.parts.parts[index]
        self._path = self._open_part(index)
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._start, self._end = part.start, part.end
        size = os.fstat(self._file).st_size
        if size != part.file.size:
            raise PrepError(
                f"has {size} bytes instead of {part.file.size}",
                where=self._path,
                fix="It changed since the start; run again",
            )
        if self._checksums:
            self._checksums.begin(index, self._path)
        return True
