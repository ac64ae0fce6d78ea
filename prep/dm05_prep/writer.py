"""Writing many small files: what lies in a part as it is goes straight from there to its file, by several processes.

Threads would not do: making a small file is a few short calls, and between them they would wait for one another's turn
in the interpreter. File modes, owners and times of an archive are not applied, nothing is written through a link, and
nothing may exist yet at a path that is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dm05_schemas.files import naming

from dm05_prep.child import Child
from dm05_prep.copier import CREATE, Copy, copy_files
from dm05_prep.pipe import write_all

_TASK_FILES = 64
_TASK_BYTES = 8 << 20
_MOST_PENDING = 8


class TreeWriter:
    """Writes below ``root``; paths are relative to it and must have passed :class:`dm05_prep.names.Names`.

    Args:
        helpers: processes that copy, 0 for none.
        alone_bytes: so much is copied before the helpers are started.
        guard: an open file that the helpers keep open for as long as they live.
    """

    def __init__(self, root: Path, helpers: int, alone_bytes: int, guard: int) -> None:
        self._root, self._guard = str(root), guard
        self._count, self._alone_bytes = helpers, alone_bytes
        self._helpers: list[_Helper] = []
        self._current: _Helper | None = None
        self._part = Path()
        self._task: list[Copy] = []
        self._task_bytes = 0
        self._last_folder = ""
        self._folders: set[str] = {""}

    def folder(self, path: str) -> None:
        """Make a folder and those above it."""
        if path not in self._folders:
            os.makedirs(f"{self._root}/{path}", exist_ok=True)
            self._folders.add(path)

    def file(self, path: str, pieces: Iterable[bytes]) -> None:
        """Write a file of what ``pieces`` give."""
        self.folder(path.rpartition("/")[0])
        file = os.open(f"{self._root}/{path}", CREATE, 0o666)
        try:
            for piece in pieces:  # a part that has to come first may fail as well, with a file of its own
                with naming(Path(f"{self._root}/{path}")):
                    write_all(file, piece)
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
        os.symlink(target, f"{self._root}/{path}")

    def same_file(self, path: str, existing: str) -> None:
        """Give the file ``existing``, written before, a second name."""
        self.wait()
        self.folder(path.rpartition("/")[0])
        os.link(f"{self._root}/{existing}", f"{self._root}/{path}", follow_symlinks=False)

    def wait(self) -> None:
        """Return when everything is written.

        Raises:
            OSError: the first that a helper had.
        """
        self._submit()
        for helper in self._helpers:
            helper.wait(0)

    def close(self) -> None:
        """End the helpers; what they have not begun is dropped."""
        for helper in self._helpers:
            helper.close()

    def _submit(self) -> None:
        task, size, self._task, self._task_bytes = self._task, self._task_bytes, [], 0
        if not task:
            return
        self._alone_bytes -= size
        if not self._count or self._alone_bytes > 0:
            copy_files(self._root, str(self._part), task)
            return
        if not self._helpers:
            self._helpers = [_Helper(self._root, self._guard) for _ in range(self._count)]
        self._helper_for(task[0][0]).submit(str(self._part), task)
        self._last_folder = task[-1][0]

    def _helper_for(self, folder: str) -> _Helper:
        """The one with the least to do; the same again for the same folder, where two would wait for each other."""
        if not self._current or folder != self._last_folder or self._current.pending >= _MOST_PENDING:
            self._current = min(self._helpers, key=lambda helper: helper.pending)
        return self._current


class _Helper:
    """One process that runs :mod:`dm05_prep.copier`; ``pending`` counts its tasks."""

    def __init__(self, root: str, guard: int) -> None:
        self._child = Child("writes files", "copier", root, guard=guard)
        self.pending = 0

    def submit(self, part: str, task: list[Copy]) -> None:
        """Hand a task over; waits while the process has many."""
        self.wait(_MOST_PENDING)
        self.pending += 1  # from here on: a task that could not be handed over must never count as done
        self._child.send(part, task)

    def wait(self, most: int) -> None:
        """Return when no more than ``most`` tasks are pending."""
        while self.pending > most:
            self._child.answer()
            self.pending -= 1

    def close(self) -> None:
        """End the process."""
        self._child.close()
