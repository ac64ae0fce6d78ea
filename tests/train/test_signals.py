"""Signals are noted, not obeyed at once, and the old handlers come back."""

from __future__ import annotations

import os
import signal

from dm05_train.env import World
from dm05_train.signals import StopSignal


def test_noted_and_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal(World()) as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed() and stop.received == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == signal.SIGUSR1
    assert signal.getsignal(signal.SIGTERM) == before
