"""Writing the blobs of a pack: encoded images back to back in ``images-00000.bin``, ``images-00001.bin``, ..."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import simplejpeg
from dm05_schemas.errors import DataError
from dm05_schemas.image import Encoded, image_size
from dm05_schemas.pack import FileRecord
from dm05_schemas.video import all_frames

BLOB_BYTES = 1 << 32
VIDEO_QUALITY = 95


class Place(NamedTuple):
    """Where an encoded image lies, as frames.arrow has it."""

    blob: int
    offset: int
    length: int
    crc32: int

    @classmethod
    def of(cls, blob: int, offset: int, data: Encoded) -> Place:
        """The place of ``data``."""
        return cls(blob, offset, len(data), zlib.crc32(data))


class Places:
    """A growing list of places that costs 20 bytes each."""

    def __init__(self) -> None:
        self._rows = np.zeros(1024, dtype=[("blob", "i4"), ("offset", "i8"), ("length", "i4"), ("crc32", "u4")])
        self._count = 0

    def add(self, place: Place) -> int:
        """Append a place; its number."""
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self._count] = place
        self._count += 1
        return self._count - 1

    def columns(self, numbers: list[int]) -> dict[str, Any]:
        """The fields of a camera's struct for the places of these numbers."""
        chosen = self._rows[numbers]
        return {name: np.ascontiguousarray(chosen[name]) for name in Place._fields}


def decoded_bytes(data: Encoded, where: str) -> int:
    """Size of an image's pixels, H x W x 3, from its header.

    Raises:
        DataError: it is no image.
    """
    header = image_size(data, where)
    return header.width * header.height * 3


class BlobWriter:
    """Appends images to blobs in a folder.

    Args:
        folder: where they go.
        first: number of the first blob in the pack (tar parts may come before).
        blob_bytes: a blob that has reached this size is followed by the next.
        sizes: of the blobs an earlier, interrupted run has written; what they hold beyond that is cut off.
    """

    def __init__(
        self, folder: Path, *, first: int = 0, blob_bytes: int = BLOB_BYTES, sizes: Sequence[int] = ()
    ) -> None:
        self._folder, self._first, self._limit = folder, first, blob_bytes
        self._file: BinaryIO | None = None
        self.sizes = list(sizes)
        for leftover in sorted(folder.glob("images-*.bin"))[len(self.sizes) :]:
            leftover.unlink()
        if self.sizes:
            self._file = (folder / self._name(len(self.sizes) - 1)).open("r+b")
            self._file.truncate(self.sizes[-1])
            self._file.seek(self.sizes[-1])

    def append(self, data: Encoded) -> Place:
        """Write an image; where it is."""
        if self._file is None or self.sizes[-1] >= self._limit:
            self.sync()
            if self._file is not None:
                self._file.close()
            self._file = (self._folder / self._name(len(self.sizes))).open("xb")
            self.sizes.append(0)
        offset = self.sizes[-1]
        self._file.write(data)
        self.sizes[-1] += len(data)
        return Place.of(self._first + len(self.sizes) - 1, offset, data)

    def sync(self) -> None:
        """Make everything written so far durable."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> list[FileRecord]:
        """Make everything durable and close; the blobs written."""
        self.sync()
        if self._file is not None:
            self._file.close()
            self._file = None
        return [FileRecord(path=self._name(i), bytes=size) for i, size in enumerate(self.sizes)]

    def _name(self, number: int) -> str:
        return f"images-{number:05d}.bin"


def video_images(video: Path | bytes, where: str) -> Iterator[bytes]:
    """Every frame of a video as a JPEG (quality 95, no colour subsampling), in the order they are shown.

    Raises:
        DataError: PyAV is not installed, or the video is broken.
    """
    source = io.BytesIO(video) if isinstance(video, bytes) else video
    for pixels in all_frames(source, where):
        encoded: bytes = simplejpeg.encode_jpeg(
            np.ascontiguousarray(pixels), quality=VIDEO_QUALITY, colorspace="RGB", colorsubsampling="444"
        )
        yield encoded


def read_image(path: Path, where: str) -> bytes:
    """The bytes of an image file.

    Raises:
        DataError: it cannot be read; ``where`` names episode and frame.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", where=where) from error
