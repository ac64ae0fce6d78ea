"""One ordered stream of bytes over the parts of an archive, with a checksum of each part taken on the way.

Blocks are read into fresh ``bytes`` objects and handed out as views, so that writers in other threads can hold them for
as long as they need. A second thread computes the checksums. What is skipped is not read at all when it is long and no
published checksum has to be compared.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dm05_prep.errors import PrepError
from dm05_prep.parts import PartSet
from dm05_prep.sources.base import RemoteFile

BLOCK_BYTES = 1 << 20
SEEK_BYTES = 4 << 20  # shorter gaps are read through: that keeps the kernel's read-ahead going
_MAX_BACKLOG = 8


class EndOfStreamError(Exception):
    """The stream ended inside what was asked for."""


class PartMismatchError(PrepError):
    """Part ``index`` is not what the source published; ``digest`` is what it has."""

    index: int
    digest: str


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

    def whole(self, count: int) -> memoryview | None:
        """The next ``count`` bytes if they are in memory in one piece; None takes nothing."""
        ...

    def pieces(self, count: int) -> Iterator[memoryview]:
        """The next ``count`` bytes in views; EndOfStreamError when there are fewer."""
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


@dataclass(frozen=True, kw_only=True)
class PartDigest:
    """Checksum of one finished part; ``digest`` is None when some of it was skipped unread."""

    index: int
    algorithm: str
    digest: str | None


class _Checksum:
    """Running checksum of one part."""

    def __init__(self, file: RemoteFile, compare: bool) -> None:
        self.algorithm = "sha256" if file.sha256 and compare else "md5" if file.md5 and compare else "crc32"
        self._expected = {"sha256": file.sha256, "md5": file.md5}.get(self.algorithm)
        if self.algorithm == "crc32" and file.crc32 is not None and compare:
            self._expected = f"{file.crc32:08x}"
        self._hash = None if self.algorithm == "crc32" else hashlib.new(self.algorithm)
        self._crc = 0
        self.complete = True

    @property
    def required(self) -> bool:
        """True when the source published a checksum to compare with."""
        return self._expected is not None

    def update(self, data: bytes) -> None:
        if self._hash:
            self._hash.update(data)
        else:
            self._crc = zlib.crc32(data, self._crc)

    def finish(self, index: int, name: str) -> PartDigest:
        """Raises PrepError when the digest is not the published one."""
        digest = self._hash.hexdigest() if self._hash else f"{self._crc:08x}"
        if self._expected and digest != self._expected:
            error = PartMismatchError(
                f"its {self.algorithm} is {digest}, the source published {self._expected}",
                where=name,
                fix="Download this part again, then run the same command: it goes on from there",
            )
            error.index, error.digest = index, digest
            raise error
        return PartDigest(index=index, algorithm=self.algorithm, digest=digest if self.complete else None)


def check_part(file: RemoteFile, path: Path, index: int) -> None:
    """Raise PartMismatchError when the file at ``path`` is not what the source published for part ``index``."""
    checksum = _Checksum(file, compare=True)
    if checksum.required:
        with path.open("rb") as data:
            while block := data.read(BLOCK_BYTES):
                checksum.update(block)
        checksum.finish(index, file.name)


class PartStream:
    """The bytes of ``parts`` from ``start`` on.

    Args:
        open_part: gives the path of part ``index``, waiting for it to arrive if need be.
        compare: compare published checksums; False when the source has verified the parts already.
        block_bytes: how much is read at once.
        seek_bytes: the shortest gap that is jumped over.
    """

    def __init__(
        self,
        parts: PartSet,
        open_part: Callable[[int], Path],
        *,
        start: int = 0,
        compare: bool = True,
        block_bytes: int = BLOCK_BYTES,
        seek_bytes: int = SEEK_BYTES,
    ) -> None:
        self.parts = parts
        self.finished: list[PartDigest] = []
        self._open_part = open_part
        self._compare = compare
        self._block_bytes, self._seek_bytes = block_bytes, seek_bytes
        self._index = parts.index_at(start)
        self._next = start  # offset of the first byte not read yet
        self._data, self._view, self._pos = b"", memoryview(b""), 0
        self._file = -1
        self._checksum: _Checksum | None = None
        self._hasher = ThreadPoolExecutor(1, "checksum")
        self._backlog: deque[Future[PartDigest] | Future[None]] = deque()

    @property
    def size(self) -> int | None:
        """Bytes of the whole archive."""
        return self.parts.size

    @property
    def offset(self) -> int:
        """Bytes consumed so far, from the start of the archive."""
        return self._next - (len(self._view) - self._pos)

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer only at the end."""
        end = self._pos + count
        if end <= len(self._view):
            start, self._pos = self._pos, end
            return self._data[start:end]
        gathered = bytearray()
        while len(gathered) < count and (self._pos < len(self._view) or self._fill()):
            piece = self._view[self._pos : self._pos + count - len(gathered)]
            self._pos += len(piece)
            gathered += piece
        return bytes(gathered)

    def whole(self, count: int) -> memoryview | None:
        """The next ``count`` bytes if they are in memory in one piece; None takes nothing."""
        start, end = self._pos, self._pos + count
        if end > len(self._view):
            return None
        self._pos = end
        return self._view[start:end]

    def pieces(self, count: int) -> Iterator[memoryview]:
        """The next ``count`` bytes in views; EndOfStreamError when there are fewer."""
        while count:
            if self._pos == len(self._view) and not self._fill():
                raise EndOfStreamError
            piece = self._view[self._pos : self._pos + count]
            self._pos += len(piece)
            count -= len(piece)
            yield piece

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes; EndOfStreamError when there are fewer."""
        if self._pos + count <= len(self._view):
            self._pos += count
            return
        target = self.offset + count
        if target > self.parts.size:
            raise EndOfStreamError
        while (left := target - self.offset) > 0:
            here = min(left, len(self._view) - self._pos)
            self._pos += here
            if not here and not self._seek(left):
                self._fill()

    def where(self, offset: int) -> str:
        """The part and byte of an offset, for messages."""
        return self.parts.where(offset)

    def part_at(self, offset: int) -> str:
        """The name of the part that holds an offset."""
        return self.parts.parts[self.parts.index_at(offset)].name

    def settle(self) -> None:
        """Wait for the checksums of all that was read; PrepError for a part that is not as published."""
        while self._backlog:
            self._collect()

    def close(self) -> None:
        """Give back the file and the thread."""
        self._hasher.shutdown(wait=True, cancel_futures=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _fill(self) -> bool:
        """Read the next block; False at the end of the last part. Only called when the view is used up."""
        if self._file < 0 and not self._open_next():
            return False
        part = self.parts.parts[self._index]
        try:
            data = os.read(self._file, min(self._block_bytes, part.end - self._next))
        except OSError as error:
            raise PrepError(f"cannot be read: {error.strerror}", where=self.where(self._next)) from error
        if not data:
            raise PrepError("the file ends here", where=self.where(self._next), fix="It changed while it was read")
        self._next += len(data)
        self._data, self._view, self._pos = data, memoryview(data), 0
        self._hash(data)
        if self._next == part.end:
            self._finish_part()
        return True

    def _seek(self, count: int) -> bool:
        """Jump over up to ``count`` bytes of the current part without reading them, when that is worth it."""
        if self._file < 0 and not self._open_next():
            return False
        part, checksum = self.parts.parts[self._index], self._checksum
        step = min(count, part.end - self._next)
        if step < self._seek_bytes or checksum is None or checksum.required:
            return False
        checksum.complete = False
        self._next = os.lseek(self._file, step, os.SEEK_CUR) + part.start
        self._data, self._view, self._pos = b"", memoryview(b""), 0
        if self._next == part.end:
            self._finish_part()
        return True

    def _open_next(self) -> bool:
        if self._next == self.parts.size:
            return False
        self._index = self.parts.index_at(self._next)
        part = self.parts.parts[self._index]
        path = self._open_part(self._index)
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(self._file).st_size
        if size != part.file.size:
            raise PrepError(
                f"has {size} bytes instead of {part.file.size}", where=path, fix="It changed since the start; run again"
            )
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._checksum = _Checksum(part.file, self._compare)
        before = self._next - part.start
        if before and self._checksum.required:
            while before and (data := os.read(self._file, min(self._block_bytes, before))):
                self._hash(data)
                before -= len(data)
        elif before:
            self._checksum.complete = False
            os.lseek(self._file, before, os.SEEK_SET)
        return True

    def _hash(self, data: bytes) -> None:
        assert self._checksum
        if self._checksum.complete:
            self._submit(self._hasher.submit(self._checksum.update, data))

    def _finish_part(self) -> None:
        assert self._checksum
        part = self.parts.parts[self._index]
        self._submit(self._hasher.submit(self._checksum.finish, self._index, part.name))
        os.close(self._file)
        self._file, self._checksum = -1, None

    def _submit(self, future: Future[PartDigest] | Future[None]) -> None:
        self._backlog.append(future)
        if len(self._backlog) > _MAX_BACKLOG:
            self._collect()

    def _collect(self) -> None:
        digest = self._backlog[0].result()
        self._backlog.popleft()
        if digest:
            self.finished.append(digest)
