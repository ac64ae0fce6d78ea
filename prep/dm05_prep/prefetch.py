"""Parts arriving while earlier ones are read, without filling the disk.

::

    WORKSPACE/parts/
      libero.tar.part-003           complete and verified, not begun
      libero.tar.part-002.reading   the part being read; its start is given back to the disk as it becomes durable
      (whatever a source keeps beside a part to continue a download)

While parts are not kept, the next one may take as much space as has been given back: together they are never larger
than one part, but for the rest of a member that lies across the border, and for the little that a source fetches
before it heeds a ``progress`` that blocks: with that the next part begins at once, instead of a silent network.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from dm05_prep.durable import disk_bytes, free_start, keep_tail, remove_empty
from dm05_prep.parts import PartSet
from dm05_prep.sources.base import Source

READING = ".reading"
_PAGE = 1 << 16
_AHEAD_BYTES = 64 << 20  # of a part, until its source heeds a ``progress`` that blocks


def held_at_most(parts: PartSet) -> int:
    """Bytes that parts take at once while they are not kept: the largest, and what comes of the next before room is."""
    return min(parts.size, parts.largest + min(parts.largest, _AHEAD_BYTES))


class Fetcher:
    """Brings the parts from index ``first`` on, one ahead of the reader.

    Args:
        folder: where parts go when the source makes copies.
        keep: do not delete parts.
        resume_at: offset in the archive from which on a ``.reading`` file can be trusted.
        arrived: told the bytes that arrive, for a progress bar.
    """

    def __init__(
        self,
        source: Source,
        parts: PartSet,
        folder: Path,
        *,
        keep: bool,
        resume_at: int = 0,
        arrived: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._source, self._parts, self._folder, self._keep = source, parts, folder, keep
        self._arrived = arrived
        self._first = parts.index_at(resume_at)
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._paths: dict[int, Path] = {}
        self._failure: BaseException | None = None
        self._wanted = self._first
        self._fetching, self._fetched_bytes = -1, 0
        self._thread: threading.Thread | None = None
        self.peak_bytes = 0
        if source.owns_parts:
            folder.mkdir(parents=True, exist_ok=True)
            self._tidy(resume_at)
            self._thread = threading.Thread(target=self._run, name="fetch", daemon=True)
            self._thread.start()

    def path(self, index: int) -> Path:
        """The complete part ``index``; waits for it. Raises what the source raised."""
        if not self._thread:
            target = self._folder / self._parts.parts[index].name
            return self._source.fetch(self._parts.parts[index].file, target, progress=self._arrived, stop=self._stop)
        with self._changed:
            self._wanted = index
            self._changed.notify_all()
            while index not in self._paths:
                if self._failure:
                    raise self._failure
                self._changed.wait(1.0)
            path = self._paths[index]
        if self._keep or path.name.endswith(READING):
            return path
        reading = path.with_name(path.name + READING)
        os.replace(path, reading)
        self._paths[index] = reading
        return reading

    def free(self, offset: int) -> None:
        """Everything before ``offset`` in the archive is durable: delete or shrink the parts that hold it."""
        if not self._thread or self._keep:
            return
        self._measure()
        for index, path in sorted(self._paths.items()):
            part = self._parts.parts[index]
            if part.end <= offset:
                path.unlink(missing_ok=True)
                with self._changed:
                    del self._paths[index]
                    self._changed.notify_all()
            elif part.start < offset and path.name.endswith(READING):
                self._give_back(path, (offset - part.start) // _PAGE * _PAGE, part.file.size)
                with self._changed:
                    self._changed.notify_all()

    def close(self) -> None:
        """Stop fetching."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread:
            self._thread.join()

    def _tidy(self, resume_at: int) -> None:
        """Take over what an earlier run left: delete parts it was done with, and begun ones that cannot be trusted."""
        for index, part in enumerate(self._parts.parts):
            path = self._folder / part.name
            reading = path.with_name(path.name + READING)
            if index == self._first and resume_at and reading.exists():
                self._paths[index] = reading
            elif disk_bytes(reading) >= part.file.size:  # nothing of it was given back
                os.replace(reading, path)
            else:
                reading.unlink(missing_ok=True)
            if part.end <= resume_at and not self._keep:
                path.unlink(missing_ok=True)

    def _give_back(self, path: Path, done: int, size: int) -> None:
        if done and not free_start(path, done) and disk_bytes(path) > 8 * (size - done):
            keep_tail(path, done)  # where the filesystem cannot make holes: once, near the end

    def _run(self) -> None:
        try:
            for index in range(self._first, len(self._parts.parts)):
                if index not in self._paths:
                    self._fetch(index)
                if self._stop.is_set():
                    return
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _fetch(self, index: int) -> None:
        part = self._parts.parts[index]
        target = self._folder / part.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._changed:
            self._fetching, self._fetched_bytes = index, 0
        path = self._source.fetch(part.file, target, progress=self._progress, stop=self._stop)
        with self._changed:
            if not self._stop.is_set():
                self._paths[index] = path
            self._changed.notify_all()

    def _progress(self, count: int) -> None:
        self._arrived(count)
        with self._changed:
            self._fetched_bytes += count
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Hold the download while this part and what is left of earlier ones are more than one part."""
        while not self._keep and not self._stop.is_set():
            with self._changed:
                ahead = self._fetching > self._wanted
                if not ahead or self._fetched_bytes + self._measure() <= self._parts.largest:
                    return
                self._changed.wait(1.0)

    def _measure(self) -> int:
        """Disk space of the parts that are here; also keeps the peak."""
        held = sum(disk_bytes(path) for path in list(self._paths.values()))
        self.peak_bytes = max(self.peak_bytes, held + (self._fetched_bytes if self._fetching not in self._paths else 0))
        return held


def drop_parts(parts: PartSet, folder: Path, *, begun_only: bool) -> None:
    """Delete copied parts (or just those that are partly given back), and their folder once it is empty."""
    for part in parts.parts:
        path = folder / part.name
        path.with_name(path.name + READING).unlink(missing_ok=True)
        if not begun_only:
            path.unlink(missing_ok=True)
    remove_empty((folder, folder.parent))
