"""A tar behind gzip or zstd, unpacked as it is read."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

import zstandard

from dm05_prep.archives import TarArchive
from dm05_prep.stream import EndOfStreamError, PartStream
from dm05_prep.untar import Member, damage, read_members

_CHUNK_BYTES = 1 << 20


class CompressedTar(TarArchive):
    """A tar behind gzip or zstd."""

    restartable = False

    def __init__(self, raw: PartStream, start: int) -> None:
        super().__init__(raw)
        self._stream = _Unpacked(raw)
        self._start = start

    def members(self) -> Iterator[Member]:
        try:
            self._stream.skip(self._start)
        except EndOfStreamError:
            raise damage(self._stream, self._start, "the archive is shorter than it was") from None
        yield from read_members(self._stream)

    def place(self, member: Member) -> None:
        return None

    def part_index(self, offset: int) -> int:
        return 0


# Compression often shows damage long after it, the sum at the end of a gzip file only there.
_FIX = (
    "Compare the checksums of the parts up to this one, and download what differs (without checksums, all of them) "
    "again, then run the same command"
)


class _Unpacked:
    """The unpacked bytes, as a :class:`dm05_prep.stream.ByteStream`."""

    def __init__(self, raw: PartStream) -> None:
        self._raw = raw
        self.offset = 0
        self.size: int | None = None
        source = io.BufferedReader(_Readable(raw), _CHUNK_BYTES)
        if raw.parts.kind == "tar.gz":
            self._source = cast(BinaryIO, gzip.GzipFile(fileobj=source, mode="rb"))
        else:
            reader = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
            self._source = cast(BinaryIO, reader)

    def take(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (more := self._read(count - len(data))):
            data += more
        return data

    def pieces(self, count: int) -> Iterator[bytes]:
        while count:
            data = self._read(min(count, _CHUNK_BYTES))
            if not data:
                raise EndOfStreamError
            count -= len(data)
            yield data

    def skip(self, count: int) -> None:
        for _ in self.pieces(count):
            pass

    def where(self, offset: int) -> str:
        return f"{self._raw.where(self._raw.offset)} (byte {offset} unpacked)"

    def part_at(self, offset: int) -> str:
        return self._raw.parts.archive

    def _read(self, count: int) -> bytes:
        try:
            data = self._source.read(count)
        except EOFError:
            what = "the compressed data ends too early: a part is cut short, or one after it is missing"
            raise damage(self, self.offset, what) from None
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise damage(
                self, self.offset, f"the compressed data is damaged at or before this byte: {error}", _FIX
            ) from error
        self.offset += len(data)
        return data


class _Readable(io.RawIOBase):
    """A PartStream as a file object."""

    def __init__(self, stream: PartStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        data = self._stream.take(len(view))
        view[: len(data)] = data
        return len(data)
