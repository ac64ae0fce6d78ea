"""What a person sees while a stage works: one line a stage, and a bar on anything over a second.

Where stderr is no terminal, as with nohup and in CI, a long stage says in a plain line now and then how far it is.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tqdm import tqdm

    Progress: TypeAlias = "tqdm[Any] | LogLines"

FIRST_LINE_S = 30.0
LINE_EVERY_S = 60.0


def progress(total: int | None, unit: str, desc: str, quiet: bool = False, initial: int = 0) -> Progress:
    """A bar on stderr that shows up after one second; lines for a log when stderr is no terminal, none if ``quiet``.

    Args:
        total: number of units to come, None when unknown.
        unit: "B" is shown in KiB, MiB, GiB; any other unit as it is.
        desc: what is counted.
        initial: units done by an earlier run.
    """
    if not quiet and not sys.stderr.isatty():
        return LogLines(total, unit, desc, initial)
    from tqdm import tqdm

    in_bytes = unit == "B"
    return tqdm(
        total=total,
        unit=unit if in_bytes else f" {unit}",
        unit_scale=in_bytes,
        unit_divisor=1024 if in_bytes else 1000,
        desc=desc,
        initial=initial,
        delay=1.0,
        mininterval=0.2,
        dynamic_ncols=True,
        disable=quiet,
        file=sys.stderr,
    )


class LogLines:
    """What of a bar is used here, saying ``download: 3.0 GiB of 34.9 GiB (9%), 50.0 MiB/s, 10 min 52 s left`` at times.

    No thread watches: a line comes with the first update after it is due.
    """

    def __init__(self, total: int | None, unit: str, desc: str, initial: int) -> None:
        self.n: float = initial
        self._total, self._unit, self._desc = total, unit, desc
        self._more = ""
        self._started = time.monotonic()
        self._mark: tuple[float, float] = (self._started, initial)
        self._due = self._started + FIRST_LINE_S / 3  # until then an earlier run's work is counted: that is no rate

    def __enter__(self) -> LogLines:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """``text`` ends the lines to come."""
        self._more = f", {text}"

    def update(self, count: float = 1) -> None:
        """So many units more are done."""
        self.n += count
        now = time.monotonic()
        if now < self._due:
            return
        if now < self._started + FIRST_LINE_S:
            self._due = self._started + FIRST_LINE_S
            self._mark = (now, self.n)
            return
        self._due = now + LINE_EVERY_S
        sys.stderr.write(f"{self._line(now)}\n")
        sys.stderr.flush()

    def _line(self, now: float) -> str:
        show = human_bytes if self._unit == "B" else "{:,.0f}".format
        since, before = self._mark
        rate = (self.n - before) / max(now - since, 1e-6)
        unit = "" if self._unit == "B" else f" {self._unit}"
        if not self._total:
            return f"{self._desc}: {show(self.n)}{unit}, {show(rate)}/s{self._more}"
        share = f"{show(self.n)} of {show(self._total)}{unit} ({int(100 * self.n / self._total)}%)"
        known = self.n - before >= self._total / 100 and self.n < self._total  # a few first bytes foretell nothing
        left = f", {human_time((self._total - self.n) / rate)} left" if known else ""
        return f"{self._desc}: {share}, {show(rate)}/s{left}{self._more}"


def say(text: str, quiet: bool = False) -> None:
    """One line on stdout, kept clear of a running bar."""
    if not quiet:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


def warn(text: str) -> None:
    """One line on stderr that ``--quiet`` does not silence."""
    from tqdm import tqdm

    tqdm.write(f"warning: {text}", file=sys.stderr)


def human_bytes(count: float) -> str:
    """``1536 -> "1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_time(seconds: float) -> str:
    """``0.42 -> "0.4 s"``, ``75 -> "1 min 15 s"``, ``7260 -> "2 h 1 min"``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
