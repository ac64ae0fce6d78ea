"""Numbers in headers and in the environment, where anything may stand."""

from __future__ import annotations

import os
import re

from dm05_schemas.errors import UsageError

_WHOLE = re.compile("[0-9]{1,18}")


def whole_number(text: str) -> int | None:
    """``text`` as a number of at least 0; None for any other text, also for digits of other scripts."""
    return int(text) if _WHOLE.fullmatch(text) else None


def environment_number(name: str, default: float, *, least: float, most: float) -> float:
    """The number that the environment variable ``name`` holds, ``default`` when it is not set.

    Raises:
        UsageError: no number, or not one from ``least`` to ``most``.
    """
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        what = f"is {text!r}, not a number from {least:g} to {most:g}"
        raise UsageError(what, where=f"${name}", fix="Correct or unset it")
    return value
