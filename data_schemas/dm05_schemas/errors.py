"""The one shape of an error message: where, what, and what to run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DM05Error(Exception):
    """An error a user can act on; its text is one line: ``WHERE: WHAT. FIX``.

    Args:
        what: what is wrong, without a full stop.
        where: the file (``path:line`` when a line is known), URL or flag at fault.
        fix: what to do or run next, without a full stop.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | Path | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, None if where is None else str(where), fix
        head = f"{where}: " if where is not None else ""
        super().__init__(f"{head}{what}. {fix}" if fix else f"{head}{what}")


class DataError(DM05Error):
    """A file of the contract (frame, index, statistics, pack, checkpoint) breaks it."""


class UsageError(DM05Error):
    """A command was called with words that do not go together (exit code 2)."""

    exit_code = 2


@contextmanager
def mending(fix: str) -> Iterator[None]:
    """A DataError of the block that does not know what to do then says ``fix``."""
    try:
        yield
    except DataError as error:
        if error.fix:
            raise
        raise DataError(error.what, where=error.where, fix=fix) from error
