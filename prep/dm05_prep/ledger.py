"""The books of one extraction: what is written, what of it is durable, where to go on from.

The layout on disk is drawn in :mod:`dm05_prep.journal`.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dm05_schemas.files import sync_path

from dm05_prep.checksums import PartDigest
from dm05_prep.durable import sync_filesystem, write_durable
from dm05_prep.errors import PrepError
from dm05_prep.images import STAGING, ImageMode, ImageState
from dm05_prep.journal import (
    Journal,
    LogKind,
    MemberLog,
    Point,
    Record,
    journal_path,
    partial_folder,
    read_log,
    reconcile,
    remove_partial,
    was_published,
)
from dm05_prep.names import Names
from dm05_prep.parts import PartSet

_GUARD_SECONDS = 30.0


class Ledger:
    """Used as a context manager around the reading; ``__enter__`` takes over what an earlier run made durable.

    Attributes:
        tree: where files are written.
        names: every name in it.
        files, bytes, left_out: totals so far.
        start: where to go on from.
        guard: an open file, locked until it and every copy of it that a helper process holds are closed.
    """

    def __init__(self, target: Path, parts: PartSet, mode: ImageMode) -> None:
        self.target, self._parts = target, parts
        self.partial = partial_folder(target)
        self.tree = self.partial / "tree"
        self.names = Names()
        self._journal_path = journal_path(target)
        self._journal = Journal.of(parts, mode)
        self._syncing: Future[None] | None = None

    @property
    def is_complete(self) -> bool:
        """True when an earlier run wrote everything and just did not get to rename it."""
        return Record.load(self.tree) is not None

    @property
    def is_published(self) -> bool:
        """True when an earlier run renamed the tree and just did not get to clean up."""
        return was_published(self.target)

    def __enter__(self) -> Ledger:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.guard = _guard(self.target.parent)
        try:
            self._take_over()
        except BaseException:
            os.close(self.guard)
            raise
        return self

    def _take_over(self) -> None:
        """Start from what an earlier run made durable, or from an empty tree."""
        journal = Journal.load(self._journal_path)
        if journal is None:
            remove_partial(self.target)
        else:
            journal.check_same(self._journal, self._parts, self.partial)
            self._journal = journal
        self.tree.mkdir(parents=True, exist_ok=True)
        self.start = self._journal.point
        log = self.partial / "members.log"
        written = 0
        for kind, path in read_log(log, self.start.log_bytes):
            add = {"link": self.names.add_link, "folder": self.names.add_folder}.get(kind, self.names.add_file)
            add(path)
            written += kind in ("file", "link")
        if journal:
            reconcile(self.tree, self.names, written, self.partial, apart=STAGING)
        self.files, self.bytes, self.left_out = self.start.files, self.start.bytes, self.start.left_out
        self._log = MemberLog(log, self.start.log_bytes)
        self._saved_at = time.monotonic()
        self._syncer = ThreadPoolExecutor(1, "sync")

    def __exit__(self, *error: object) -> None:
        try:
            self._syncer.shutdown(wait=True)
            self._log.close()  # writes what is left, which a full disk refuses
        finally:
            os.close(self.guard)

    def add(self, kind: LogKind, path: str, size: int = 0) -> None:
        """Note a member that was handed to the writer; its name is in ``names`` already."""
        self._log.add(kind, path)
        if kind != "folder":
            self.files += 1
            self.bytes += size

    def point(self, offset: int) -> Point:
        """A place to go on from: everything so far lies before the member at ``offset``."""
        return Point(offset, self._log.size, self.files, self.bytes, self.left_out)

    @property
    def parts_begun(self) -> int:
        """How many parts :meth:`enter_parts` was told of."""
        return len(self._journal.part_points)

    def enter_parts(self, count: int, last: Point, here: Point) -> None:
        """Note the places to go back to for the first ``count`` parts, ``last`` and ``here`` being two boundaries."""
        points = self._journal.part_points
        while len(points) < count:
            points.append(here if self._parts.parts[len(points)].start == here.offset else last)

    def is_due(self, here: Point, now: float, batch_bytes: int, batch_seconds: float) -> bool:
        """True when enough was done since the last point."""
        return now - self._saved_at >= batch_seconds or here.offset - self._journal.point.offset >= batch_bytes

    @property
    def is_busy(self) -> bool:
        """True while the last point is still being made durable."""
        return self._syncing is not None and not self._syncing.done()

    def save(self, point: Point, digests: list[PartDigest], then: Callable[[int], None], *, wait: bool) -> None:
        """Make everything before ``point`` durable, all of it having been written, in the background unless ``wait``.

        Args:
            digests: checksums of finished parts.
            then: called with the point's offset when it is durable.
        """
        if self._syncing:
            self._syncing.result()
        self._note(digests)
        self._log.flush()
        self._journal.point = point
        self._saved_at = time.monotonic()
        self._syncing = self._syncer.submit(self._make_durable, self._journal.dump(), point.offset, then)
        if wait:
            self._syncing.result()

    def complete(self, source: str, digests: list[PartDigest], images: ImageState | None) -> None:
        """Everything is written: make it durable, then put the record into the tree."""
        if self._syncing:
            self._syncing.result()
        self._note(digests)
        self._log.flush()
        sync_filesystem(self.partial)
        Record(
            archive=self._parts.archive,
            source=source,
            parts=[(*part[:2], self._journal.digests.get(part[0])) for part in self._journal.parts],
            archive_bytes=self._parts.size,
            mode=self._journal.mode,
            images=images,
            files=self.files,
            bytes=self.bytes,
            left_out=self.left_out,
            finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        ).save(self.tree)

    def publish(self, then: Callable[[], None]) -> None:
        """Give the complete tree its name, call ``then``, and remove what was there before."""
        if self.is_published:
            then()
            remove_partial(self.target)
            return
        if os.path.lexists(self.target):
            old = self.partial / "old"
            if old.exists():
                shutil.rmtree(old)
            os.rename(self.target, old)
        os.rename(self.tree, self.target)
        sync_path(self.target.parent)
        then()
        remove_partial(self.target)

    def roll_back(self, index: int) -> None:
        """Something is wrong in or after part ``index``: forget everything since before that part."""
        if self._syncing:
            concurrent.futures.wait([self._syncing])
        journal = Journal.load(self._journal_path)
        if journal is None:
            return
        index = max(0, min(index, len(journal.part_points) - 1))
        journal.point = journal.part_points[index]
        journal.part_points = journal.part_points[: index + 1]
        kept = {part.name for part in self._parts.parts[:index]}
        journal.digests = {name: digest for name, digest in journal.digests.items() if name in kept}
        if journal.point.offset:
            journal.save(self._journal_path)
        else:
            remove_partial(self.target)

    def forget_if_empty(self) -> None:
        """Remove the partial folder when there is nothing in it to go on from."""
        if not self._journal_path.exists() and not self.is_complete:
            remove_partial(self.target)

    def _note(self, digests: list[PartDigest]) -> None:
        for digest in digests:
            self._journal.digests[self._parts.parts[digest.index].name] = f"{digest.algorithm}:{digest.digest}"

    def _make_durable(self, journal: bytes, offset: int, then: Callable[[int], None]) -> None:
        sync_filesystem(self.partial)
        write_durable(self._journal_path, journal)
        then(offset)


def _guard(folder: Path) -> int:
    """The open ``folder``, locked; helpers of a run that was killed may hold it for a moment."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    give_up = time.monotonic() + _GUARD_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > give_up:
                os.close(handle)
                what = "another process is writing here"
                raise PrepError(what, where=folder, fix="Wait for it to end, or end it") from None
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return handle
