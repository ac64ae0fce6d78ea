"""Signals before, during and after the work of a command: one line, the signal's exit code, and only once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

ENDS = {signal.SIGINT: (130, "prog: interrupted\n"), signal.SIGTERM: (143, "prog: terminated\n")}
BEGIN = """
import os, signal, sys, time
from dm05_schemas.stops import end_at_once
end_at_once("prog")
def stop(): os.kill(os.getpid(), signal.{name})
"""


def finish(body: str, number: signal.Signals, before: Callable[[], object] | None = None) -> tuple[int, str]:
    code = BEGIN.format(name=number.name) + body
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, preexec_fn=before)
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", list(ENDS))
def test_before_anything_else(number: signal.Signals) -> None:
    assert (
        finish("try:\n stop()\n time.sleep(60)\nexcept BaseException:\n print('caught', file=sys.stderr)", number)
        == ENDS[number]
    )


@pytest.mark.parametrize("number", list(ENDS))
def test_while_threads_are_waited_for_at_the_end(number: signal.Signals) -> None:
    body = """
import threading
from dm05_schemas.cli import run
threading.Thread(target=time.sleep, args=[60]).start()
threading.Timer(0.3, stop).start()
run(lambda: 0, "prog")
"""
    assert finish(body, number) == ENDS[number]


@pytest.mark.parametrize("number", list(ENDS))
def test_nothing_can_go_wrong_any_more(number: signal.Signals) -> None:
    body = """
from dm05_schemas.cli import run
class Last:
    def __del__(self, stop=stop): stop()
sys.last = Last()
run(lambda: 0, "prog")
"""
    assert finish(body, number) == (0, "")


@pytest.mark.parametrize("number", list(ENDS))
def test_the_work_ends_in_order_and_a_second_signal_is_not_waited_for(number: signal.Signals) -> None:
    body = """
from dm05_prep.signals import stopping_in_order
from dm05_schemas.cli import run
def work():
    with stopping_in_order():
        try:
            stop()
            time.sleep(60)
        finally:
            print("put away", file=sys.stderr)
            {}
run(work, "prog")
"""
    code, line = ENDS[number]
    assert finish(body.format(""), number) == (code, f"put away\n{line}")
    assert finish(body.format("stop(); time.sleep(60)"), number) == (code, f"put away\n{line}")


@pytest.mark.parametrize("number", list(ENDS))
def test_the_line_comes_once(number: signal.Signals) -> None:
    body = """
from dm05_schemas.cli import Terminated, run
def work():
    import threading
    threading.Thread(target=time.sleep, args=[60]).start()
    threading.Timer(0.3, stop).start()
    raise Terminated if signal.{0} == signal.SIGTERM else KeyboardInterrupt
run(work, "prog")
"""
    assert finish(body.format(number.name), number) == ENDS[number]


@pytest.mark.parametrize("number", list(ENDS))
def test_ignored_signals_stay_ignored(number: signal.Signals) -> None:
    """As with nohup, or in the background of a shell script."""
    body = "from dm05_prep.signals import stopping_in_order\nstop()\nwith stopping_in_order(): stop()\nstop()"
    assert finish(body, number, before=lambda: signal.signal(number, signal.SIG_IGN)) == (0, "")
