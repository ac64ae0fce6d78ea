"""Writing many small files; what lies in a part as it is goes from file to file inside the system.

File modes, owners and times of an archive are not applied, nothing is written through a link, and nothing may exist yet
at a path that is written.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import operator
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_TASK_FILES = 64
_TASK_BYTES = 8 << 20
_COPY_BYTES = 8 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CANNOT_SEND = (errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.EOPNOTSUPP)


_Copy = tuple[str, str, int, int]  # folder, name in it, offset and size of the data in the part


class TreeWriter:
    """Writes below ``root``; paths are relative to it and must have passed :class:`dm05_prep.names.Names`.

    Args:
        threads: copies at once; 0 copies in the caller's thread.
    """

    def __init__(self, root: Path, threads: int) -> None:
        self._root = f"{root}/"
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads), "writer")
        self._pending: deque[Future[None]] = deque()
        self._part = Path()
        self._task: list[_Copy] = []
        self._task_bytes = 0
        self._folders: set[str] = {""}

    def folder(self, path: str) -> None:
        """Make a folder and those above it."""
        if path not in self._folders:
            os.makedirs(self._root + path, exist_ok=True)
            self._folders.add(path)

    def file(self, path: str, pieces: Iterable[bytes]) -> None:
        """Write a file of what ``pieces`` give."""
        folder, _, name = path.rpartition("/")
        self.folder(folder)
        with _opened(self._root + folder) as handle:
            file = os.open(name, _CREATE, 0o666, dir_fd=handle)
        try:
            for piece in pieces:
                _write(file, piece)
        except OSError as error:
            error.filename = path
            raise
        finally:
            os.close(file)

    def copy(self, path: str, part: Path, offset: int, size: int) -> None:
        """Write a file of ``size`` bytes that lie at ``offset`` in ``part``; done on return of :meth:`wait`."""
        folder, _, name = path.rpartition("/")
        if folder not in self._folders:
            self.folder(folder)
        if part is not self._part or len(self._task) >= _TASK_FILES or self._task_bytes >= _TASK_BYTES:
            self._submit()
            self._part = part
        self._task.append((folder, name, offset, size))
        self._task_bytes += size

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
            self._copy_all(self._part, task)
            return
        self._pending.append(self._pool.submit(self._copy_all, self._part, task))
        if len(self._pending) > 4 * self._threads:
            self._pending[0].result()
            self._pending.popleft()

    def _copy_all(self, part: Path, task: list[_Copy]) -> None:
        source = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for folder, copies in itertools.groupby(task, key=operator.itemgetter(0)):
                with _opened(self._root + folder) as handle:
                    for _, name, offset, size in copies:
                        try:
                            file = os.open(name, _CREATE, 0o666, dir_fd=handle)
                            try:
                                _copy(source, file, offset, size)
                            finally:
                                os.close(file)
                        except OSError as error:
                            error.filename = f"{folder}/{name}"
                            raise
        finally:
            os.close(source)


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def _copy(source: int, file: int, offset: int, size: int) -> None:
    while size:
        try:
            count = os.sendfile(file, source, offset, min(size, _COPY_BYTES))
        except OSError as error:
            if error.errno not in _CANNOT_SEND:
                raise
            data = os.pread(source, min(size, _COPY_BYTES), offset)
            _write(file, data)
            count = len(data)
        if not count:
            raise OSError(errno.EIO, "a part became shorter while it was read")
        offset += count
        size -= count


def _write(file: int, data: bytes) -> None:
    written = os.write(file, data)
    while written < len(data):
        written += os.write(file, memoryview(data)[written:])
