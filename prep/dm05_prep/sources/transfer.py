"""One loop that brings one file, whatever the source: ranged GETs in parallel, resumed at the byte, summed on the way.

A file is cut into spans, which :mod:`dm05_prep.sources.streams` fetches. Here is when to begin again and when to give
up. Only a file that meets every published sum gets its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dm05_schemas.files import naming

from dm05_prep.console import warn
from dm05_prep.errors import PrepError
from dm05_prep.sources.access import Access, Changed, Expired, NoRange, open_span
from dm05_prep.sources.checks import file_differences
from dm05_prep.sources.connection import Pool
from dm05_prep.sources.partfile import PartFile, Span
from dm05_prep.sources.retry import RetryPolicy, Stopped, Trouble
from dm05_prep.sources.streams import Limits, Report, Run

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
        slots = threading.Semaphore(jobs)
        self._limits = Limits(jobs=jobs, policy=policy, notify=notify, pool=self.pool, slots=slots)

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
        report = Report(progress)
        if self._is_there(access, target, stop):
            report.reach(access.size)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        patience, single = _Patience(access), False
        while True:
            with naming(target):
                part = PartFile(target, access.size, access.checks, access.etag, single=single)
            try:
                part.check_space()
                with naming(part.path):
                    wrong = Run(self._limits, access, part, report, stop).go()
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
