"""Single frames of a video file, exactly the n-th one shown, with PyAV (the ``video`` extra)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dm05_schemas.errors import DataError

OPEN_FILES = 8


class NoDecoderError(DataError):
    """PyAV is not installed: nothing can be said about a video."""


class VideoReader:
    """Reads frames by number from any number of files, of which it keeps the last few open."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, _Video] = OrderedDict()

    def read(self, path: Path, frame: int, where: str) -> NDArray[np.uint8]:
        """Frame number ``frame`` (from 0, in the order they are shown): uint8 [H, W, 3], RGB.

        Raises:
            NoDecoderError: PyAV is not installed.
            DataError: the file is missing or broken, or has fewer frames; ``where`` names it.
        """
        av = _pyav(where)
        try:
            video = self._open.pop(path, None) or _Video(path, av)
            self._open[path] = video
            while len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            if frame >= len(video):
                raise DataError(f"has {len(video)} frames, frame_idx {frame} is not there", where=where)
            return video.frame(frame)
        except (OSError, ValueError, av.FFmpegError) as error:
            self._open.pop(path, None)
            raise DataError(f"cannot read the video: {error}", where=where) from error

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()


def all_frames(video: Path | BinaryIO, where: str) -> Iterator[NDArray[np.uint8]]:
    """Every frame in the order they are shown: uint8 [H, W, 3], RGB.

    Raises:
        NoDecoderError: PyAV is not installed.
        DataError: the file is missing or broken; ``where`` names it.
    """
    av = _pyav(where)
    try:
        with av.open(str(video) if isinstance(video, Path) else video) as container:
            for picture in container.decode(video=0):
                yield picture.to_ndarray(format="rgb24")
    except (OSError, ValueError, IndexError, av.FFmpegError) as error:
        raise DataError(f"cannot read the video: {error}", where=where) from error


class _Video:
    """One open file. The times at which its frames are shown are listed when it is opened, without decoding."""

    def __init__(self, path: Path, av: Any) -> None:
        self._container = av.open(str(path))
        self._stream = self._container.streams.video[0] if self._container.streams.video else None
        if self._stream is None:
            raise ValueError("no video stream")
        self._stream.codec_context.thread_count = 1
        self._times: list[int] = []
        self._keys: list[tuple[int, int]] = []  # (when shown, where to seek) of every key frame
        for packet in self._container.demux(self._stream):
            if packet.pts is None or not packet.size or packet.is_discard:
                continue
            self._times.append(packet.pts)
            if packet.is_keyframe:
                self._keys.append((packet.pts, packet.pts if packet.dts is None else packet.dts))
        self._times.sort()
        self._keys.sort()
        self._next: int | None = None
        self._decoded: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self._times)

    def frame(self, number: int) -> NDArray[np.uint8]:
        """Decode frame ``number``, from the last key frame before it on unless it is the next one."""
        time = self._times[number]
        before = [where for shown, where in self._keys if shown <= time]
        picture = self._decode_to(time) if self._next == number else None
        for start in (*before[-1:], self._times[0]):
            if picture is None:
                self._container.seek(start, stream=self._stream, backward=True)
                self._decoded = self._container.decode(self._stream)
                picture = self._decode_to(time)
        if picture is None:
            self._next = None
            raise ValueError(f"frame {number} cannot be decoded")
        self._next = number + 1
        pixels: NDArray[np.uint8] = picture.to_ndarray(format="rgb24")
        return pixels

    def _decode_to(self, time: int) -> Any:
        """The picture shown at ``time``, None when the decoder has passed it."""
        for picture in self._decoded:
            if picture.pts == time:
                return picture
            if picture.pts is not None and picture.pts > time:
                break
        return None

    def close(self) -> None:
        self._container.close()


def _pyav(where: str) -> Any:
    try:
        import av
    except ImportError as error:
        raise NoDecoderError(
            "is a video, and PyAV is not installed", where=where, fix="Run pip install 'dm05[video]'"
        ) from error
    return av
