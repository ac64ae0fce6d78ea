"""When to try again, after how long, and when to stop trying."""

from __future__ import annotations

import email.utils
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Generic, TypeVar

from dm05_prep.console import warn
from dm05_prep.errors import PrepError
from dm05_prep.sources.numbers import environment_number, whole_number

LONGEST_WAIT_S = 3600.0
DAY_S = 86400.0
_LOOK_S = 0.05
_RATE_LIMIT_RESET = re.compile(r";\s*t=(\d+)")
T = TypeVar("T")
RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class Stopped(PrepError):
    """The caller asked to stop; what has arrived is kept and is continued by the next run."""

    def __init__(self) -> None:
        super().__init__("stopped", fix="Run the same command again to continue")


class Trouble(Exception):
    """Something that may be over in a while.

    Args:
        reason: what happened, for the message that is shown if it does not pass.
        retry_after_s: what the server asked for.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_s = reason, retry_after_s


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Pauses of ``first_pause_s``, twice that, ... ``longest_pause_s``; ``tries`` in a row without progress fail.

    ``stall_s``: a connection that brings no byte for so long is opened anew; also the limit for connecting.
    """

    tries: int = 8
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    stall_s: float = 30.0

    @classmethod
    def from_environment(cls, stall_s: float | None = None) -> RetryPolicy:
        """The defaults, with $DM05_PREP_RETRY_TRIES, $DM05_PREP_RETRY_PAUSE_S and $DM05_PREP_STALL_S in their place."""
        return cls(
            tries=int(environment_number("DM05_PREP_RETRY_TRIES", cls.tries, least=1, most=1e6)),
            first_pause_s=environment_number("DM05_PREP_RETRY_PAUSE_S", cls.first_pause_s, least=0, most=DAY_S),
            stall_s=environment_number("DM05_PREP_STALL_S", stall_s or cls.stall_s, least=0.01, most=DAY_S),
        )


class Backoff:
    """Counts failures in a row of one thing that is tried again and again."""

    def __init__(self, policy: RetryPolicy, stop: threading.Event, notify: Callable[[str], None]) -> None:
        self._policy, self._stop, self._notify = policy, stop, notify
        self._failures = 0

    def progressed(self) -> None:
        """Enough new bytes came: the count starts again."""
        self._failures = 0

    def pause(self, trouble: Trouble, where: str, fix: str) -> None:
        """Wait before the next try.

        Raises:
            PrepError: this was the last try; the text has the reason, and ``fix``.
            Stopped: ``stop`` was set.
        """
        self._failures += 1
        if self._failures >= self._policy.tries:
            what = f"{trouble.reason} ({self._failures} tries without progress)"
            raise PrepError(what, where=where, fix=fix) from None
        pause = trouble.retry_after_s
        if pause is None:
            doubled = self._policy.first_pause_s * 2.0 ** (self._failures - 1)
            pause = min(doubled, self._policy.longest_pause_s) * random.uniform(0.75, 1.25)
        elif pause > LONGEST_WAIT_S:
            wait = f"{pause / 3600:.1f} hours" if pause < 10 * DAY_S else "for more than ten days"
            what = f"{trouble.reason}; the server asks to wait {wait}"
            raise PrepError(what, where=where, fix="Run the same command again then, it continues") from None
        if pause >= 5:
            number = f"try {self._failures + 1} of {self._policy.tries}"
            self._notify(f"{where}: {trouble.reason}; {number} in {pause:.0f} s")
        if self._stop.wait(pause):
            raise Stopped


class Background(Generic[T]):
    """A call in a thread of its own, that whoever waits for it may leave behind: it must change nothing of ours."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, stop: threading.Event | None = None) -> T:
        """What the call returned or raised; Stopped as soon as ``stop`` is set."""
        while self._thread.is_alive():
            if stop and stop.is_set():
                raise Stopped
            self._thread.join(_LOOK_S)
        if self._failure is not None:
            raise self._failure
        return self._value

    def _run(self) -> None:
        self._failure: BaseException | None = None
        try:
            self._value = self._call()
        except BaseException as failure:
            self._failure = failure


def retry_after(headers: Mapping[str, str] | Message) -> float | None:
    """Seconds that ``Retry-After`` (a number or a date) or the hub's ``RateLimit`` ask for; None if neither does."""
    text = (headers.get("Retry-After") or "").strip()
    reset = _RATE_LIMIT_RESET.search(headers.get("RateLimit") or "")
    if not text and reset:
        text = reset[1]
    seconds = whole_number(text)
    if seconds is not None:
        return float(seconds)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def persist(
    call: Callable[[], T],
    policy: RetryPolicy,
    *,
    where: str,
    fix: str,
    stop: threading.Event | None = None,
    notify: Callable[[str], None] = warn,
) -> T:
    """What ``call`` returns, called again after a pause as long as it raises Trouble; see :meth:`Backoff.pause`.

    When ``stop`` is set, this raises Stopped at once, also while ``call`` waits for an answer.
    """
    backoff = Backoff(policy, stop or threading.Event(), notify)
    while True:
        try:
            return Background(call).result(stop) if stop else call()
        except Trouble as trouble:
            backoff.pause(trouble, where, fix)
