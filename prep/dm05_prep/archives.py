"""Plain tar, compressed tar and zip behind one face: members in order, each at an offset to go on from.

Offsets are bytes of the archive for tar and zip, bytes of the unpacked archive for compressed tar. Only plain tar can
go on without the parts before a point; the others keep their parts until the end, and compressed tar unpacks again
(without writing) up to the point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from dm05_prep.checksums import Checksums
from dm05_prep.parts import PartSet
from dm05_prep.stream import ByteStream, EndOfStreamError, PartStream
from dm05_prep.untar import Member, damage, read_members, show


class ArchiveReader(Protocol):
    """What the engine reads from; ``restartable`` tells whether parts before a point can be deleted."""

    restartable: bool

    def members(self) -> Iterator[Member]:
        """The members from the point on that the reader was opened at."""
        ...

    def pieces(self, member: Member) -> Iterator[bytes]:
        """The data of the member that was yielded last."""
        ...

    def place(self, member: Member) -> tuple[Path, int] | None:
        """The file and offset where the data of the member that was yielded last lies as it is; None if nowhere."""
        ...

    def position(self) -> tuple[int, int]:
        """Where the data of the member that was yielded last begins: part number, offset in it; for plain tar only."""
        ...

    def where(self, offset: int) -> str:
        """The part and byte of an offset, for messages."""
        ...

    def part_index(self, offset: int) -> int:
        """Index of the part that holds an offset; 0 where that has no meaning."""
        ...

    def consumed(self) -> int:
        """Bytes of the archive used so far, for progress."""
        ...

    def close(self) -> None:
        """Give back the files."""
        ...


def open_archive(
    parts: PartSet, open_part: Callable[[int], Path], *, start: int, checksums: Checksums, block_bytes: int
) -> ArchiveReader:
    """A reader of ``parts`` from the member at ``start`` on; see :class:`dm05_prep.stream.PartStream`."""
    if parts.kind == "zip":
        from dm05_prep.unzip import ZipArchive

        return ZipArchive(parts, open_part, start=start, checksums=checksums)
    plain = parts.kind == "tar"
    stream = PartStream(parts, open_part, start=start if plain else 0, checksums=checksums, block_bytes=block_bytes)
    if plain:
        return TarArchive(stream)
    from dm05_prep.unpack import CompressedTar

    return CompressedTar(stream, start)


class TarArchive:
    """A plain tar."""

    restartable = True

    def __init__(self, raw: PartStream) -> None:
        self._raw = raw
        self._stream: ByteStream = raw

    def members(self) -> Iterator[Member]:
        return read_members(self._stream)

    def pieces(self, member: Member) -> Iterator[bytes]:
        try:
            yield from self._stream.pieces(member.size)
        except EndOfStreamError:
            raise damage(self._stream, member.offset, f"the archive ends inside {show(member)}") from None

    def place(self, member: Member) -> tuple[Path, int] | None:
        return self._raw.place(member.size)

    def position(self) -> tuple[int, int]:
        index = self._raw.parts.index_at(self._raw.offset)
        return index, self._raw.offset - self._raw.parts.parts[index].start

    def where(self, offset: int) -> str:
        return self._stream.where(offset)

    def part_index(self, offset: int) -> int:
        return self._raw.parts.index_at(offset)

    def consumed(self) -> int:
        return self._raw.offset

    def close(self) -> None:
        self._raw.close()
