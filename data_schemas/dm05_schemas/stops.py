"""Ctrl-C, SIGTERM and training's SIGUSR1 from a command's first moment to its last: one line, the signal's exit code.

It imports nothing but what is in the interpreter already, so that it is there before anything that takes time to load:
an exception in the middle of loading a compiled module can end in anything.
"""

from __future__ import annotations

# All of the module but its enums, which take about as long to make as the interpreter to start.
import _signal as signal  # type: ignore[import-not-found,unused-ignore]
import atexit
import os

LINES: dict[int, str] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGUSR1: "ended by SIGUSR1",
}
ALWAYS = (signal.SIGINT, signal.SIGTERM)
"""What ends every command; SIGUSR1 is for training, which schedulers send it to before its time is over."""
_said = False


class Terminated(KeyboardInterrupt):
    """SIGTERM came: everything ends as it does at Ctrl-C, but for the last line and the exit code."""


def end_at_once(prog: str, *, silent: bool = False, usr1: bool = False) -> None:
    """From here on, but for blocks that handle them, these signals end the process on the spot.

    ``silent`` leaves the line to another process, which the same signal reaches; ``usr1`` is for commands that SIGUSR1
    tells to stop later, too.

    That is right while modules are loaded and flags are read, when nothing is under way, for a second signal, and while
    the process leaves. A signal that whoever started the process ignores stays ignored.
    """

    global _said
    _said = silent

    def end(number: int, frame: object) -> None:
        os._exit(last_line(prog, number))

    numbers = (*ALWAYS, signal.SIGUSR1) if usr1 else ALWAYS
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    # Runs last; the interpreter would then put back what ends it without a word.
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in numbers])


def last_line(prog: str, number: int, more: str = "") -> int:
    """Say, once in a process, that signal ``number`` ended it, and ``more``; the exit code that goes with it."""
    global _said
    if not _said:
        _said = True
        try:
            os.write(2, f"{prog}: {LINES[number]}{more and '. '}{more}\n".encode())
        except OSError:  # nobody listens
            pass
    return 128 + number
