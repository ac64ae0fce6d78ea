"""Checksums of parts, computed beside the reading of the archive: by a thread, for large parts by a process.

What a source published is compared. Where it published nothing, the CRC-32 is kept for the record.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dm05_prep.child import Child
from dm05_prep.errors import PrepError
from dm05_prep.hasher import sum_file
from dm05_prep.parts import PartSet
from dm05_prep.sources.base import RemoteFile

_ALONE_BYTES = 64 << 20  # a helper process is worth starting for more than that


@dataclass(frozen=True, kw_only=True)
class PartDigest:
    """Checksum of part ``index``; ``digest`` is lower-case hex."""

    index: int
    algorithm: str
    digest: str


class PartMismatchError(PrepError):
    """Part ``index`` is not what the source published; ``digest`` is what it has."""

    index: int
    digest: str


def published(file: RemoteFile) -> tuple[str, str] | None:
    """(algorithm, digest) of the best checksum that the source gives, None when it gives none."""
    if file.sha256:
        return "sha256", file.sha256
    if file.md5:
        return "md5", file.md5
    return None if file.crc32 is None else ("crc32", f"{file.crc32:08x}")


def check_part(file: RemoteFile, path: Path, index: int) -> None:
    """Raise PartMismatchError when the file at ``path`` is not what the source published for part ``index``."""
    if published(file):
        _Work(index, file).run(path)


class _Work:
    """The checksum of one part; ``done`` bytes of it are in."""

    def __init__(self, index: int, file: RemoteFile) -> None:
        self._index, self._file = index, file
        self._published = published(file)
        self._algorithm = self._published[0] if self._published else "crc32"
        self.done = 0
        self.stopped = False

    def run(self, path: Path, helper: Child | None = None) -> PartDigest | None:
        """The digest; None when stopped. Raises PartMismatchError when it is not the published one."""
        try:
            digest = self._sum(helper, str(path)) if helper else sum_file(self._algorithm, str(path), self._go_on)
        except PrepError:  # the helper, which may have been ended
            if self.stopped:
                return None
            raise
        return self._compare(digest) if digest else None

    def _sum(self, helper: Child, path: str) -> str:
        helper.send(self._algorithm, path)
        return str(helper.answer(self._go_on))

    def _go_on(self, done: int) -> bool:
        self.done = done
        return not self.stopped

    def _compare(self, digest: str) -> PartDigest:
        if self._published and digest != self._published[1]:
            error = PartMismatchError(
                f"its {self._algorithm} is {digest}, the source published {self._published[1]}",
                where=self._file.name,
                fix="Download this part again, then run the same command: it goes on from there",
            )
            error.index, error.digest = self._index, digest
            raise error
        return PartDigest(index=self._index, algorithm=self._algorithm, digest=digest)


class Checksums:
    """The checksums of the parts of one archive, in the order in which they are read.

    Args:
        verified: the source has compared what it published already: that is taken over, not computed again.
        torn: a part whose start is not on disk any more, -1 for none: it is passed over.
    """

    def __init__(self, parts: PartSet, *, verified: bool, torn: int = -1) -> None:
        self._parts, self._verified, self._torn = parts, verified, torn
        self._pool = ThreadPoolExecutor(1, "checksum")
        self._helper: Child | None = None
        self._work: dict[int, tuple[_Work, Future[PartDigest | None]]] = {}
        self._finished: list[PartDigest] = []

    def begin(self, index: int, path: Path) -> None:
        """Start on part ``index``."""
        part = self._parts.parts[index]
        known = published(part.file) if self._verified else None
        if known:
            self._finished.append(PartDigest(index=index, algorithm=known[0], digest=known[1]))
        elif index != self._torn:
            work = _Work(index, part.file)
            if part.file.size >= _ALONE_BYTES and not self._helper:
                self._helper = Child("computes checksums", "hasher")
            self._work[index] = work, self._pool.submit(work.run, path, self._helper)

    def before(self, index: int) -> list[PartDigest]:
        """The digests of the parts before ``index``, as far as there are any; waits for those under way.

        Raises:
            PartMismatchError: one is not what the source published.
        """
        for earlier in sorted(self._work):
            if earlier < index:
                digest = self._work[earlier][1].result()
                del self._work[earlier]
                if digest:
                    self._finished.append(digest)
        return [digest for digest in self._finished if digest.index < index]

    def position(self) -> float:
        """Offset in the archive from which on parts are still to be read; infinite when no checksum is under way."""
        needed = [self._parts.parts[index].start + work.done for index, (work, _) in list(self._work.items())]
        return min(needed, default=math.inf)

    def close(self) -> None:
        """Stop."""
        for work, _ in self._work.values():
            work.stopped = True
        if self._helper:
            self._helper.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._helper:
            self._helper.close()
