"""One run at a time in a workspace: ``WORKSPACE/.dm05-prep.lock``, locked for as long as the process lives."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from dm05_prep.console import warn
from dm05_prep.errors import PrepError

LOCK_NAME = ".dm05-prep.lock"


class WorkspaceLock:
    """Context manager; the file holds who it is, and is gone when nobody works here.

    A folder that this process cannot write to is not locked: there is nothing that it could do there.

    Raises:
        PrepError: another process holds it; the text says which.
    """

    def __init__(self, workspace: Path) -> None:
        self._path = workspace / LOCK_NAME
        self._file = -1

    def __enter__(self) -> WorkspaceLock:
        while self._file < 0:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError:
                if os.access(self._path.parent, os.W_OK):
                    raise
                return self
            if self._try(file) and self._is_current(file):
                self._file = file
            else:
                os.close(file)
        program = Path(sys.argv[0]).name
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": " ".join(["dm05-prep" if program == "__main__.py" else program, *sys.argv[1:]])[:500],
        }
        with suppress(OSError):  # a full disk: only the name of the holder would be missed
            os.truncate(self._file, 0)
            os.pwrite(self._file, json.dumps(holder).encode(), 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def _try(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._held(file) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            warn(f"{self._path.parent}: this filesystem has no locks; see to it that no other run works here")
        return True

    def _is_current(self, file: int) -> bool:
        """False when the holder before us removed the file between our open and our lock."""
        try:
            return os.stat(self._path).st_ino == os.fstat(file).st_ino
        except FileNotFoundError:
            return False

    def _held(self, file: int) -> PrepError:
        try:
            holder = json.loads(os.pread(file, 4096, 0))
            who = f"process {holder['pid']} on {holder['host']} since {holder['since']} ({holder['command']})"
        except (ValueError, KeyError, TypeError):
            who = "a process that has just started"
        finally:
            os.close(file)
        return PrepError(
            f"another run works in this workspace: {who}", where=self._path.parent, fix="Wait for it to end"
        )
