"""A helper process of the engine, seen from its parent: tasks, answers, and never an endless wait for one that is not
running."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dm05_prep.errors import PrepError
from dm05_prep.pipe import framed, read_framed

LOOK_SECONDS = 5.0  # without a sign of life, until a look at what the process does
_AGAIN = "Run the same command again: it goes on from there"


class Child:
    """A process that runs ``main`` of a module of this package, answering tasks as :mod:`dm05_prep.pipe` says.

    A process that waits for the disk is waited for. One that was stopped (SIGSTOP) for two looks in a row is an error,
    like one that has ended: what it was at is then neither done nor under way.

    Args:
        task: what it does, for messages: "writes files".
        module: its name in this package. It and what it imports must do with the standard library: no other package is
            found, which saves most of the time of starting, and nothing of the environment has a say.
        arguments: its ``sys.argv[1:]``.
        guard: an open file that it keeps open for as long as it lives.
    """

    def __init__(self, task: str, module: str, *arguments: str, guard: int | None = None) -> None:
        start = f"import sys; sys.path.append(sys.argv.pop(1)); from dm05_prep.{module} import main; main()"
        command = [sys.executable, "-I", "-S", "-B", "-c", start, str(Path(__file__).parents[1]), *arguments]
        pipe, kept = subprocess.PIPE, () if guard is None else (guard,)
        # In a session of its own, Ctrl-C and the like reach the parent alone, which then ends the helpers.
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=kept, start_new_session=True)
        assert self._process.stdin and self._process.stdout
        self._task, self.pid = task, self._process.pid
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)

    def send(self, *task: Any) -> None:
        """Hand a task over; when the process reads no more, :meth:`answer` says why."""
        view = memoryview(framed(task))
        with contextlib.suppress(BrokenPipeError):
            while view:
                self._wait_for(self._in, select.POLLOUT)
                try:
                    view = view[os.write(self._in, view) :]
                except BlockingIOError:  # less room than this piece needs to go as a whole
                    select.select([], [], [], 0.001)

    def answer(self, on_progress: Callable[[int], object] = lambda done: None) -> Any:
        """The result of the first task that is not answered yet.

        Raises:
            OSError: what the task ended with.
            PrepError: the process has ended or was stopped.
        """
        while isinstance(value := read_framed(self._read), int):
            on_progress(value)
        result, error = value
        if error:
            raise OSError(*error)
        return result

    def kill(self) -> None:
        """End the process; :meth:`answer` in another thread then raises."""
        self._process.kill()

    def close(self) -> None:
        """End the process and give back the pipes."""
        self._process.kill()
        self._process.communicate()

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._wait_for(self._out, select.POLLIN)
            more = os.read(self._out, count - len(data))
            if not more:
                code = self._process.wait()
                raise self._lost(f"has ended, {f'killed by signal {-code}' if code < 0 else code}")
            data += more
        return data

    def _wait_for(self, handle: int, event: int) -> None:
        poll = select.poll()
        poll.register(handle, event)
        stopped = False
        while not poll.poll(LOOK_SECONDS * 1000):
            if not self._is_stopped():
                stopped = False
            elif stopped:
                raise self._lost("is stopped")
            else:
                stopped = True

    def _is_stopped(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:  # no such folder on this system
            return False
        return state in ("T", "t")

    def _lost(self, what: str) -> PrepError:
        return PrepError(f"a helper process that {self._task} ({self.pid}) {what}", fix=_AGAIN)
