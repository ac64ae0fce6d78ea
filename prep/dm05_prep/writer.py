"""Writing many small files: several threads, no copies of the data, never through a link.

File modes, owners and times of an archive are not applied.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_LARGE_BYTES = 8 << 20  # larger files are written piece by piece, not gathered in memory
_TASK_FILES = 64
_TASK_BYTES = 1 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_Task = list[tuple[str, str, bytes | memoryview]]  # folder, name in it, content


class TreeWriter:
    """Writes below ``root``; paths are relative to it and must have passed :class:`dm05_prep.names.Names`.

    Nothing may exist yet at a path that is written.

    Args:
        threads: writers at once; 0 writes in the caller's thread.
    """

    def __init__(self, root: Path, threads: int) -> None:
        self._root = f"{root}/"
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads), "writer")
        self._pending: deque[Future[None]] = deque()
        self._task: _Task = []
        self._task_bytes = 0
        self._folders: set[str] = {""}

    def folder(self, path: str) -> None:
        """Make a folder and those above it."""
        if path not in self._folders:
            os.makedirs(self._root + path, exist_ok=True)
            self._folders.add(path)

    def file(self, path: str, size: int, pieces: Iterable[memoryview]) -> None:
        """Write a file of ``size`` bytes; done at the latest on return of :meth:`wait`."""
        folder, _, name = path.rpartition("/")
        if folder not in self._folders:
            self.folder(folder)
        if size > _LARGE_BYTES:
            with _opened(self._root + folder) as handle:
                _write(handle, name, path, pieces)
            return
        gathered = tuple(pieces)
        self._task.append((folder, name, gathered[0] if len(gathered) == 1 else b"".join(gathered)))
        self._task_bytes += size
        if len(self._task) >= _TASK_FILES or self._task_bytes >= _TASK_BYTES:
            self._submit()

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link with the text ``target``."""
        self.folder(path.rpartition("/")[0])
        os.symlink(target, self._root + path)

    def same_file(self, path: str, existing: str) -> None:
        """Give the file ``existing``, written before, a second name."""
        self.wait()
        self.folder(path.rpartition("/")[0])
        os.link(self._root + existing, self._root + path, follow_symlinks=False)

    def wait(self) -> None:
        """Return when everything is written; raises the first OSError of a writer."""
        self._submit()
        while self._pending:
            self._pending[0].result()
            self._pending.popleft()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> None:
        task, self._task, self._task_bytes = self._task, [], 0
        if not task:
            return
        if not self._threads:
            self._write_all(task)
            return
        self._pending.append(self._pool.submit(self._write_all, task))
        if len(self._pending) > 2 * self._threads:
            self._pending[0].result()
            self._pending.popleft()

    def _write_all(self, task: _Task) -> None:
        for folder, group in itertools.groupby(task, key=operator.itemgetter(0)):
            with _opened(self._root + folder) as handle:
                for _, name, data in group:
                    _write(handle, name, f"{folder}/{name}", (data,))


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _write(folder: int, name: str, path: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a new file in the open ``folder``; ``path`` is for messages."""
    try:
        file = os.open(name, _CREATE, 0o666, dir_fd=folder)
        try:
            for piece in pieces:
                written = os.write(file, piece)
                while written < len(piece):
                    written += os.write(file, memoryview(piece)[written:])
        finally:
            os.close(file)
    except OSError as error:
        error.filename = path
        raise
