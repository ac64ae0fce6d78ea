"""How both commands start and end: one line for any error, and the exit code that goes with it."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dm05_schemas.errors import DM05Error
from dm05_schemas.stops import Terminated, last_line

BROKEN_PIPE = 141

_MENDS = {
    errno.ENOSPC: "Free some space (df) or inodes (df -i) there, then run the same command again",
    errno.EDQUOT: "Free some of your share of that disk, then run the same command again",
    errno.EROFS: "Choose a folder that can be written to",
    errno.EACCES: "Choose another place, or have its owner give you access",
    errno.ENOTDIR: "A file stands where a folder must be: move it away, or choose another folder",
    errno.EISDIR: "A folder stands where a file must be: move it away, or choose another folder",
    errno.EFBIG: "That disk, or a limit (ulimit -f), has no room for one file of that size: choose another disk",
    errno.EMFILE: "Allow more open files (ulimit -n 4096), then run the same command again",
}


def run(main: Callable[[], int | None], prog: str) -> NoReturn:
    """Call ``main`` and exit the process with 0 (done), 1 (data or source at fault) or 2 (wrong usage).

    Every error becomes one line ``prog: error: ...`` on stderr. An exception that nobody foresaw is reported the same
    way, with its traceback kept in a file that the line names.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, *_: f"{prog}: warning: {' '.join(str(message).split())}\n"
    if not sys.warnoptions:  # what libraries tell programmers is of no use to who runs a command
        for category in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
    sys.exit(_exit_code(main, prog))


def describe_os_error(error: OSError) -> str:
    """``FILE: Reason`` of an operating system error, with the mend where there is an obvious one."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    where = " -> ".join(names)
    reason = error.strerror or str(error) or type(error).__name__
    text = f"{where}: {reason}" if where else reason
    return f"{text}. {_MENDS[error.errno]}" if error.errno in _MENDS else text


def _exit_code(main: Callable[[], int | None], prog: str) -> int:
    try:
        code = main() or 0
        sys.stdout.flush()
        return code
    except DM05Error as error:
        return _fail(prog, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        return last_line(prog, number, *map(str, error.args[:1]))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_gone():
            return BROKEN_PIPE
        return _fail(prog, describe_os_error(error), 1)
    except MemoryError:
        return _fail(prog, "out of memory. Lower --jobs or use a machine with more memory", 1)
    except Exception as error:
        return _fail(prog, _unforeseen(error), 1)


def _fail(prog: str, text: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # the same trouble again at exit would add a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"{prog}: error: {' '.join(text.split())}", file=sys.stderr)
    return code


def _stdout_is_gone() -> bool:
    """True when the reader of our output has left; the stream then points to nowhere, so that exit stays quiet."""
    try:
        handle = sys.stdout.fileno()
        poll = select.poll()
        poll.register(handle, 0)
        gone = any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # no file behind it, or no poll on this system
        return False
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
    return gone


def _unforeseen(error: Exception) -> str:
    text = traceback.format_exc()
    try:
        handle, name = tempfile.mkstemp(prefix="dm05-", suffix=".traceback.txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        name = ""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    kept = f" The traceback is in {name}" if name else ""
    what = f"{type(error).__name__} at {place}: {error or 'no message'}"
    return f"{what}. This is a bug in the tool, please report it.{kept}"
