"""Copying the data of members from a part into files of their own; also runs as a helper process of the writer.

As a process, whose argument is the root, it takes tasks ``(part, [(folder, name, offset, size), ...])``.
"""

from __future__ import annotations

import errno
import itertools
import operator
import os
import sys

from dm05_prep.pipe import serve, write_all

Copy = tuple[str, str, int, int]
"""Folder below the root, name in it, offset and size of the data in the part."""

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_STEP_BYTES = 8 << 20
_CANNOT_SEND = (errno.EINVAL, errno.ENOSYS, errno.ENOTSOCK, errno.EOPNOTSUPP)


def copy_files(root: str, part: str, copies: list[Copy], parent: int = 0) -> None:
    """Make new files of stretches of ``part``; their folders are there.

    Args:
        parent: stop when this is no longer the parent process, 0 for never.

    Raises:
        OSError: with the path, below ``root``, of the file that could not be written.
    """
    source = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for folder, group in itertools.groupby(copies, key=operator.itemgetter(0)):
            handle = os.open(f"{root}/{folder}", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                for _, name, offset, size in group:
                    if parent and os.getppid() != parent:
                        sys.exit(1)
                    try:
                        file = os.open(name, CREATE, 0o666, dir_fd=handle)
                        try:
                            _copy(source, file, offset, size)
                        finally:
                            os.close(file)
                    except OSError as error:
                        error.filename = f"{folder}/{name}"
                        raise
            finally:
                os.close(handle)
    finally:
        os.close(source)


def _copy(source: int, file: int, offset: int, size: int) -> None:
    while size:
        try:
            count = os.sendfile(file, source, offset, min(size, _STEP_BYTES))
        except OSError as error:
            if error.errno not in _CANNOT_SEND:
                raise
            data = os.pread(source, min(size, _STEP_BYTES), offset)
            count = len(data)
            write_all(file, data)
        if not count:
            raise OSError(errno.EIO, "a part became shorter while it was read")
        offset += count
        size -= count


def main() -> None:
    """Work until there are no more tasks or the parent process is gone."""
    root, parent = sys.argv[1], os.getppid()
    serve(lambda part, copies: copy_files(root, part, copies, parent))
