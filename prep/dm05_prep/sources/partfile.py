"""A file that is being fetched, with what has arrived of it written down byte for byte.

::

    NAME.part         the bytes, each at its final place; holes where nothing has arrived yet
    NAME.part.json    {"version": 1, "identity": {...}, "boot": "...", "span_bytes": 16777216, "single": false,
                       "done": [    16777216,      917504,           0, ...]}

``done[i]`` counts the bytes that are there of span i, from its first one. The numbers have a fixed width and are
overwritten in place after the bytes they count, so that the file is right at any instant that the process may be
killed. ``identity`` holds the size and the published sums: another version of the file never continues this one.
After a power failure (another ``boot``) a count may be ahead of the disk: then only a published sum can vouch for the
bytes, and without one the file starts again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dm05_schemas.files import sync_path

from dm05_prep.console import human_bytes
from dm05_prep.errors import PrepError
from dm05_prep.room import full_error, is_full
from dm05_prep.sources.checks import Checks, Sums
from dm05_prep.sources.connection import NO_SPLICE

VERSION = 1
SPAN_BYTES = 16 << 20
READ_BYTES = 4 << 20  # few large steps: after each, the thread of the sums waits for its turn
_DIGITS = 15


@dataclass
class Span:
    """Bytes ``first`` to ``end`` (exclusive) of the file; those before ``position`` are there."""

    number: int
    first: int
    end: int
    position: int
    taken: bool = False

    @property
    def left(self) -> int:
        """Bytes to come."""
        return self.end - self.position


class PartFile:
    """The open ``.part`` and its state; one process at a time.

    Attributes:
        spans: in the order of the file.
        received: bytes that are there.
        front: up to here the file has no hole.
        single: one span for the whole file, because the server sends it only from the start. Once so, it stays so.
    """

    def __init__(self, target: Path, size: int, checks: Checks, etag: str | None, *, single: bool = False) -> None:
        self.path = target.with_name(target.name + ".part")
        self.state_path = _state_path(target)
        self.size, self._checks = size, checks
        self._identity = {"size": size, "etag": etag, **checks.published()}
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # the system writes a file for one thread at a time; others burn time waiting
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._state = -1
        try:
            self._claim()
            self._load(single)
        except BaseException:
            self.close()
            raise

    def write(self, span: Span, data: memoryview) -> None:
        """Put ``data`` at the position of ``span`` and count it.

        Raises:
            PrepError: no space left; the bytes before are kept.
        """
        self._put(span, len(data), lambda done: os.pwrite(self._handle, data[done:], span.position + done))

    def write_pipe(self, span: Span, pipe: int, count: int) -> None:
        """Like :meth:`write`, of the ``count`` bytes that are in ``pipe``, without reading them."""
        self._put(span, count, lambda done: _empty(pipe, self._handle, count - done, span.position + done))

    def _put(self, span: Span, count: int, put: Callable[[int], int]) -> None:
        """``put`` writes what comes after so many bytes, and says how many it wrote."""
        try:
            with self._writing:
                written = 0
                while written < count:
                    written += put(written)
        except OSError as error:
            if not is_full(error):
                raise
            raise full_error(error, self.path.parent) from None
        with self._lock:
            span.position += count
            self.received += count
            self._advance()
        self._record(span)

    def check_space(self) -> None:
        """PrepError when the missing bytes do not fit on the disk."""
        missing = self.size - self.received
        if missing > shutil.disk_usage(self.path.parent).free:
            raise no_space(self.path.parent, missing)

    def sum_up(self, sums: Sums) -> bool:
        """Feed ``sums`` the next bytes that are there, 16 MiB at most; False when there were none."""
        start = sums.position
        while sums.position < min(self.size, start + SPAN_BYTES):
            span = self.spans[sums.position // self._length]
            count = min(span.position - sums.position, READ_BYTES)
            if count <= 0:
                break
            count = os.preadv(self._handle, [self._buffer[:count]], sums.position)
            if count == 0:
                raise PrepError("was cut short by someone else", where=self.path, fix="Run the same command again")
            sums.update(self._buffer[:count])
        return sums.position > start

    def publish(self, target: Path, *, durable: bool) -> None:
        """Give the complete file its name."""
        os.ftruncate(self._handle, self.size)
        if durable:
            os.fsync(self._handle)
        os.replace(self.path, target)
        self.state_path.unlink(missing_ok=True)
        if durable:
            sync_path(target.parent)
        self.close()

    def discard(self) -> None:
        """Delete what has arrived."""
        self.state_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of the files; they stay, to be continued."""
        for handle in (self._handle, self._state):
            if handle >= 0:
                os.close(handle)
        self._handle = self._state = -1

    def abandon(self) -> None:
        """Let go of the files while a thread may still hold their numbers: what it writes goes nowhere."""
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for handle in (self._handle, self._state):
            os.dup2(nowhere, handle, inheritable=False)
        os.close(nowhere)
        self._handle = self._state = -1

    def _advance(self) -> None:
        while self._first < len(self.spans) and not self.spans[self._first].left:
            self._first += 1
        self.front = self.spans[self._first].position if self._first < len(self.spans) else self.size

    def _claim(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._busy()
        if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._handle))):
            self._busy()  # it was finished between our opening and our lock

    def _busy(self) -> NoReturn:
        raise PrepError("another run is fetching it", where=self.path, fix="Wait for that run, or stop it") from None

    def _load(self, single: bool) -> None:
        """Continue from the state on disk when it fits, else start at the first byte."""
        try:
            state: Any = json.loads(self.state_path.read_bytes())
            length, done, self.single = state["span_bytes"], state["done"], state["single"]
            fits = state["version"] == VERSION and state["identity"] == self._identity
            fits = fits and self.single in (True, single)  # a file of ranges is not continued without them
            fits = fits and (state["boot"] == _boot() or bool(self._checks.published()))
            fits = fits and all(type(number) is int and number >= 0 for number in (length, *done)) and length > 0
        except (OSError, ValueError, KeyError, TypeError):
            fits = False
        if fits and len(done) == -(-self.size // length):
            self._plan(length, done)
            last = max((span.position for span in self.spans if span.position > span.first), default=0)
            if all(span.position <= span.end for span in self.spans) and os.fstat(self._handle).st_size >= last:
                self._save(length)
                return
        self._restart(single)

    def _restart(self, single: bool) -> None:
        self.single = single
        length = max(1, self.size) if single else SPAN_BYTES
        self._plan(length, [0] * -(-self.size // length))
        self._save(length)
        if os.fstat(self._handle).st_size:  # an empty one would be written out at its closing, as one cut to nothing
            os.ftruncate(self._handle, 0)

    def _plan(self, length: int, done: list[int]) -> None:
        self._length = length
        self.spans = [
            Span(number, number * length, min(self.size, (number + 1) * length), number * length + count)
            for number, count in enumerate(done)
        ]
        self.received = sum(done)
        self._first = 0
        self._advance()

    def _save(self, length: int) -> None:
        """Write the state anew, under a temporary name; numbers are padded with blanks, which JSON allows."""
        head = {"version": VERSION, "identity": self._identity, "boot": _boot(), "span_bytes": length}
        text = json.dumps({**head, "single": self.single})[:-1] + ', "done": ['
        self._numbers_at = len(text.encode())
        text += ",".join(f"{span.position - span.first:{_DIGITS}}" for span in self.spans) + "]}\n"
        temporary = self.state_path.with_name(self.state_path.name + ".new")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.state_path)
        if self._state >= 0:
            os.close(self._state)
        self._state = os.open(self.state_path, os.O_WRONLY | os.O_CLOEXEC)

    def _record(self, span: Span) -> None:
        number = b"%*d" % (_DIGITS, span.position - span.first)
        os.pwrite(self._state, number, self._numbers_at + span.number * (_DIGITS + 1))


def arrived(target: Path) -> int:
    """How many bytes are there of a file that is to become ``target``; 0 when none was begun."""
    try:
        return sum(int(count) for count in json.loads(_state_path(target).read_bytes())["done"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _state_path(target: Path) -> Path:
    return target.with_name(target.name + ".part.json")


def _empty(pipe: int, handle: int, count: int, position: int) -> int:
    """Bytes moved out of a pipe; read and written where the filesystem cannot have them spliced in."""
    try:
        return os.splice(pipe, handle, count, offset_dst=position)
    except OSError as error:
        if error.errno not in NO_SPLICE:
            raise
    data, written = memoryview(os.read(pipe, count)), 0
    while written < len(data):
        written += os.pwrite(handle, data[written:], position + written)
    return written


def no_space(folder: Path, missing: int) -> PrepError:
    """The error of a disk that is too full; ``missing`` bytes are still to come."""
    free = human_bytes(shutil.disk_usage(folder).free)
    what = f"no space left: {human_bytes(missing)} still to come, {free} free"
    return PrepError(what, where=folder, fix="Free some space and run the same command again, it continues")


def _boot() -> str:
    """Names the time since the machine was started; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
