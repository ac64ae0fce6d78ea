"""The threads of one pass over one file: one span each at a time, sums beside them, a caller that is not outrun.

Workers write what arrives in place; a thread takes the sums over the bytes in order, from the page cache, as the part
without holes grows. Workers never run far ahead of that thread, nor of the caller's ``progress``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from dm05_prep.sources.access import Access, Expired, NoRange, open_span
from dm05_prep.sources.carry import Carrier
from dm05_prep.sources.checks import Sums
from dm05_prep.sources.connection import Link, Pool, Reply
from dm05_prep.sources.partfile import PartFile, Span
from dm05_prep.sources.retry import Backoff, RetryPolicy, Stopped, Trouble

UNSUMMED_BYTES = 128 << 20
UNREPORTED_BYTES = 64 << 20
TICK_S = 0.05
JOIN_S = 0.4
SLOWEST_BYTES_PER_S = 64
PROGRESS_BYTES = 256 << 10  # over all tries that are allowed in a row; whoever sends less is not waited for


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all transfers of a source share: connections, at most ``jobs`` at once by ``slots``, and patience."""

    jobs: int
    policy: RetryPolicy
    notify: Callable[[str], None]
    pool: Pool
    slots: threading.Semaphore


class Report:
    """Tells the caller about bytes, each once, also when a file is started again."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self.reached = 0

    def attempt(self) -> Callable[[int], None]:
        """A progress for one way of fetching the file, which counts from its first byte."""
        counted = 0

        def progress(count: int) -> None:
            nonlocal counted
            counted += count
            self.reach(counted)

        return progress

    def reach(self, received: int) -> None:
        """So many bytes are there now."""
        if received > self.reached:
            new, self.reached = received - self.reached, received
            self._progress(new)


class Run:
    """The threads of one pass over one file. The calling thread reports, watches ``stop`` and ends the others."""

    def __init__(self, limits: Limits, access: Access, part: PartFile, report: Report, stop: threading.Event) -> None:
        self._limits, self._access, self._part, self._report, self._stop = limits, access, part, report, stop
        self._halt, self._tick, self._grown = threading.Event(), threading.Event(), threading.Event()
        self._eased = threading.Condition()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._links: set[Link] = set()
        self._answered = False
        self._odd_answers = 0
        self._sums = Sums(access.checks, part.size)
        self._unsummed_limit = part.size if not access.checks.published() else UNSUMMED_BYTES + part.received

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
                self._ease()
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
        return min(self._limits.jobs, sum(1 for span in self._part.spans if span.left))

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
        while self._access.checks.published() and self._sums.position < self._part.size and not self._halt.is_set():
            if self._part.sum_up(self._sums):
                self._ease()
            else:
                self._grown.wait(TICK_S)
                self._grown.clear()

    def _work(self) -> None:
        with closing(Carrier()) as carrier:
            while (span := self._next()) is not None:
                self._fill(span, carrier)

    def _next(self) -> Span | None:
        with self._lock:
            for span in self._part.spans:
                if span.left and not span.taken:
                    span.taken = True
                    return span
        return None

    def _fill(self, span: Span, carrier: Carrier) -> None:
        """Bring the rest of one span, through whatever trouble there is."""
        backoff = Backoff(self._limits.policy, self._halt, self._limits.notify)
        renewed, counted = False, self._part.received
        while span.left:
            position = span.position
            try:
                self._stream(span, carrier)
            except Trouble as trouble:
                if self._part.received >= counted + PROGRESS_BYTES:
                    counted = self._part.received
                    backoff.progressed()
                backoff.pause(trouble, self._access.where, self._access.network_fix)
            except Expired as expired:
                if renewed and span.position == position:
                    raise expired.error from None
                renewed = True
                self._access.renew(expired.url)

    def _stream(self, span: Span, carrier: Carrier) -> None:
        with self._slot(), self._answer(span) as reply:
            marked_at, marked = time.monotonic(), span.position
            stall_s = self._limits.policy.stall_s
            while span.left:
                self._throttle()
                trouble = carrier.carry(reply, self._part, span)
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
                reply = open_span(self._limits.pool, self._access, span, whole=self._part.single, opened=opened)
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
        while not self._limits.slots.acquire(timeout=TICK_S):
            if self._halt.is_set():
                raise Stopped
        try:
            yield
        finally:
            self._limits.slots.release()

    def _throttle(self) -> None:
        """Wait while the sums, or the caller's ``progress``, are too far behind."""
        if self._is_ahead():
            with self._eased:
                while self._is_ahead() and not self._halt.is_set():
                    self._eased.wait(TICK_S)

    def _is_ahead(self) -> bool:
        unsummed = self._part.front - self._sums.position
        return unsummed > self._unsummed_limit or self._part.received - self._report.reached > UNREPORTED_BYTES

    def _ease(self) -> None:
        with self._eased:
            self._eased.notify_all()
