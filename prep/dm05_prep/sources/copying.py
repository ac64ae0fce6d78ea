"""Copies of files that are on this machine already, summed on the way."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from dm05_schemas.files import naming

from dm05_prep.hasher import READ_BYTES
from dm05_prep.sources.checks import Checks, Sums
from dm05_prep.sources.partfile import no_space
from dm05_prep.sources.retry import Stopped


def copy_verified(
    path: Path, target: Path, size: int, checks: Checks, *, progress: Callable[[int], None], stop: threading.Event
) -> list[str]:
    """Copy ``path`` to ``target`` under a temporary name, on the disk before it is renamed.

    Returns:
        what is wrong with the bytes; then there is no ``target``. Empty when all is well.

    Raises:
        PrepError: no space. Stopped: ``stop`` was set.
    """
    found = path.stat().st_size
    if found != size:
        return [f"size is {found}, published is {size}"]
    target.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(target.parent).free < size:
        raise no_space(target.parent, size)
    temporary = target.with_name(target.name + ".copy")
    sums, buffer = Sums(checks, size), memoryview(bytearray(READ_BYTES))
    try:
        with naming(temporary), path.open("rb", buffering=0) as source, temporary.open("wb") as copy:
            while count := source.readinto(buffer):
                if stop.is_set():
                    raise Stopped
                sums.update(buffer[:count])
                copy.write(buffer[:count])
                progress(count)
            copy.flush()
            os.fsync(copy.fileno())
        wrong = sums.differences()
        if sums.position != size:
            wrong.append(f"only {sums.position} of {size} bytes could be read")
        if not wrong:
            os.replace(temporary, target)
        return wrong
    finally:
        temporary.unlink(missing_ok=True)
