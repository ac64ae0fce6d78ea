"""Writing the blobs of a pack: encoded images back to back in ``images-00000.bin``, ``images-00001.bin``, ..."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
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


class Places:
    """A growing list of places that costs 24 bytes each, and the largest image among them."""

    def __init__(self) -> None:
        self._rows = np.zeros(1024, dtype=[("blob", "i4"), ("offset", "i8"), ("length", "i4"), ("crc32", "u4")])
        self._count = 0
        self.largest_image_bytes = 0

    def __len__(self) -> int:
        return self._count

    def add(self, blob: int, offset: int, data: Encoded, where: str) -> int:
        """Note an image and return its number.

        Raises:
            DataError: ``data`` is no image.
        """
        header = image_size(data, where)
        self.largest_image_bytes = max(self.largest_image_bytes, header.width * header.height * 3)
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self._count] = (blob, offset, len(data), zlib.crc32(data))
        self._count += 1
        return self._count - 1

    def columns(self, numbers: list[int]) -> dict[str, Any]:
        """The fields of a camera's struct for these images."""
        chosen = self._rows[numbers]
        return {name: np.ascontiguousarray(chosen[name]) for name in Place._fields}


class BlobWriter:
    """Appends images to blobs in a folder.

    Args:
        folder: where they go.
        first: number of the first blob in the pack (tar parts may come before).
        blob_bytes: a blob that has reached this size is followed by the next.
    """

    def __init__(self, folder: Path, *, first: int = 0, blob_bytes: int = BLOB_BYTES) -> None:
        self._folder, self._first, self._limit = folder, first, blob_bytes
        self._file: BinaryIO | None = None
        self._sizes: list[int] = []

    def append(self, data: Encoded) -> tuple[int, int]:
        """Write an image; its blob and offset."""
        if self._file is None or self._sizes[-1] >= self._limit:
            self._finish_file()
            self._file = (self._folder / self._name(len(self._sizes))).open("xb")
            self._sizes.append(0)
        offset = self._sizes[-1]
        self._file.write(data)
        self._sizes[-1] += len(data)
        return self._first + len(self._sizes) - 1, offset

    def close(self) -> list[FileRecord]:
        """Flush to disk; the blobs written."""
        self._finish_file()
        return [FileRecord(path=self._name(i), bytes=size) for i, size in enumerate(self._sizes)]

    def _name(self, number: int) -> str:
        return f"images-{number:05d}.bin"

    def _finish_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


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
        fix = "Run dm05-prep dataset again to fetch what is missing"
        raise DataError(f"{path} cannot be read: {error.strerror or error}", where=where, fix=fix) from error
