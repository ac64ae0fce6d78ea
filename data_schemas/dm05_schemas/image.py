"""One definition of what an encoded image is and how it becomes RGB pixels."""

from __future__ import annotations

import io
import warnings
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from dm05_schemas.errors import DataError

Pixels = NDArray[np.uint8]
Encoded = bytes | memoryview

JPEG_MAGIC = b"\xff\xd8\xff"
FAST_JPEG = ("YCbCr", "RGB", "Gray")  # CMYK and YCCK go through Pillow

EIGHT_BIT_MODES = frozenset(
    {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
)
TO_EIGHT_BITS = "Convert it to 8 bits a channel"
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000")  # Pillow has some that run other programs
MAX_SIDE = 8192
MAX_PIXEL_BYTES = MAX_SIDE * MAX_SIDE * 3
"""No image is larger: one flipped bit in a header must not ask for gigabytes (or, padded to a square, terabytes)."""


class ImageHeader(NamedTuple):
    """What a header says: format ("JPEG", "PNG", ...), Pillow mode, width and height in pixels."""

    format: str
    mode: str
    width: int
    height: int


def image_size(data: Encoded, where: str = "image") -> ImageHeader:
    """Format, mode and size from the header alone, no pixel decoded.

    Raises:
        DataError: not an image this project reads.
    """
    fast = _jpeg_header(data)
    if fast is not None:
        height, width, colours = fast
        _check_size(height, width, where)
        return ImageHeader("JPEG", "L" if colours == "Gray" else "RGB", width, height)
    with _open(data, where) as image:
        return ImageHeader(image.format or "", image.mode, image.width, image.height)


def decode_rgb(data: Encoded, where: str = "image") -> Pixels:
    """Pixels of an encoded image: uint8 [H, W, 3], RGB.

    Grey, palette, RGBA and CMYK are converted (transparency is dropped); the EXIF orientation is not applied.

    Raises:
        DataError: cut short, corrupt or no image; `where` names it.
    """
    header = _jpeg_header(data)
    if header is None:
        return _decode_any(data, where)
    _check_size(*header[:2], where)
    pixels = np.empty((header[0], header[1], 3), dtype=np.uint8)
    _decode_jpeg(data, pixels, where)
    return pixels


def decode_into(data: Encoded, buffer: NDArray[np.uint8], where: str = "image") -> tuple[int, int] | int:
    """Decode into the front of a flat uint8 `buffer` as [H, W, 3] without another copy of a JPEG.

    Returns:
        (height, width), or the number of bytes needed when `buffer` is too small (nothing is written then).

    Raises:
        DataError: cut short, corrupt or no image; `where` names it.
    """
    header, pixels = _jpeg_header(data), None
    if header is not None:
        height, width, _ = header
        _check_size(height, width, where)
    else:
        pixels = _decode_any(data, where)
        height, width, _ = pixels.shape
    need = height * width * 3
    if need > buffer.size:
        return need
    target = buffer[:need].reshape(height, width, 3)
    if pixels is None:
        _decode_jpeg(data, target, where)
    else:
        target[:] = pixels
    return height, width


def _jpeg_header(data: Encoded) -> tuple[int, int, str] | None:
    """(height, width, colour space) of a JPEG that simplejpeg turns into RGB, else None."""
    if bytes(data[:3]) != JPEG_MAGIC:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width, colours) if colours in FAST_JPEG else None


def _decode_jpeg(data: Encoded, target: Pixels, where: str) -> None:
    try:
        simplejpeg.decode_jpeg(data, colorspace="RGB", buffer=target)
    except ValueError as error:
        raise DataError(f"broken JPEG: {error}", where=where) from error


def _decode_any(data: Encoded, where: str) -> Pixels:
    with _open(data, where) as image:
        if image.mode not in EIGHT_BIT_MODES:  # Pillow would clip the values at 255
            raise DataError(f"{image.format} of mode {image.mode}, more than 8 bits", where=where, fix=TO_EIGHT_BITS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's advice about palettes is not for who trains
                return np.asarray(image.convert("RGB"))
        except Exception as error:  # Pillow's decoders raise many kinds
            raise DataError(f"broken {image.format} image: {error}", where=where) from error


def _open(data: Encoded, where: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # _check_size is stricter
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(f"an image with sides over {MAX_SIDE} pixels", where=where) from error
    except Exception as error:  # Pillow's parsers raise many kinds
        what = "empty file" if len(data) == 0 else f"not an image ({len(data)} bytes, begins {bytes(data[:8])!r})"
        raise DataError(what, where=where) from error
    _check_size(image.height, image.width, where)
    return image


def _check_size(height: int, width: int, where: str) -> None:
    if not 0 < max(height, width) <= MAX_SIDE or min(height, width) < 1:
        raise DataError(f"an image of {width} x {height} pixels, sides of 1 to {MAX_SIDE} are due", where=where)
