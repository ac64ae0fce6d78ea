"""The engine: parts in, one dataset's folder out, in one pass; safe against damage, hostile archives and kill -9.

The members of the wanted dataset are written below ``<target>.partial/tree`` (drawn in :mod:`dm05_prep.journal`); now
and then, and at every part's end, everything written is made durable and the journal moves on. When the archive has
been read to its end mark, the tree gets its final name. Until then nothing exists under that name.

Checksums: a published one is compared over every byte of its part. Without one, a CRC-32 of each part is kept in the
record; then damage inside a file's data cannot be seen, damage to the archive's structure is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dm05_prep.archives import ArchiveReader, open_archive
from dm05_prep.durable import sync_filesystem, sync_folder, write_atomic
from dm05_prep.errors import PrepError
from dm05_prep.journal import (
    Journal,
    MemberLog,
    Point,
    Record,
    partial_folder,
    read_log,
    reconcile,
    remove_partial,
)
from dm05_prep.names import BadName, Names, is_sidecar, link_target
from dm05_prep.parts import PartSet
from dm05_prep.placement import Placement
from dm05_prep.prefetch import Fetcher, drop_parts
from dm05_prep.room import check_fits, full_error, is_full
from dm05_prep.sniff import check_head
from dm05_prep.sources.base import Source
from dm05_prep.stream import BLOCK_BYTES, PartMismatchError
from dm05_prep.untar import DamageError, Member, damage, show
from dm05_prep.writer import TreeWriter

REPACK = "Leave it out of the archive, or ask whoever made it"


@dataclass(frozen=True, kw_only=True)
class ExtractOptions:
    """How to work; the defaults suit every machine.

    Attributes:
        keep_parts: do not delete parts that the source copied here.
        writers: threads that write files.
        batch_bytes, batch_seconds: how much at most has to be done again after a crash.
        block_bytes: how much is read at once.
    """

    keep_parts: bool = False
    writers: int = 2
    batch_bytes: int = 256 << 20
    batch_seconds: float = 5.0
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """What came out.

    Attributes:
        record: totals of the whole dataset, also when an earlier run wrote some of it.
        left_out_first: the first browser sidecar that was left out in this run, "" for none.
        resumed_at: offset that this run went on from.
        peak_part_bytes: most disk space that copied parts took at any time of this run.
    """

    folder: Path
    record: Record
    left_out_first: str
    resumed_at: int
    peak_part_bytes: int
    seconds: float


def extract(
    source: Source,
    parts: PartSet,
    target: Path,
    inside: tuple[str, ...],
    *,
    parts_folder: Path,
    options: ExtractOptions | None = None,
    on_progress: Callable[[int, int], None] = lambda archive_bytes, files: None,
) -> Extracted:
    """Write the dataset that lies at ``inside`` in the archive to ``target``; goes on from what an earlier run did.

    Args:
        target: the folder to make. One that exists is replaced when the new one is complete.
        parts_folder: where a source that copies puts its parts.
        on_progress: told the bytes of the archive used and the files written so far, now and then.

    Raises:
        PrepError: the archive is damaged, holds something that is never written, or lacks the dataset; nothing is at
            ``target`` then. What can be gone on from stays in ``<target>.partial``.
    """
    started = time.monotonic()
    work = _Extraction(source, parts, target, inside, parts_folder, options or ExtractOptions(), on_progress)
    work.run()
    record = Record.load(target)
    assert record
    return Extracted(
        folder=target,
        record=record,
        left_out_first=work.left_out_first,
        resumed_at=work.resumed_at,
        peak_part_bytes=work.peak_part_bytes,
        seconds=time.monotonic() - started,
    )


class _Extraction:
    """One run; ``_last`` is the boundary before the member at hand, a place to go on from."""

    def __init__(
        self,
        source: Source,
        parts: PartSet,
        target: Path,
        inside: tuple[str, ...],
        parts_folder: Path,
        options: ExtractOptions,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._source, self._parts, self._target, self._options = source, parts, target, options
        self._parts_folder, self._on_progress = parts_folder, on_progress
        self._partial = partial_folder(target)
        self._tree = self._partial / "tree"
        self._journal_path = self._partial / "journal.json"
        self._journal = Journal.of(parts)
        self._names = Names()
        self._placement = Placement(inside)
        self._reader: ArchiveReader | None = None
        self._sync: Future[None] | None = None
        self.left_out_first = ""
        self.resumed_at = 0
        self.peak_part_bytes = 0

    def run(self) -> None:
        """Do everything; afterwards the target is complete."""
        made = _missing_parents(self._partial)
        try:
            if Record.load(self._tree) is None:
                self._begin()
                self._work()
            self._publish()
        except PartMismatchError as error:
            self._roll_back(error.index)
            raise
        except DamageError as error:
            self._roll_back(self._reader.part_index(error.offset) - 1 if self._reader else 0)
            raise
        except OSError as error:
            if is_full(error):
                raise full_error(self._target) from error
            raise
        finally:
            if not self._journal_path.exists() and Record.load(self._tree) is None:
                remove_partial(self._target)
                _remove_empty(made)

    def _begin(self) -> None:
        """Take over what an earlier run made durable, or start with an empty tree."""
        journal = Journal.load(self._journal_path)
        if journal is None:
            remove_partial(self._target)
        else:
            journal.check_same(self._parts, self._partial)
            self._journal = journal
        self._tree.mkdir(parents=True, exist_ok=True)
        point = self._journal.point
        for kind, path in read_log(self._partial / "members.log", point.log_bytes):
            add = {"file": self._names.add_file, "link": self._names.add_link, "folder": self._names.add_folder}[kind]
            add(path)
        if journal:
            reconcile(self._tree, self._names, point.files, self._partial)
        self.resumed_at = point.offset
        self._log = MemberLog(self._partial / "members.log", point.log_bytes)
        self._files, self._bytes, self._left_out = point[2:]
        self._last = point
        self._saved_at = self._shown_at = time.monotonic()

    def _work(self) -> None:
        point, owned = self._journal.point, self._source.owns_parts
        self._writer = TreeWriter(self._tree, self._options.writers)
        self._syncer = ThreadPoolExecutor(1, "sync")
        self._fetcher = Fetcher(
            self._source, self._parts, self._parts_folder, keep=self._options.keep_parts, resume_at=point.offset
        )
        try:
            self._reader = open_archive(
                self._parts,
                self._open_part,
                start=point.offset,
                compare=not owned,
                block_bytes=self._options.block_bytes,
            )
            for member in self._reader.members():
                self._reached(member.offset)
                try:
                    self._take(self._reader, member)
                except BadName as error:
                    raise damage(self._reader, member.offset, f"{show(member)}: {error}", REPACK) from None
            self._complete(self._reader)
        except (PartMismatchError, DamageError):
            raise
        except PrepError:  # a source that failed: what arrived before stays done
            if self._reader:
                self._checkpoint(self._last, wait=True)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        self._fetcher.close()
        self._writer.close()
        self._syncer.shutdown(wait=True)
        if self._reader:
            self._reader.close()
        self._log.close()
        self.peak_part_bytes = self._fetcher.peak_bytes

    def _open_part(self, index: int) -> Path:
        if self._reader and self._reader.restartable and self._source.owns_parts:
            self._checkpoint(self._last)  # so that most of the part before can be let go
        path = self._fetcher.path(index)
        check_head(path, self._parts.kind if index == 0 else None)
        return path

    def _reached(self, offset: int) -> None:
        """The header at ``offset`` is sound, so everything before it is."""
        assert self._reader
        points = self._journal.part_points
        here = Point(offset, self._log.size, self._files, self._bytes, self._left_out)
        while len(points) <= self._reader.part_index(offset):
            points.append(here if self._parts.parts[len(points)].start == offset else self._last)
        self._last = here
        now = time.monotonic()
        batch = offset - self._journal.point.offset
        if batch >= self._options.batch_bytes or now - self._saved_at >= self._options.batch_seconds:
            self._checkpoint(here)
        if now - self._shown_at >= 0.1:
            self._on_progress(self._reader.consumed(), self._files)
            self._shown_at = now

    def _take(self, reader: ArchiveReader, member: Member) -> None:
        """Write one member, if it is wanted."""
        parts = self._placement.relative(member)
        if parts is None:
            return
        path = "/".join(parts)
        if parts and is_sidecar(parts):
            self._left_out += 1
            self.left_out_first = self.left_out_first or f"{show(member)} ({reader.where(member.offset)})"
        elif member.kind == "folder":
            self._names.add_folder(path)
            self._writer.folder(path)
            if path:
                self._log.add("folder", path)
        elif not path:
            raise BadName(f"a {member.kind} where the dataset's folder must be")
        else:
            self._take_file(reader, member, path)

    def _take_file(self, reader: ArchiveReader, member: Member, path: str) -> None:
        if member.kind == "file":
            self._names.add_file(path)
            check_fits(member, self._tree)
            self._writer.file(path, member.size, reader.pieces(member))
            self._bytes += member.size
        elif member.kind == "hard link":
            existing = self._placement.subset_of(member.target)
            if not existing or not self._names.has_file(existing) or self._names.is_link(existing):
                raise BadName(f"a hard link to {member.target!r}, which is no file of the dataset before it")
            self._names.add_file(path)
            self._writer.same_file(path, existing)
        elif member.kind == "symbolic link":
            link_target(path, member.target)
            self._names.add_link(path)
            self._writer.link(path, member.target.decode())
        else:
            raise BadName(f"a {member.kind} is never written")
        self._log.add("link" if member.kind == "symbolic link" else "file", path)
        self._files += 1

    def _checkpoint(self, point: Point, wait: bool = False) -> None:
        """Have everything before ``point`` made durable, in the background unless ``wait``."""
        if self._sync and not self._sync.done() and not wait:
            return
        assert self._reader
        if self._sync:
            self._sync.result()
        self._writer.wait()
        self._note_digests(self._reader)
        self._log.flush()
        self._journal.point = point
        self._saved_at = time.monotonic()
        self._sync = self._syncer.submit(self._make_durable, self._journal.dump(), point.offset)
        if wait:
            self._sync.result()

    def _make_durable(self, journal: bytes, offset: int) -> None:
        sync_filesystem(self._partial)
        write_atomic(self._journal_path, journal)
        if self._reader and self._reader.restartable:
            self._fetcher.free(offset)

    def _note_digests(self, reader: ArchiveReader) -> None:
        for digest in reader.digests():
            if digest.digest:
                self._journal.digests[self._parts.parts[digest.index].name] = f"{digest.algorithm}:{digest.digest}"

    def _complete(self, reader: ArchiveReader) -> None:
        """The end mark was read: make the tree durable, then put the record into it."""
        if not self._files:
            seen = ", ".join(self._placement.seen) or "nothing"
            raise damage(
                reader, 0, f"the archive holds nothing of {self._target.name}, but: {seen}", "Choose with --subset"
            )
        self._writer.wait()
        self._note_digests(reader)
        if self._sync:
            self._sync.result()
        self._log.flush()
        sync_filesystem(self._partial)
        Record(
            archive=self._parts.archive,
            source=self._source.description,
            parts=[(*part[:2], self._journal.digests.get(part[0])) for part in self._journal.parts],
            archive_bytes=self._parts.size,
            files=self._files,
            bytes=self._bytes,
            left_out=self._left_out,
            finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        ).save(self._tree)
        self._on_progress(self._parts.size, self._files)

    def _publish(self) -> None:
        """Give the complete tree its name; what was there before is removed afterwards."""
        if os.path.lexists(self._target):
            os.rename(self._target, self._partial / "old")
        os.rename(self._tree, self._target)
        sync_folder(self._target.parent)
        remove_partial(self._target)
        if self._source.owns_parts:
            drop_parts(self._parts, self._parts_folder, begun_only=self._options.keep_parts)

    def _roll_back(self, index: int) -> None:
        """Something is wrong in or after part ``index``: forget everything since before that part."""
        if self._source.owns_parts:
            drop_parts(self._parts, self._parts_folder, begun_only=True)
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
            remove_partial(self._target)


def _missing_parents(path: Path) -> list[Path]:
    """The folders above ``path`` that do not exist yet, the deepest first."""
    return [parent for parent in path.parents if not parent.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
