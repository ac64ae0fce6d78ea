"""What a source publishes about the bytes of a file, and the sums computed from them on the way.

A size alone proves nothing: both SDKs accept bodies of the right length with wrong bytes in them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from dm05_prep.hasher import SUMS, read_file


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Published sums of one file: lower-case hex, or unsigned numbers; None where the source says nothing.

    ``git_sha1`` is the name git gives a blob: the sha1 of ``blob <size>\\0`` and the bytes.
    """

    sha256: str | None = None
    md5: str | None = None
    git_sha1: str | None = None
    crc32: int | None = None
    crc32c: int | None = None

    def published(self) -> dict[str, str | int]:
        """The sums that are there, by name."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


class Sums:
    """The sums that ``checks`` asks for, over bytes given in order."""

    def __init__(self, checks: Checks, size: int) -> None:
        self._checks, self._size = checks, size
        self.restart()

    def restart(self) -> None:
        """Begin again at the first byte."""
        self.position = 0
        self._sums = {name: SUMS[name](self._size) for name in self._checks.published()}

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        for algorithm in self._sums.values():
            algorithm.update(data)
        self.position += len(data)

    def differences(self) -> list[str]:
        """One text a published sum that is not met, naming both values; empty when all agree."""
        wrong = []
        for name, expected in self._checks.published().items():
            found = self._sums[name].value()
            if found != expected:
                wrong.append(f"{name} is {found}, published is {expected}")
        return wrong


def file_differences(
    path: Path,
    size: int,
    checks: Checks,
    stop: threading.Event,
    *,
    progress: Callable[[int], object] | None = None,
) -> list[str] | None:
    """Like :meth:`Sums.differences` for a whole file, with its size; None when ``stop`` was set on the way.

    ``progress`` is told the number of bytes read since it was told last.
    """
    actual = path.stat().st_size
    if actual != size:
        return [f"size is {actual}, published is {size}"]
    sums, told = Sums(checks, size), 0

    def keep_on(done: int) -> bool:
        nonlocal told
        if progress is not None:
            progress(done - told)
            told = done
        return not stop.is_set()

    if checks.published() and not read_file(str(path), sums.update, keep_on):
        return None
    return sums.differences()
