"""Being told to stop: SIGTERM or SIGUSR1 on any rank ends all ranks after the same step; Ctrl-C ends them now."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from dm05_train.env import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Notes the signals while it is open, and lets the ranks agree without waiting for the GPU.

    The first Ctrl-C is a KeyboardInterrupt, as which the block ends whatever that breaks: an exception in the middle of
    loading a module or of compiling comes out as any other. A second one does what it did outside.

    Each step every rank sends its flag in an asynchronous all-reduce of host memory and reads the one sent a step
    earlier, so that all ranks see a signal at the same step and nobody waits for a message on its way.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.received: int | None = None
        self.interrupted = False
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._flight: tuple[torch.Tensor, Any] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        if (ctrl_c := signal.getsignal(signal.SIGINT)) is not signal.SIG_IGN:
            self._before[signal.SIGINT] = ctrl_c
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind is not None and self.interrupted:
            raise KeyboardInterrupt from None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        signal.signal(number, self._before[number])
        raise KeyboardInterrupt

    def before_start(self) -> bool:
        """Whether a signal has reached any rank already; the ranks wait for each other here."""
        flag = torch.tensor([int(self.received is not None)])
        if self._group is not None:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def agreed(self, *, failed: bool = False) -> bool:
        """Whether a signal had reached any rank by the step before, or something had ``failed`` there; the same answer
        on every rank. Call once a step."""
        mine = failed or self.received is not None
        if self._group is None:
            return mine
        answer = False
        if self._flight is not None:
            flag, work = self._flight
            work.wait()
            answer = bool(flag.item())
        flag = torch.tensor([int(mine)])
        self._flight = (flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True))
        return answer
