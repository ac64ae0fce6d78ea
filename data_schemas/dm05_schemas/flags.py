"""Flags of a command read into its dataclass; a wrong one becomes an error of one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from dm05_schemas.errors import UsageError

T = TypeVar("T")


def parse_flags(
    kind: type[T],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str | None,
    default: T | None = None,
    config: Sequence[Any] = (),
) -> T:
    """An instance of the dataclass ``kind`` from flags laid over ``default``; ``--help`` prints and exits 0.

    Raises:
        UsageError: an unknown flag (the nearest real one is offered), a value that does not fit, or an empty one.
    """
    import tyro

    _refuse_empty(arguments)
    laid_over: dict[str, Any] = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            read: T = tyro.cli(
                kind, args=list(arguments), prog=prog, description=description, config=tuple(config), **laid_over
            )
            return read
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _usage_error(complaint.getvalue(), prog) from None


def _refuse_empty(arguments: Sequence[str]) -> None:
    """No flag has a use for an empty value; as a path it would name the current folder, which nobody asked for."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        flag, equals, value = word.partition("=")
        if not word.strip():
            flag = before if before.startswith("--") else "an argument"
        elif not (word.startswith("--") and equals and not value.strip()):
            continue
        raise UsageError("an empty value", where=flag, fix="Give a value, or leave it out for the default")


def _usage_error(box: str, prog: str) -> UsageError:
    """The sentence inside the frame that tyro draws around its errors, and the flag it would have expected.

    Where the terminal has no box characters the title stands above the first rule, else it is part of the frame.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box).strip()
    rows = [line.strip("│| ") for line in plain.splitlines() if not line.startswith(("╭", "╰", "+"))]
    sections: list[list[str]] = [[]]
    for row in rows:
        if re.fullmatch(r"[─-]{4,}", row):
            sections.append([])
        else:
            sections[-1].append(row)
    if not plain.startswith(("╭", "+")):
        sections = sections[1:] or sections
    sentence = " ".join(" ".join(sections[0]).split()).rstrip(".")
    meant = [row.split()[0] for section in sections[1:] for row in section if re.match(r"--\w", row)]
    said = re.split(r"[\s,:]+", sentence)
    offer = f"Did you mean {meant[0]}? " if meant and meant[0] not in said else ""
    return UsageError(sentence or "wrong flags", fix=f"{offer}See: {prog} --help")
