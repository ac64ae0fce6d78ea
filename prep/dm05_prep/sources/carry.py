"""How the bytes of an answer get into the file: moved inside the system where that can be, else through a buffer.

A plain connection is spliced into a pipe and the pipe into the file, which copies each byte once, and never into this
process. A body in pieces or under TLS has to be read; so have the first bytes, which came along with the headers.
"""

from __future__ import annotations

import fcntl
import os
import time

from dm05_prep.sources.connection import Reply
from dm05_prep.sources.partfile import PartFile, Span
from dm05_prep.sources.retry import Trouble

BUFFER_BYTES = 1 << 20
WRITE_BYTES = 256 << 10
WRITE_AFTER_S = 0.25
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)  # Python 3.10 knows it, some builds leave it out


class Carrier:
    """The buffer and the pipe of one thread."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._pipe = _pipe()

    def carry(self, reply: Reply, part: PartFile, span: Span) -> Trouble | None:
        """Write the next bytes of ``span``, at least one; the trouble that came after them, or instead."""
        try:
            if self._pipe and (count := reply.splice(self._pipe[1], min(span.left, BUFFER_BYTES))) is not None:
                if count:
                    part.write_pipe(span, self._pipe[0], count)
                return None if count or reply.complete else _early_end()
        except Trouble as trouble:
            return trouble
        count, trouble_after = self._receive(reply, span.left)
        if count:
            part.write(span, self._buffer[:count])
        return trouble_after

    def close(self) -> None:
        """Close the pipe."""
        for end in self._pipe or ():
            os.close(end)
        self._pipe = None

    def _receive(self, reply: Reply, left: int) -> tuple[int, Trouble | None]:
        """Bytes for one write, in the buffer, and the trouble that ended them early, if any."""
        view, filled = self._buffer[:left], 0
        until = time.monotonic() + WRITE_AFTER_S
        while filled < min(WRITE_BYTES, len(view)) and (not filled or time.monotonic() < until):
            try:
                count = reply.readinto(view[filled:])
            except Trouble as trouble:
                return filled, trouble
            if count == 0:
                return filled, None if reply.complete else _early_end()
            filled += count
            if reply.can_splice:
                break
        return filled, None


def _early_end() -> Trouble:
    return Trouble("the body broke off early")


def _pipe() -> tuple[int, int] | None:
    """The ends to read from and to write to; None where the system cannot splice."""
    if not hasattr(os, "splice"):
        return None
    pipe = os.pipe()
    try:
        fcntl.fcntl(pipe[1], _F_SETPIPE_SZ, BUFFER_BYTES)
    except OSError:
        pass  # a user of many large pipes gets small ones
    return pipe
