"""Writes frames as a Motion-JPEG ``.mp4``, so that the demo has a video subset without a video library.

Layout of the file (ISO base media; every frame is a whole JPEG, so every frame is a key frame)::

    ftyp                         the brand
    mdat                         the JPEGs, back to back
    moov                         mvhd, and one trak: tkhd, mdia (mdhd, hdlr, minf (vmhd, dinf, stbl))
      stbl                       stsd (codec "jpeg"), stts (durations), stsc (one chunk), stsz (sizes), stco (offset)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_IDENTITY = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)


def _box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def _full_box(kind: bytes, *parts: bytes, flags: int = 0) -> bytes:
    return _box(kind, struct.pack(">I", flags), *parts)  # version 0


def _sample_table(jpegs: Sequence[bytes], size: int, offset: int) -> bytes:
    entry = _box(
        b"jpeg",
        struct.pack(">6xH16xHHIIIH", 1, size, size, 0x480000, 0x480000, 0, 1),
        struct.pack(">B31sHh", 4, b"jpeg", 24, -1),
    )
    return _box(
        b"stbl",
        _full_box(b"stsd", struct.pack(">I", 1), entry),
        _full_box(b"stts", struct.pack(">III", 1, len(jpegs), 1)),
        _full_box(b"stsc", struct.pack(">IIII", 1, 1, len(jpegs), 1)),
        _full_box(b"stsz", struct.pack(">II", 0, len(jpegs)), struct.pack(f">{len(jpegs)}I", *map(len, jpegs))),
        _full_box(b"stco", struct.pack(">II", 1, offset)),
    )


def motion_jpeg(jpegs: Sequence[bytes], *, size: int, rate_hz: int) -> bytes:
    """The whole file for square frames of ``size`` pixels, ``rate_hz`` a second."""
    count = len(jpegs)
    brand = _box(b"ftyp", b"isom", struct.pack(">I", 512), b"isom", b"mp41")
    data = _box(b"mdat", *jpegs)
    minf = _box(
        b"minf",
        _full_box(b"vmhd", bytes(8), flags=1),
        _box(b"dinf", _full_box(b"dref", struct.pack(">I", 1), _full_box(b"url ", flags=1))),
        _sample_table(jpegs, size, len(brand) + 8),
    )
    media = _box(
        b"mdia",
        _full_box(b"mdhd", struct.pack(">IIIIHH", 0, 0, rate_hz, count, 0x55C4, 0)),
        _full_box(b"hdlr", bytes(4), b"vide", bytes(12), b"video\0"),
        minf,
    )
    header = _full_box(
        b"tkhd",
        struct.pack(">IIIII8x4H", 0, 0, 1, 0, count, 0, 0, 0, 0),
        _IDENTITY,
        struct.pack(">II", size << 16, size << 16),
        flags=3,
    )
    movie = _full_box(
        b"mvhd",
        struct.pack(">IIIIIH10x", 0, 0, rate_hz, count, 0x10000, 0x100),
        _IDENTITY,
        bytes(24),
        struct.pack(">I", 2),
    )
    return brand + data + _box(b"moov", movie, _box(b"trak", header, media))
