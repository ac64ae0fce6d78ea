"""Ctrl-C and SIGTERM from the first moment of a command to its last: one line, and the signal's exit code.

It imports nothing but what is in the interpreter already, so that it is there before anything that takes time to load:
an exception in the middle of loading a compiled module can end in anything.
"""

from __future__ import annotations

# All of the module but its enums, which take about as long to make as the interpreter to start.
import _signal as signal  # type: ignore[import-not-found,unused-ignore]
import atexit
import os

LINES: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_said = False


class Terminated(KeyboardInterrupt):
    """SIGTERM came: everything ends as it does at Ctrl-C, but for the last line and the exit code."""


def end_at_once(prog: str, *, silent: bool = False) -> None:
    """From here on, but for blocks that handle them, these signals end the process on the spot.

    ``silent`` leaves the line to another process, which the same signal reaches.

    That is right while modules are loaded and flags are read, when nothing is under way, for a second signal, and while
    the process leaves. A signal that whoever started the process ignores stays ignored.
    """

    global _said
    _said = silent

    def end(number: int, frame: object) -> None:
        os._exit(last_line(prog, number))

    for number in LINES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    # Runs last; the interpreter would then put back what ends it without a word.
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in LINES])


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
