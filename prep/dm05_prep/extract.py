"""The engine: parts in, one dataset's folder out, in one pass; safe against damage, hostile archives and kill -9.

The members of the wanted dataset are written below ``<target>.partial/tree`` (drawn in :mod:`dm05_prep.journal`); now
and then, and at every part's end, everything written is made durable and the journal moves on. When the archive has
been read to its end mark, the tree gets its final name. Until then nothing exists under that name.

Checksums: a published one is compared over every byte of its part. Without one, a CRC-32 of each part is kept in the
record; then damage inside a file's data cannot be seen, damage to the archive's structure is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dm05_schemas.errors import DataError

from dm05_prep.archives import ArchiveReader, open_archive
from dm05_prep.checksums import Checksums, PartMismatchError, check_part
from dm05_prep.durable import remove_empty
from dm05_prep.errors import PrepError
from dm05_prep.images import ImageSink, PackImages
from dm05_prep.journal import Point, Record
from dm05_prep.ledger import Ledger
from dm05_prep.names import BadName, is_sidecar, link_target
from dm05_prep.parallel import default_jobs
from dm05_prep.parts import PartSet
from dm05_prep.placement import Placement
from dm05_prep.prefetch import Fetcher, drop_parts
from dm05_prep.room import LARGE_BYTES, check_fits, full_error, is_full
from dm05_prep.sniff import check_head
from dm05_prep.sources.base import Source
from dm05_prep.stream import BLOCK_BYTES
from dm05_prep.untar import DamageError, Member, damage, show
from dm05_prep.writer import TreeWriter

if TYPE_CHECKING:  # NumPy takes a tenth of a second to import: not before there is something to count
    from dm05_prep.index_scan import Counted, FileCounter

_STEP_BYTES = 1 << 16  # between the member boundaries that are noted as places to go on from
_COUNTED_BYTES = 8 << 20  # larger files are not gathered in memory
REPACK = "Leave it out of the archive, or ask whoever made it"


@dataclass(frozen=True, kw_only=True)
class ExtractOptions:
    """How to work; the defaults suit every machine.

    Attributes:
        keep_parts: do not delete parts that the source copied here.
        writers: processes that write files, 0 to write without any.
        alone_bytes: how much is written before these processes are started.
        batch_bytes, batch_seconds: how much at most has to be done again after a crash; with 0 bytes every member is
            durable before the next one.
        block_bytes: how much is read at once.
    """

    keep_parts: bool = False
    writers: int = field(default_factory=lambda: min(4, default_jobs()))
    alone_bytes: int = 32 << 20
    batch_bytes: int = 256 << 20
    batch_seconds: float = 5.0
    block_bytes: int = BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """What came out.

    Attributes:
        record: totals of the whole dataset, also when an earlier run wrote some of it.
        left_out_first: the first file browser's sidecar that this run left out, "" for none.
        resumed_at: offset that this run went on from.
        peak_part_bytes: most disk space that copied parts took at any time of this run.
        counted: what the index says of the .jsonl files that this run wrote, by their path in the dataset.
    """

    folder: Path
    record: Record
    left_out_first: str
    resumed_at: int
    peak_part_bytes: int
    counted: Mapping[str, Counted]
    seconds: float


def extract(
    source: Source,
    parts: PartSet,
    target: Path,
    inside: tuple[str, ...],
    *,
    parts_folder: Path,
    options: ExtractOptions | None = None,
    images: PackImages | None = None,
    on_progress: Callable[[int, int], None] = lambda archive_bytes, files: None,
    on_arrival: Callable[[int], None] = lambda count: None,
) -> Extracted:
    """Write the dataset that lies at ``inside`` in the archive to ``target``; goes on from what an earlier run did.

    Args:
        target: the folder to make. One that exists is replaced when the new one is complete.
        parts_folder: where a source that copies puts its parts.
        images: takes the images in place of the disk, for a pack.
        on_progress: told the bytes of the archive used and the files written so far, now and then.
        on_arrival: told how many bytes of parts have newly arrived, from other threads.

    Raises:
        PrepError: the archive is damaged, holds something that is never written, or lacks the dataset; nothing is at
            ``target`` then. What can be gone on from stays in ``<target>.partial``.
    """
    started = time.monotonic()
    ledger = Ledger(target, parts, images.mode if images else "files")
    made = [parent for parent in ledger.partial.parents if not parent.exists()]
    options = options or ExtractOptions()
    run = _Run(source, parts, ledger, Placement(inside), parts_folder, options, images, on_progress, on_arrival)
    try:
        if not ledger.is_complete and not ledger.is_published:
            with ledger:
                run.read_all()
        ledger.publish(then=lambda: _drop_parts(source, parts, parts_folder, options.keep_parts))
    except OSError as error:
        if is_full(error):
            raise full_error(error, target) from error
        error.filename = error.filename or str(target)
        raise
    finally:
        ledger.forget_if_empty()
        remove_empty(made)
    record = Record.load(target)
    assert record
    return Extracted(
        folder=target,
        record=record,
        left_out_first=run.left_out_first,
        resumed_at=run.resumed_at,
        peak_part_bytes=run.peak_part_bytes,
        counted=run.counted,
        seconds=time.monotonic() - started,
    )


class _Run:
    """One pass over the archive; ``_last`` is the last boundary before the member at hand that was noted."""

    def __init__(
        self,
        source: Source,
        parts: PartSet,
        ledger: Ledger,
        placement: Placement,
        parts_folder: Path,
        options: ExtractOptions,
        images: PackImages | None,
        on_progress: Callable[[int, int], None],
        on_arrival: Callable[[int], None],
    ) -> None:
        self._source, self._parts, self._ledger, self._placement = source, parts, ledger, placement
        self._parts_folder, self._options, self._images = parts_folder, options, images
        self._on_progress, self._on_arrival = on_progress, on_arrival
        self._reader: ArchiveReader | None = None
        self._sink: ImageSink | None = None
        self.left_out_first = ""
        self.resumed_at = 0
        self.peak_part_bytes = 0
        self.counted: dict[str, Counted] = {}
        self._counter: FileCounter | None = None

    def read_all(self) -> None:
        """Everything from the ledger's start to the end mark; rolls the ledger back when the archive is at fault."""
        start = self._ledger.start
        self._last, self._shown_at, self.resumed_at = start, 0.0, start.offset
        self._next_point = 0
        self._step = 0 if self._images else min(_STEP_BYTES, self._options.batch_bytes)
        if self._images:
            self._sink = self._images.open(self._ledger.tree, start.images)
        self._writer = TreeWriter(
            self._ledger.tree, self._options.writers, self._options.alone_bytes, self._ledger.guard
        )
        owned, plain = self._source.owns_parts, self._parts.kind == "tar"
        torn = self._parts.index_at(start.offset) if owned and plain and start.offset else -1
        self._checksums = Checksums(self._parts, verified=owned, torn=torn)
        self._fetcher = Fetcher(
            self._source,
            self._parts,
            self._parts_folder,
            keep=self._options.keep_parts,
            resume_at=start.offset if plain else 0,
            arrived=self._on_arrival,
        )
        try:
            self._read_or_keep(start.offset)
        except PartMismatchError as error:
            self._roll_back(error.index)
            raise self._named(error) from None
        except DamageError as error:
            index = self._reader.part_index(error.offset) if self._reader else 0
            self._roll_back(index - 1)
            self._blame(index)
            raise
        finally:
            self._fetcher.close()
            self._writer.close()
            self._checksums.close()
            if self._reader:
                self._reader.close()
            self.peak_part_bytes = self._fetcher.peak_bytes

    def _read_or_keep(self, start: int) -> None:
        try:
            self._read(start)
        except (PartMismatchError, DamageError):
            raise
        except PrepError:  # a source that failed: what arrived before stays done
            if self._reader:
                self._save(self._last, wait=True)
            raise

    def _blame(self, index: int) -> None:
        """Damage showed in part ``index``: where checksums were published, they tell which part has it."""
        for suspect in range(max(0, index - 1), index + 1) if not self._source.owns_parts else ():
            try:
                check_part(self._parts.parts[suspect].file, self._fetcher.path(suspect), suspect)
            except PartMismatchError as error:
                raise self._named(error) from None

    def _named(self, error: PartMismatchError) -> PrepError:
        """The error; when the part is another one under a wrong name, in those words."""
        for part in self._parts.parts:
            if error.digest in (part.file.sha256, part.file.md5):
                fix = "Download both again, then run the same command: it goes on from there"
                return PrepError(f"has the content of {part.name}", where=error.where, fix=fix)
        return error

    def _read(self, start: int) -> None:
        reader = self._reader = open_archive(
            self._parts,
            self._open_part,
            start=start,
            checksums=self._checksums,
            block_bytes=self._options.block_bytes,
        )
        for member in reader.members():
            if member.offset >= self._next_point:
                self._reached(reader, member.offset)
            try:
                self._take(reader, member)
            except BadName as error:
                raise damage(reader, member.offset, f"{show(member)}: {error}", REPACK) from None
        if not self._ledger.files:
            seen = ", ".join(self._placement.seen) or "nothing"
            what = f"the archive holds nothing of {self._ledger.target.name}, but: {seen}"
            raise damage(reader, 0, what, "Choose with --subset")
        self._writer.wait()
        state = self._sink.sync() if self._sink else None
        digests = self._checksums.before(len(self._parts.parts))
        self._ledger.complete(self._source.description, digests, state)
        self._on_progress(self._parts.size, self._ledger.files)

    def _open_part(self, index: int) -> Path:
        self._checksums.before(index)
        copied = self._source.owns_parts and not self._options.keep_parts
        if copied and self._reader and self._reader.restartable:
            self._save(self._last, wait=True)  # lets go of the part before, but for the member at hand
        path = self._fetcher.path(index)
        check_head(path, self._parts.kind if index == 0 else None)
        return path

    def _reached(self, reader: ArchiveReader, offset: int) -> None:
        """The header at ``offset`` is sound, so everything before it is: a place to go on from."""
        here = self._ledger.point(offset)
        parts_begun = reader.part_index(offset) + 1
        part_end = self._parts.parts[parts_begun - 1].end if reader.restartable else offset + self._step
        self._next_point = offset if not self._step else min(offset + self._step, part_end)
        if parts_begun > self._ledger.parts_begun:
            state = self._sink.sync() if self._sink else None
            self._ledger.enter_parts(parts_begun, self._last._replace(images=state), here._replace(images=state))
        self._last = here
        now = time.monotonic()
        if self._ledger.is_due(here, now, self._options.batch_bytes, self._options.batch_seconds):
            self._save(here, wait=not self._options.batch_bytes)
        if now - self._shown_at >= 0.1:
            self._on_progress(reader.consumed(), self._ledger.files)
            self._shown_at = now

    def _save(self, point: Point, wait: bool = False) -> None:
        """Have everything before ``point`` made durable; skipped while the last one still is being, unless ``wait``."""
        if (self._ledger.is_busy and not wait) or not point.offset:
            return
        assert self._reader
        self._writer.wait()
        if self._sink:
            point = point._replace(images=self._sink.sync())
        let_go = self._let_go if self._reader.restartable else lambda offset: None
        digests = self._checksums.before(self._reader.part_index(point.offset))
        self._ledger.save(point, digests, let_go, wait=wait)

    def _let_go(self, offset: int) -> None:
        self._fetcher.free(int(min(offset, self._checksums.position())))

    def _take(self, reader: ArchiveReader, member: Member) -> None:
        """Write one member, if it is wanted."""
        path = self._placement.path_of(member)
        if path is None:
            return
        if is_sidecar(path):
            if member.kind != "folder":
                self._ledger.left_out += 1
                self.left_out_first = self.left_out_first or f"{show(member)} ({reader.where(member.offset)})"
        elif member.kind == "file" and path:
            self._take_file(reader, member, path)
        elif member.kind == "folder":
            self._ledger.names.add_folder(path)
            if path and not (self._images and self._images.holds(path)):
                self._writer.folder(path)
                self._ledger.add("folder", path)
        elif not path:
            raise BadName(f"a {member.kind} where the dataset's folder must be")
        elif member.kind in ("hard link", "symbolic link"):
            self._take_link(member, path)
        else:
            raise BadName(f"a {member.kind} is never written")

    def _take_file(self, reader: ArchiveReader, member: Member, path: str) -> None:
        self._ledger.names.add_file(path)
        url = self._url(path)
        if url and self._sink:
            part, offset = reader.position()
            self._sink.member(url, part, offset, b"".join(reader.pieces(member)))
        else:
            if member.size > LARGE_BYTES:
                check_fits(member, self._ledger.tree)
            self._write_file(reader, member, path)
        self._ledger.add("image" if url else "file", path, member.size)

    def _write_file(self, reader: ArchiveReader, member: Member, path: str) -> None:
        if path.endswith(".jsonl") and member.size <= _COUNTED_BYTES:
            data = b"".join(reader.pieces(member))
            self._writer.file(path, (data,))
            self._count(path, data)
        elif place := reader.place(member):
            self._writer.copy(path, *place, member.size)
        else:
            self._writer.file(path, reader.pieces(member))

    def _count(self, path: str, data: bytes) -> None:
        """Spares the index reading the file again."""
        if not self._counter:
            from dm05_prep.index_scan import FileCounter

            self._counter = FileCounter()
        with contextlib.suppress(DataError):  # the index says what is wrong, with the place where the file then is
            self.counted[path] = self._counter.count_bytes(memoryview(data), path)

    def _take_link(self, member: Member, path: str) -> None:
        names, symbolic = self._ledger.names, member.kind == "symbolic link"
        if symbolic:
            existing = link_target(path, member.target)
            names.add_link(path)
        else:
            try:
                existing = self._placement.subset_of(member.target) or ""
            except BadName:
                existing = ""
            if not names.has_file(existing) or names.is_link(existing):
                target = show(member._replace(name=member.target))
                raise BadName(f"a hard link to {target}, which is no file of the dataset before it")
            names.add_file(path)
        url, existing_url = self._url(path), self._url(existing)
        if bool(url) != bool(existing_url):
            raise BadName(f"a link between images and other files, to {member.target!r}")
        if url and self._sink:
            self._sink.link(url, existing_url)
        elif symbolic:
            self._writer.link(path, member.target.decode())
        else:
            self._writer.same_file(path, existing)
        self._ledger.add("image" if url else "link" if symbolic else "file", path)

    def _url(self, path: str) -> str:
        """The path below the image folder when images go to a sink; "" for everything else."""
        return self._images.url(path) if self._images else ""

    def _roll_back(self, index: int) -> None:
        self._fetcher.close()
        _drop_parts(self._source, self._parts, self._parts_folder, keep=True)
        self._ledger.roll_back(index)


def _drop_parts(source: Source, parts: PartSet, folder: Path, keep: bool) -> None:
    if source.owns_parts:
        drop_parts(parts, folder, begun_only=keep)
