"""The memory a batch is put together in, shared by one worker and the training process.

    action f32 [B, H, 32] | action_mask f32 [B, H, 32] | input_ids, token_type_ids, attention_mask i64 [B, L] |
    images u8: those of sample 0 camera 0, sample 0 camera 1, ... back to back, each [height, width, 3]

It is an anonymous file (memfd): no /dev/shm to run out of, nothing left behind however a process ends, and either side
can make it longer when a batch has larger images than expected.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
ALIGN = 256
TOKEN_FIELDS = ("input_ids", "token_type_ids", "attention_mask")


@dataclass(frozen=True, kw_only=True)
class Field:
    """Where one array of a batch lies in the arena."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Shape of a batch: B samples, V cameras, H actions of D dims, prefix of L tokens."""

    batch: int
    cameras: int
    chunk_size: int
    action_dim: int
    prefix_length: int

    def fields(self) -> list[Field]:
        """The arrays before the images, in order."""
        actions, tokens = (self.batch, self.chunk_size, self.action_dim), (self.batch, self.prefix_length)
        fields: list[Field] = []
        offset = 0
        for name in ("action", "action_mask", *TOKEN_FIELDS):
            is_token = name in TOKEN_FIELDS
            fields.append(
                Field(name=name, dtype="i8" if is_token else "f4", shape=tokens if is_token else actions, offset=offset)
            )
            offset += -(-fields[-1].bytes // ALIGN) * ALIGN
        return fields

    @property
    def images_offset(self) -> int:
        """Where the images begin."""
        last = self.fields()[-1]
        return last.offset + -(-last.bytes // ALIGN) * ALIGN


class Arena:
    """A growable piece of memory behind a file descriptor that may be shared with a child process.

    Args:
        layout: of the batches.
        handle: the descriptor of an existing arena; None makes a new one.
        image_bytes: room for images in a new one.
    """

    def __init__(self, layout: BatchLayout, handle: int | None = None, image_bytes: int = 0) -> None:
        self.layout = layout
        if handle is None:
            handle = _anonymous_file()
            os.ftruncate(handle, _pages(layout.images_offset + image_bytes))
        self.handle = handle
        self.remap()

    @property
    def capacity(self) -> int:
        """Its size in bytes."""
        return len(self.memory)

    def remap(self) -> None:
        """Map all of it, after either side made it longer."""
        self.memory = mmap.mmap(self.handle, os.fstat(self.handle).st_size)
        bytes_ = np.frombuffer(self.memory, dtype=np.uint8)
        self.images: NDArray[np.uint8] = bytes_[self.layout.images_offset :]
        self.arrays = {
            field.name: bytes_[field.offset : field.offset + field.bytes].view(field.dtype).reshape(field.shape)
            for field in self.layout.fields()
        }

    def grow(self, image_bytes: int) -> None:
        """Make room for so many bytes of images; what is there stays."""
        os.ftruncate(self.handle, _pages(self.layout.images_offset + image_bytes))
        self.remap()

    def close(self) -> None:
        """Give the descriptor back; the memory goes when its last user does."""
        os.close(self.handle)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dm05-batch", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # macOS has no memfd
        return os.dup(file.fileno())


def _pages(size: int) -> int:
    return max(1, -(-size // PAGE)) * PAGE
