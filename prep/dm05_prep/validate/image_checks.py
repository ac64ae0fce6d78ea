"""One image or video file: what is wrong with it, from its header and its end, or decoded as a whole."""

from __future__ import annotations

import os
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from dm05_schemas.errors import DataError
from dm05_schemas.findings import Finding, finding
from dm05_schemas.frame import Problem, shown
from dm05_schemas.image import EIGHT_BIT_MODES, ImageHeader, decode_rgb, image_size
from dm05_schemas.video import NoDecoderError, VideoReader
from numpy.typing import NDArray

_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "MPO": (".jpg", ".jpeg", ".mpo"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
}
ENDS_KNOWN = ("JPEG", "PNG")
_MODES = {"L": "greyscale", "1": "black and white", "P": "palette", "LA": "greyscale with alpha", "RGBA": "RGBA"}
_FOREIGN = (
    (b"<", "HTML or XML"),
    (b"{", "JSON"),
    (b"version https://git-lfs", "a Git LFS pointer"),
)


@dataclass(frozen=True, slots=True)
class NamedFile:
    """The file ``root/url``, and that the frame in ``row`` (from 0) of an episode names it for a camera."""

    root: Path
    url: str
    episode: Path
    row: int
    camera: str

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.root / self.url

    def at_line(self, problem: Problem) -> Finding:
        """A problem of the frame's: there is no such file to look into."""
        return finding(problem.kind, self.episode, self.row + 1, f"{self.camera}: {problem.detail}")

    def at_file(self, problem: Problem) -> Finding:
        """A problem of what the file holds."""
        named = f"{self.camera} of {self.episode.name}:{self.row + 1}"
        return finding(problem.kind, self.path, None, f"{problem.detail} ({named})")


def check_image(data: bytes, name: str | None, decode: bool) -> tuple[ImageHeader | None, list[Problem]]:
    """The header of an encoded image and what is wrong with it.

    Args:
        data: the file's bytes.
        name: its name, whose suffix is compared; None when it has none.
        decode: also decode every pixel, as training does; without it the end of a JPEG or PNG is looked at (formats
            whose end is not known are always decoded).
    """
    if not data:
        return None, [Problem("image-empty", "is empty")]
    try:
        header = image_size(data)
    except DataError as error:
        return None, [_not_an_image(data, error)]
    found = []
    if header.mode not in EIGHT_BIT_MODES:
        found.append(Problem("image-depth", f"has more than 8 bits a channel (mode {header.mode})"))
    elif is_cut_short(data, header.format):
        found.append(Problem("image-truncated", f"is cut short: {len(data)} bytes do not reach the end of the picture"))
    elif decode or header.format not in ENDS_KNOWN:
        try:
            decode_rgb(data)
        except DataError as error:
            found.append(Problem("image-broken", f"cannot be decoded: {error.what}"))
    if header.mode not in ("RGB", "YCbCr") and header.mode in EIGHT_BIT_MODES:
        found.append(Problem("image-mode", f"is {_MODES.get(header.mode, header.mode)}, it is converted to RGB"))
    suffix = None if name is None else os.path.splitext(name)[1].lower()
    if suffix is not None and header.format in _SUFFIXES and suffix not in _SUFFIXES[header.format]:
        found.append(Problem("image-extension", f"is {header.format}, its name ends in {shown(suffix)}"))
    return header, found


def is_cut_short(data: bytes, kind: str) -> bool:
    """True when a JPEG has no end marker after its scan, or a PNG ends inside its pixels; False for other formats."""
    if kind == "JPEG":
        scan = _jpeg_scan(data)
        return scan < 0 or data.rfind(b"\xff\xd9", scan) < 0
    return kind == "PNG" and _png_is_cut_short(data)


def read_image(named: NamedFile) -> bytes | Finding:
    """The bytes of an image file, or why there are none."""
    try:
        return named.path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return named.at_line(explain_missing(named.root, named.url))
    except OSError as error:
        return named.at_line(Problem("unreadable", f"{shown(named.url)} cannot be read: {error.strerror or error}"))


def read_frame(videos: VideoReader, named: NamedFile, number: int) -> NDArray[np.uint8] | Finding:
    """Frame ``number`` of a video, uint8 [H, W, 3], or why there is none."""
    if not named.path.is_file():
        return named.at_line(explain_missing(named.root, named.url))
    try:
        return videos.read(named.path, number, str(named.path))
    except DataError as error:
        kind = "video-unchecked" if isinstance(error, NoDecoderError) else "video-broken"
        return named.at_file(Problem(kind, error.what))


def explain_missing(root: Path, url: str) -> Problem:
    """Why ``root/url`` cannot be opened, when it cannot."""
    path = os.path.join(root, url)
    if os.path.isdir(path):
        return Problem("image-missing", f"{shown(url)} is a folder")
    if os.path.islink(path):
        return Problem("broken-link", f"{shown(url)} is a symlink to nothing")
    near = _other_form(root, url)
    if near not in (None, url):
        return Problem("image-case", f"{shown(url)} is {shown(str(near))} on disk")
    return Problem("image-missing", f"there is no {shown(url)}")


def _not_an_image(data: bytes, error: DataError) -> Problem:
    start = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for mark, name in _FOREIGN:
        if start.startswith(mark):
            return Problem("image-foreign", f"is {name}, not an image")
    if data.startswith(b"\xff\xd8\xff"):
        return Problem("image-truncated", f"is cut short: {len(data)} bytes do not hold a whole header")
    return Problem("image-broken", f"cannot be decoded: {error.what}")


def _jpeg_scan(data: bytes) -> int:
    """Where the first scan of a JPEG begins, -1 when the data end before it."""
    place = 2
    while place + 4 <= len(data):
        if data[place] != 0xFF:
            return -1
        marker = data[place + 1]
        if marker == 0xDA:
            return place
        if marker == 0xFF:
            place += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD8:
            place += 2
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return -1


def _png_is_cut_short(data: bytes) -> bool:
    place, pixels = 8, False
    while place + 8 <= len(data):
        length, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        if kind == b"IEND" or (pixels and kind != b"IDAT"):
            return False
        pixels = kind == b"IDAT"
        place += 12 + length
    return place - 4 > len(data) or not pixels


def _other_form(root: Path, url: str) -> str | None:
    """The path on disk that equals ``url`` but for case and Unicode form."""
    found = ""
    for part in url.split("/"):
        matches = [name for name in _names(os.path.join(root, found)) if _folded(name) == _folded(part)]
        if not matches:
            return None
        found = f"{found}/{matches[0]}" if found else matches[0]
    return found


@lru_cache(maxsize=64)
def _names(folder: str) -> tuple[str, ...]:
    try:
        return tuple(os.listdir(folder))
    except OSError:
        return ()


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
