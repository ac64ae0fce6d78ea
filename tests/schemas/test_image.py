"""Decoding of every kind of picture a dataset may hold, and of broken ones."""

from __future__ import annotations

import io

import numpy as np
import pytest
from dm05_schemas.errors import DataError
from dm05_schemas.image import MAX_SIDE, decode_into, decode_rgb, image_size
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image


def sized_jpeg(width: int, height: int) -> bytes:
    """A JPEG whose header speaks of another size than its 8 x 8 pixels."""
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "JPEG")
    data = bytearray(out.getvalue())
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    return bytes(data)


@pytest.mark.parametrize(("width", "height"), [(12000, 9000), (1, MAX_SIDE + 1), (MAX_SIDE + 1, 1)])
def test_a_header_cannot_ask_for_gigabytes(width: int, height: int) -> None:
    png = io.BytesIO()
    Image.new("1", (width, height)).save(png, "PNG")
    for data in (sized_jpeg(width, height), png.getvalue()):
        for read in (image_size, decode_rgb, lambda data, where: decode_into(data, np.empty(9, np.uint8), where)):
            with pytest.raises(DataError, match=rf"^here: an image of {width} x {height} pixels, sides of 1 to 8192"):
                read(data, "here")


def test_a_bomb_is_refused_from_its_header() -> None:
    bomb = io.BytesIO()
    Image.new("1", (40000, 30000)).save(bomb, "PNG")
    with pytest.raises(DataError, match="here: an image with sides over 8192 pixels"):
        image_size(bomb.getvalue(), "here")


def test_formats_that_run_other_programs_are_refused() -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"
    assert Image.open(io.BytesIO(script)).format == "EPS"
    with pytest.raises(DataError, match="not an image"):
        decode_rgb(script)


def encoded(mode: str, kind: str, **options: object) -> tuple[bytes, Image.Image]:
    yy, xx = np.mgrid[0:24, 0:36]
    smooth = np.stack([xx * 7, yy * 10, (xx + yy) * 4], axis=-1).astype(np.uint8)
    image = Image.fromarray(smooth).convert("RGBA").convert(mode) if mode != "CMYK" else Image.fromarray(smooth)
    image = image.convert(mode)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue(), image


CASES = [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "PNG")]


@pytest.mark.parametrize(("mode", "kind"), [*CASES, ("LA", "PNG"), ("1", "PNG"), ("RGB", "WEBP"), ("RGB", "BMP")])
def test_every_mode_becomes_rgb(mode: str, kind: str) -> None:
    data, _ = encoded(mode, kind)
    pixels = decode_rgb(data, "x")
    with Image.open(io.BytesIO(data)) as opened:
        expected = np.asarray(opened.convert("RGB"))
        size = image_size(data)
        assert (size.format, size.width, size.height) == (opened.format, opened.width, opened.height)
    assert pixels.dtype == np.uint8 and pixels.shape == (24, 36, 3)
    assert np.abs(pixels.astype(int) - expected).max() <= 1
    buffer = np.zeros(24 * 36 * 3 + 5, dtype=np.uint8)
    assert decode_into(data, buffer) == (24, 36)
    assert (buffer[:-5].reshape(24, 36, 3) == pixels).all() and not buffer[-5:].any()
    assert decode_into(data, buffer[:100]) == 24 * 36 * 3
    assert (decode_rgb(memoryview(data)) == pixels).all()


def test_exif_orientation_is_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data, _ = encoded("RGB", "JPEG", exif=exif.tobytes())
    assert decode_rgb(data).shape == (24, 36, 3)


@pytest.mark.parametrize("data", [b"", b"hello", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"])
def test_no_image(data: bytes) -> None:
    for function in (decode_rgb, image_size):
        with pytest.raises(DataError, match=r"episode_3/7\.jpg: "):
            function(data, "episode_3/7.jpg")


@pytest.mark.parametrize(("mode", "kind"), CASES)
def test_cut_short(mode: str, kind: str) -> None:
    data, _ = encoded(mode, kind)
    for end in (len(data) // 4, len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(DataError, match="where"):
            decode_rgb(data[:end], "where")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 10**6), st.integers(1, 255), st.randoms())
def test_flipped_bytes_give_pixels_or_a_data_error(case: tuple[str, str], at: int, flip: int, random: object) -> None:
    data = bytearray(encoded(*case)[0])
    data[at % len(data)] ^= flip
    try:
        assert decode_rgb(bytes(data), "x").shape[2] == 3
    except DataError:
        pass
