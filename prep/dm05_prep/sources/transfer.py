"""One loop that brings one file, whatever the source: ranged GETs in parallel, resumed at the byte, summed on the way.

A file is cut into spans. Each worker asks for one span at a time over a kept connection and writes it in place; a
thread takes the sums over the bytes in order, from the page cache, as the part without holes grows. Workers never run
far ahead of that thread, nor of the caller's ``progress``. Only a file that meets every published sum gets its name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dm05_prep.console import warn
from dm05_prep.errors import PrepError
from dm05_prep.sources.access import Access, Changed, Expired, NoRange, open_span
from dm05_prep.sources.checks import Sums, file_differences
from dm05_prep.sources.connection import Link, Pool, Reply
from dm05_prep.sources.partfile import SPAN_BYTES, PartFile, Span
from dm05_prep.sources.retry import Backoff, RetryPolicy, Stopped, Trouble

BUFFER_BYTES = 1 << 20
WRITE_BYTES = 256 << 10
WRITE_AFTER_S = 0.25
UNREPORTED_BYTES = 64 << 20
TICK_S = 0.05
JOIN_S = 0.4
SLOWEST_BYTES_PER_S = 64
MAX_CHANGES = 3


class Transfer:
    """Connections and limits shared by all files of a source; files may be fetched from several threads.

    Args:
        jobs: connections at once, over all files.
        notify: told, in one line, about waits and restarts.
    """

    def __init__(self, *, jobs: int, policy: RetryPolicy, notify: Callable[[str], None] = warn) -> None:
        self.jobs, self.policy, self.notify = jobs, policy, notify
        self.pool = Pool(policy.stall_s)
        self.slots = threading.Semaphore(jobs)

    def fetch(
        self,
        access: Access,
        target: Path,
        *,
        progress: Callable[[int], None],
        stop: threading.Event,
        durable: bool = False,
    ) -> Path:
        """Bring the file of ``access`` to ``target``, complete and verified.

        Args:
            progress: told the number of new bytes, from this thread; while it blocks, the transfer soon pauses.
            stop: ends the call with :class:`Stopped`; what has arrived stays beside ``target``.
            durable: have the bytes on the disk before the file gets its name. Always so without a published sum.

        Raises:
            PrepError: the file cannot be had; the text has the reason.
            Stopped: ``stop`` was set.
        """
        report = _Report(progress)
        if self._is_there(access, target, stop):
            report.reach(access.size)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        patience, single = _Patience(access), False
        while True:
            part = PartFile(target, access.size, access.checks, access.etag, single=single)
            try:
                part.check_space()
                wrong = _Run(self, access, part, report, stop).go()
                if not wrong:
                    part.publish(target, durable=durable or not access.checks.published())
                    return target
                part.discard()
                patience.wrong_sums(wrong)
                self.notify(f"{access.where}: {'; '.join(wrong)}; fetching it once more")
            except NoRange as odd:
                patience.odd_answer(odd, self.policy.tries)
                part.discard()
                single = True
            except Changed as change:
                if patience.is_another(change):
                    self.notify(f"{access.where}: {change.reason}; starting it again")
                    part.discard()
            finally:
                part.close()

    def probe(self, access: Access) -> Probe:
        """Ask for the first byte, once, without storing anything.

        Raises:
            PrepError: the byte did not come.
        """
        span = Span(0, 0, min(1, access.size), 0)
        try:
            reply = open_span(self.pool, access, span, whole=False, opened=lambda link: None)
        except NoRange:
            return Probe(host=access.where, ranges=False)
        except (Trouble, Changed) as failure:
            raise PrepError(failure.reason, where=access.where, fix=access.network_fix) from None
        except Expired as expired:
            raise expired.error from None
        reply.finish()
        return Probe(host=urlsplit(reply.url).netloc, ranges=True)

    def _is_there(self, access: Access, target: Path, stop: threading.Event) -> bool:
        if not target.is_file():
            return False
        wrong = file_differences(target, access.size, access.checks, stop)
        if wrong is None:
            raise Stopped
        if wrong:
            target.unlink()
        return not wrong


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How the first byte of a file came: from which host, and whether it keeps to ranges."""

    host: str
    ranges: bool


class _Patience:
    """How often a file has been started again, and when that is enough: each method raises PrepError then."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._wrong_sums = self._odd_answers = self._changes = 0

    def wrong_sums(self, wrong: list[str]) -> None:
        """All bytes came and do not meet their sums: maybe the file was replaced, else it gets a second chance."""
        if self._is_new():
            self._count_change("the object was replaced")
            return
        self._wrong_sums += 1
        if self._wrong_sums > 1:
            what = f"wrong bytes arrived twice: {'; '.join(wrong)}"
            fix = "A proxy or mirror may spoil it: try another source"
            raise PrepError(what, where=self._access.where, fix=fix) from None

    def odd_answer(self, odd: NoRange, limit: int) -> None:
        """The server does not keep to ranges."""
        self._odd_answers += 1
        if self._odd_answers > limit:
            raise PrepError(odd.reason, where=self._access.where, fix=self._access.network_fix) from None

    def is_another(self, change: Changed) -> bool:
        """True when what has arrived is of no use: other metadata, or the second such answer with the same ones."""
        self._count_change(change.reason)
        return self._is_new() or self._changes > 1

    def _count_change(self, reason: str) -> None:
        self._changes += 1
        if self._changes > MAX_CHANGES:
            fix = "Run again when the source has settled"
            raise PrepError(f"{reason} ({self._changes} times)", where=self._access.where, fix=fix) from None

    def _is_new(self) -> bool:
        """Ask for the metadata again; True when they belong to another version now."""
        access = self._access
        before = (access.size, access.etag, access.checks)
        access.refresh()
        return before != (access.size, access.etag, access.checks)


class _Report:
    """Tells the caller about bytes, each once, also when a file is started again."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self.reached = 0

    def reach(self, received: int) -> None:
        if received > self.reached:
            new, self.reached = received - self.reached, received
            self._progress(new)


class _Run:
    """The threads of one pass over one file. The calling thread reports, watches ``stop`` and ends the others."""

    def __init__(
        self, transfer: Transfer, access: Access, part: PartFile, report: _Report, stop: threading.Event
    ) -> None:
        self._transfer, self._access, self._part, self._report, self._stop = transfer, access, part, report, stop
        self._halt, self._tick, self._grown = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._links: set[Link] = set()
        self._answered = False
        self._odd_answers = 0
        self._sums = Sums(access.checks, part.size)
        self._lead = (transfer.jobs + 2) * SPAN_BYTES + part.received

    def go(self) -> list[str]:
        """Bring all bytes; the published sums that are not met."""
        threads = [threading.Thread(target=self._guard, args=(self._sum,), daemon=True)]
        threads += [threading.Thread(target=self._guard, args=(self._work,), daemon=True) for _ in range(self._width())]
        leader = min(2, len(threads))  # the sums, and one worker that finds out whether the server knows ranges
        started = threads[:leader]
        try:
            for thread in started:
                thread.start()
            while any(thread.is_alive() for thread in started):
                self._tick.wait(TICK_S)
                self._tick.clear()
                self._report.reach(self._part.received)
                if self._stop.is_set():
                    raise Stopped
                if self._failure is not None:
                    raise self._failure
                if self._answered and len(started) < len(threads):
                    for thread in threads[leader:]:
                        thread.start()
                    started = threads
        finally:
            self._end(started)
        if self._failure is not None:
            raise self._failure
        self._report.reach(self._part.received)
        return self._sums.differences()

    def _width(self) -> int:
        return min(self._transfer.jobs, sum(1 for span in self._part.spans if span.left))

    def _end(self, threads: list[threading.Thread]) -> None:
        """Have all threads gone: cut what they wait for. One that hangs in a name look-up is left behind, harmless."""
        self._halt.set()
        with self._lock:
            for link in self._links:
                link.cut()
        until = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self._part.abandon()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._lock:
                if self._failure is None and not self._halt.is_set():
                    self._failure = error
        finally:
            self._tick.set()

    def _sum(self) -> None:
        while self._sums.position < self._part.size and not self._halt.is_set():
            if not self._part.sum_up(self._sums):
                self._grown.wait(TICK_S)
                self._grown.clear()

    def _work(self) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        while (span := self._next()) is not None:
            self._fill(span, buffer)

    def _next(self) -> Span | None:
        with self._lock:
            for span in self._part.spans:
                if span.left and not span.taken:
                    span.taken = True
                    return span
        return None

    def _fill(self, span: Span, buffer: memoryview) -> None:
        """Bring the rest of one span, through whatever trouble there is."""
        backoff = Backoff(self._transfer.policy, self._halt, self._transfer.notify)
        renewed = False
        while span.left:
            received, position = self._part.received, span.position
            try:
                self._stream(span, buffer)
            except Trouble as trouble:
                if self._part.received > received:
                    backoff.progressed()
                backoff.pause(trouble, self._access.where, self._access.network_fix)
            except Expired as expired:
                if renewed and span.position == position:
                    raise expired.error from None
                renewed = True
                self._access.renew(expired.url)

    def _stream(self, span: Span, buffer: memoryview) -> None:
        with self._slot(), self._answer(span) as reply:
            marked_at, marked = time.monotonic(), span.position
            stall_s = self._transfer.policy.stall_s
            while span.left:
                self._throttle(span)
                count, trouble = _receive(reply, buffer[: span.left])
                if count:
                    self._part.write(span, buffer[:count])
                    self._grown.set()
                    if self._part.received - self._report.reached > UNREPORTED_BYTES // 4:
                        self._tick.set()
                if self._halt.is_set():
                    raise Stopped
                if trouble:
                    raise trouble
                if reply.complete:  # of the span, or of as much of it as the server gives at once
                    return
                if time.monotonic() - marked_at > stall_s:
                    if span.position - marked < stall_s * SLOWEST_BYTES_PER_S:
                        raise Trouble(f"fewer than {SLOWEST_BYTES_PER_S} bytes a second came")
                    marked_at, marked = time.monotonic(), span.position

    @contextmanager
    def _answer(self, span: Span) -> Iterator[Reply]:
        """The body that starts at the position of ``span``."""
        links: list[Link] = []

        def opened(link: Link) -> None:
            links.append(link)
            with self._lock:
                self._links.add(link)
            if self._halt.is_set():
                raise Stopped

        try:
            try:
                reply = open_span(self._transfer.pool, self._access, span, whole=self._part.single, opened=opened)
            except NoRange as odd:
                self._odd_answers += 1
                if self._part.received and self._odd_answers == 1:  # one node of many may be at fault
                    raise Trouble(odd.reason) from None
                raise
            self._answered = True
            try:
                yield reply
            finally:
                reply.finish()
        finally:
            with self._lock:
                self._links.difference_update(links)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        while not self._transfer.slots.acquire(timeout=TICK_S):
            if self._halt.is_set():
                raise Stopped
        try:
            yield
        finally:
            self._transfer.slots.release()

    def _throttle(self, span: Span) -> None:
        """Wait while the sums, or the caller's ``progress``, are too far behind."""
        while not self._halt.is_set():
            ahead = span.position - self._sums.position > self._lead
            if not ahead and self._part.received - self._report.reached <= UNREPORTED_BYTES:
                return
            time.sleep(TICK_S / 10)


def _receive(reply: Reply, view: memoryview) -> tuple[int, Trouble | None]:
    """Bytes for one write, and the trouble that ended them early, if any."""
    filled = 0
    until = time.monotonic() + WRITE_AFTER_S
    while filled < min(WRITE_BYTES, len(view)) and (not filled or time.monotonic() < until):
        try:
            count = reply.readinto(view[filled:])
        except Trouble as trouble:
            return filled, trouble
        if count == 0:
            return filled, None if reply.complete else Trouble("the body broke off early")
        filled += count
    return filled, None
