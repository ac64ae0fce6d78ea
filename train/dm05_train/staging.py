"""Page-locked memory through which tensors of a GPU reach a file, claimed once: claiming it holds up the GPU's work."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

STAGE_BYTES = 32 << 20

Pair = tuple[Tensor, Tensor]


class Staging:
    """Pairs of buffers, each lent to one writer at a time; of a pair, one is filled while the other is read.

    Args:
        device: whose tensors are read; nothing is claimed unless it is a GPU.
        writers: how many may read at once.
    """

    def __init__(self, device: torch.device, writers: int) -> None:
        self._pairs: queue.SimpleQueue[Pair] = queue.SimpleQueue()
        if device.type == "cuda":
            for _ in range(writers):
                self._pairs.put((self._buffer(), self._buffer()))

    def _buffer(self) -> Tensor:
        return torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True)

    @contextlib.contextmanager
    def lend(self) -> Iterator[Pair]:
        """A pair, waited for while all are lent."""
        pair = self._pairs.get()
        try:
            yield pair
        finally:
            self._pairs.put(pair)

    def bytes_of(self, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
        """The bytes of tensors in order, all of them on the host or all on the GPU; each piece is good until the
        next."""
        for flat in (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors):
            if flat.is_cuda:
                with self.lend() as pair:
                    yield from _through(pair, flat)
            else:
                yield flat.numpy().data


def _through(pair: Pair, flat: Tensor) -> Iterator[memoryview]:
    """A GPU tensor's bytes by way of two buffers."""
    stream = torch.cuda.Stream(flat.device)
    events = torch.cuda.Event(), torch.cuda.Event()
    pieces = flat.split(STAGE_BYTES)
    for number in range(len(pieces) + 1):
        if number < len(pieces):
            side = number % 2
            with torch.cuda.stream(stream):
                pair[side][: len(pieces[number])].copy_(pieces[number], non_blocking=True)
                events[side].record(stream)
        if number > 0:
            side = (number - 1) % 2
            events[side].synchronize()
            yield pair[side][: len(pieces[number - 1])].numpy().data
