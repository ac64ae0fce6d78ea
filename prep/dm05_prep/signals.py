"""SIGTERM as polite as Ctrl-C: work ends by the same way, keeping what can be continued."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dm05_schemas.stops import ALWAYS, Terminated


@contextmanager
def going_on(applies: bool = True) -> Iterator[None]:
    """A stop of the block says in its last line that nothing is lost, where that ``applies``."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if applies:
            stop.args = ("The same command goes on where it stopped",)
        raise


@contextmanager
def stopping_in_order() -> Iterator[None]:
    """Within the block, the first SIGINT raises KeyboardInterrupt and the first SIGTERM Terminated in the main thread.

    A second one, which may come while the block is being left, does what it did outside. Elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ALWAYS}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        put_back()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        put_back()
