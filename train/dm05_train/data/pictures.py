"""The encoded images of a dataset, by row of its frame table and camera."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from dm05_schemas.errors import DataError
from dm05_schemas.frame_table import BLOB_FIELDS, FrameTable
from dm05_schemas.pack import PackInfo, blob_path
from dm05_schemas.video import VideoReader
from numpy.typing import NDArray

Encoded = bytes | NDArray[np.uint8]
Value = TypeVar("Value")


class Pictures(Protocol):
    """Where images come from."""

    def read(self, row: int, camera: int, label: str) -> tuple[Encoded, str]:
        """An image as its encoded bytes, or as pixels [H, W, 3] where it is a frame of a video.

        Args:
            row: of the frame table.
            camera: its number.
            label: episode, frame and camera, for errors.

        Returns:
            The image, and the name an error of decoding it should give.

        Raises:
            DataError: missing, cut short or changed.
        """

    def close(self) -> None:
        """Close the files."""


def open_pictures(folder: Path, images: Path, info: PackInfo, table: FrameTable) -> Pictures:
    """The images of a pack (`folder`) or of an image folder (`images`), as pack.json says."""
    return BlobPictures(folder, info, table) if info.images == "blobs" else FilePictures(images, info, table)


class FilePictures:
    """One file an image, or a frame of a video file."""

    def __init__(self, images: Path, info: PackInfo, table: FrameTable) -> None:
        self._images, self._table, self._cameras = images, table, info.cameras
        self._videos = VideoReader()

    def read(self, row: int, camera: int, label: str) -> tuple[Encoded, str]:
        """See `Pictures.read`."""
        url, frame = _labelled(label, self._table.url, self._cameras[camera], row)
        path = self._images / url
        where = f"{path}: {label}"
        if frame >= 0:
            return self._videos.read(path, frame, where), where
        try:
            return path.read_bytes(), where
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=where) from error

    def close(self) -> None:
        """Close the videos."""
        self._videos.close()


class BlobPictures:
    """Stretches of the pack's blobs. One that reaches past the end of its blob goes on in the next.

    Blobs are read with `pread`, never through a map: a blob cut short under a running job is a short read, not a bus
    error. Each image's checksum is compared, so that a blob that was changed never gives a wrong picture.
    """

    def __init__(self, folder: Path, info: PackInfo, table: FrameTable) -> None:
        self._table, self._info = table, info
        self._paths = [blob_path(folder, record) for record in info.blobs]
        self._handles: list[int | None] = [None] * len(self._paths)

    def read(self, row: int, camera: int, label: str) -> tuple[Encoded, str]:
        """See `Pictures.read`."""
        key = self._info.cameras[camera]
        fields = (_labelled(label, self._table.rows, f"{key}.{name}", row) for name in BLOB_FIELDS)
        blob, offset, length, crc = (int(field[0]) for field in fields)
        if not (0 <= blob < len(self._paths) and offset >= 0 and length >= 0):
            raise self._table.error(f"{label}: row {row} is corrupt")
        where = f"{self._paths[blob]}: {label}"
        data = self._stretch(blob, offset, length, label)
        if zlib.crc32(data) != crc:
            raise DataError("the image was changed since it was packed", where=where, fix=self._info.rebuild)
        return data, where

    def close(self) -> None:
        """Close the blobs."""
        for handle in self._handles:
            if handle is not None:
                os.close(handle)
        self._handles = [None] * len(self._paths)

    def _stretch(self, blob: int, offset: int, length: int, label: str) -> bytes:
        data = b""
        while blob < len(self._paths):
            here = min(length - len(data), max(0, self._info.blobs[blob].bytes - offset))
            piece = self._pread(blob, here, offset, label)
            if len(piece) < here:
                what = f"was cut short: {here} bytes at {offset} are not there any more"
                raise DataError(what, where=f"{self._paths[blob]}: {label}", fix=self._info.rebuild)
            data = data + piece if data else piece
            if len(data) == length:
                return data
            blob, offset = blob + 1, 0
        raise self._table.error(f"{label}: the image reaches past the last blob")

    def _pread(self, blob: int, length: int, offset: int, label: str) -> bytes:
        try:
            handle = self._handles[blob]
            if handle is None:
                handle = self._handles[blob] = os.open(self._paths[blob], os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(handle, length, offset)
        except OSError as error:
            where = f"{self._paths[blob]}: {label}"
            raise DataError(
                f"cannot be read: {error.strerror or error}", where=where, fix=self._info.rebuild
            ) from error


def _labelled(label: str, read: Callable[[str, int], Value], name: str, row: int) -> Value:
    """`read(name, row)`, whose errors then say which frame they are about."""
    try:
        return read(name, row)
    except DataError as error:
        raise DataError(f"{label}: {error.what}", where=error.where, fix=error.fix) from error
