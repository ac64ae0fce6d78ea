"""What a person sees while a stage works: one line a stage, and a bar on anything over a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from tqdm import tqdm

    Progress: TypeAlias = tqdm[Any]


def progress(total: int | None, unit: str, desc: str, quiet: bool = False, initial: int = 0) -> Progress:
    """A bar on stderr that shows up after one second; none when stderr is no terminal or ``quiet``.

    Args:
        total: number of units to come, None when unknown.
        unit: "B" is shown in KiB, MiB, GiB; any other unit as it is.
        desc: what is counted.
        initial: units done by an earlier run.
    """
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
        disable=quiet or not sys.stderr.isatty(),
        file=sys.stderr,
    )


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
