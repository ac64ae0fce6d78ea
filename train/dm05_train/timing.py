"""Where the time of a step goes, measured without holding the step up: events on a GPU, the clock elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import Protocol

import torch

Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Now: on a GPU when it gets there, which is not waited for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Timer(Protocol):
    """Told in a step when a part of it is done."""

    def mark(self, part: str) -> None: ...
    def read(self) -> dict[str, float]: ...


class NoTimer:
    """Measures nothing and costs nothing."""

    def mark(self, part: str) -> None:
        """Nothing."""

    def read(self) -> dict[str, float]:
        """Nothing."""
        return {}


class StepTimer:
    """Seconds each part of a step took, on average since the last reading.

    The time between two marks belongs to the part named at its end. On a GPU it is the time the device needed from one
    mark to the next, waiting included; readings lag by one, so that no mark is read before the device has passed it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._marks: list[tuple[str, Moment]] = []
        self._passed: list[tuple[str, Moment]] = []

    def mark(self, part: str) -> None:
        """The part ``part`` ends here."""
        self._marks.append((part, moment(self.device)))

    def read(self) -> dict[str, float]:
        """Seconds a step by part: of the marks since the last reading on a CPU, of those before it on a GPU.

        The part that was marked least often counts the steps.
        """
        if self.on_gpu:
            ready, self._passed = self._passed, self._marks
        else:
            ready = self._marks
        self._marks = self._marks[-1:]
        found: dict[str, float] = {}
        times: Counter[str] = Counter()
        for (_, before), (part, after) in pairwise(ready):
            found[part] = found.get(part, 0.0) + seconds_between(before, after)
            times[part] += 1
        steps = min(times.values(), default=1)
        return {part: seconds / steps for part, seconds in found.items()}


def seconds_between(before: Moment, after: Moment) -> float:
    """Seconds from one moment to another of the same device, which has passed both."""
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event)
    after.synchronize()
    return before.elapsed_time(after) / 1000
