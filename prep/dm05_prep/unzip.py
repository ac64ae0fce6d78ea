"""A reader of zip archives over parts; every member's CRC is checked by the format itself."""

from __future__ import annotations

import io
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from dm05_prep.checksums import Checksums
from dm05_prep.parts import PartSet
from dm05_prep.untar import AGAIN, Member, damage, show

_CHUNK_BYTES = 1 << 20
_MAX_LINK_BYTES = 4096


class ZipArchive:
    """A zip; its directory stands at the end, so all parts are needed before the first member is written."""

    restartable = False

    def __init__(self, parts: PartSet, open_part: Callable[[int], Path], *, start: int, checksums: Checksums) -> None:
        self._parts, self._start = parts, start
        paths = [open_part(index) for index in range(len(parts.parts))]
        for index, path in enumerate(paths):
            checksums.begin(index, path)
        checksums.before(len(paths))
        self._done = start
        self._file = io.BufferedReader(_Joined(parts, paths), _CHUNK_BYTES)
        try:
            self._zip = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise damage(
                self,
                parts.size,
                f"no readable zip directory ends here: {error}",
                f"The last part is damaged, cut short or not the last. {AGAIN}",
            ) from error

    def members(self) -> Iterator[Member]:
        end = 0
        for info in sorted(self._zip.infolist(), key=lambda info: info.header_offset):
            if info.header_offset < end:
                raise damage(self, info.header_offset, f"{info.filename!r} overlaps the member before it")
            end = info.header_offset + info.compress_size
            if info.header_offset >= self._start:
                self._done = info.header_offset
                self._info = info
                yield self._member(info)
        self._done = self._parts.size

    def pieces(self, member: Member) -> Iterator[bytes]:
        left = member.size
        try:
            with self._zip.open(self._info) as file:
                while data := file.read(_CHUNK_BYTES):
                    left -= len(data)
                    yield data
        except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
            raise damage(self, member.offset, f"{show(member)} is damaged: {error}") from error
        if left:
            raise damage(self, member.offset, f"{show(member)} has not the size that the directory gives")

    def place(self, member: Member) -> None:
        return None

    def position(self) -> tuple[int, int]:
        return 0, 0  # the data may be compressed

    def where(self, offset: int) -> str:
        return self._parts.where(offset)

    def part_index(self, offset: int) -> int:
        return self._parts.index_at(offset)

    def consumed(self) -> int:
        return self._done

    def close(self) -> None:
        self._zip.close()
        self._file.close()

    def _member(self, info: zipfile.ZipInfo) -> Member:
        name = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")
        mode = stat.S_IFMT(info.external_attr >> 16)
        kind = "folder" if info.is_dir() else "file"
        if info.flag_bits & 1:
            kind = "encrypted file"
        elif mode == stat.S_IFLNK:
            kind = "symbolic link"
        elif mode not in (0, stat.S_IFREG, stat.S_IFDIR):
            kind = "special file"
        member = Member(name, kind, 0 if kind == "folder" else info.file_size, info.header_offset)
        if kind != "symbolic link":
            return member
        if info.file_size > _MAX_LINK_BYTES:
            raise damage(self, member.offset, f"{show(member)}: a link of {info.file_size} bytes")
        target = b"".join(self.pieces(member))
        return Member(name, kind, 0, info.header_offset, target)


class _Joined(io.RawIOBase):
    """The parts as one file that can seek."""

    def __init__(self, parts: PartSet, paths: list[Path]) -> None:
        self._parts = parts
        self._files = [path.open("rb", buffering=0) for path in paths]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._parts.size}[whence]
        if base + offset < 0:
            raise ValueError("before the start")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        if self._position >= self._parts.size or not len(view):
            return 0
        index = self._parts.index_at(self._position)
        file, start = self._files[index], self._parts.parts[index].start
        file.seek(self._position - start)
        count = file.readinto(view) or 0
        self._position += count
        return count

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()
