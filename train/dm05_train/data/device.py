"""From an arena to a batch on the model's device: one copy, then padding, resizing and scaling there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dm05_train.data.arena import Arena
from dm05_train.data.images import resize_square, scale

Batch = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]

_TORCH_DTYPES = {"f4": torch.float32, "i8": torch.int64}


class Pinned:
    """An arena as the training process sees it; page-locked where the device is a GPU."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.arena = arena
        self._lock = device.type == "cuda"
        self._attach()

    def follow(self, capacity: int) -> None:
        """Map the arena again if it has become longer."""
        if capacity != self.bytes.numel():
            self._release()
            if capacity != self.arena.capacity:
                self.arena.remap()
            self._attach()

    def close(self) -> None:
        """Unlock and give up the memory."""
        self._release()
        self.arena.close()

    def _attach(self) -> None:
        self.bytes = torch.frombuffer(self.arena.memory, dtype=torch.uint8)
        if self._lock:
            code = torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
            self._lock = int(code) == 0  # an unlocked arena still works, only its copies wait

    def _release(self) -> None:
        if self._lock:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        self.bytes = torch.empty(0, dtype=torch.uint8)


@dataclass(kw_only=True)
class Staged:
    """A batch on its way to the device, and when it is there (None: it is)."""

    batch: Batch
    copied: torch.cuda.Event | None
    ready: torch.cuda.Event | None

    def is_copied(self) -> bool:
        """Whether the arena may be written again."""
        return self.copied is None or self.copied.query()

    def wait_copied(self) -> None:
        """Block until the arena may be written again."""
        if self.copied is not None:
            self.copied.synchronize()

    def take(self) -> Batch:
        """The batch, safe to use on the current stream."""
        if self.ready is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.ready)
            for tensor in self.batch.values():
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self.batch


class Stager:
    """Moves filled arenas to a device, on a GPU in a stream of its own beside the training step.

    Args:
        device: the model's.
        image_size: side of pixel_values.
    """

    def __init__(self, device: torch.device, image_size: int) -> None:
        self._device, self._image_size = device, image_size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stage(self, pinned: Pinned, sizes: list[tuple[int, int]], change: Change | None = None) -> Staged:
        """Start the copy and the preprocessing of one batch.

        Args:
            pinned: an arena whose arrays and images are complete.
            sizes: (height, width) of its images, in order.
            change: augmentation of whole-number levels [N, 3, S, S], or None.
        """
        used = pinned.arena.layout.images_offset + sum(height * width * 3 for height, width in sizes)
        if self._stream is None:
            batch = self._unpack(pinned, pinned.bytes[:used].clone(), sizes, change)
            return Staged(batch=batch, copied=None, ready=None)
        with torch.cuda.stream(self._stream):
            there = pinned.bytes[:used].to(self._device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
            batch = self._unpack(pinned, there, sizes, change)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return Staged(batch=batch, copied=copied, ready=ready)

    def _unpack(self, pinned: Pinned, data: Tensor, sizes: list[tuple[int, int]], change: Change | None) -> Batch:
        layout = pinned.arena.layout
        batch = {
            field.name: data[field.offset : field.offset + field.bytes]
            .view(_TORCH_DTYPES[field.dtype])
            .view(field.shape)
            for field in layout.fields()
        }
        levels = _levels(data[layout.images_offset :], sizes, self._image_size)
        batch["pixel_values"] = scale(levels if change is None else change(levels))
        return batch


def _levels(images: Tensor, sizes: list[tuple[int, int]], size: int) -> Tensor:
    """Images back to back (uint8, flat) -> whole numbers 0..255, float32 [N, 3, size, size]."""
    if len(set(sizes)) == 1:
        return resize_square(images.view(len(sizes), *sizes[0], 3), size)
    parts = torch.split(images, [height * width * 3 for height, width in sizes])
    levels = torch.empty(len(sizes), 3, size, size, device=images.device)
    for shape in set(sizes):
        where = [i for i, other in enumerate(sizes) if other == shape]
        group = torch.stack([parts[i].view(*shape, 3) for i in where])
        levels[where] = resize_square(group, size)
    return levels
