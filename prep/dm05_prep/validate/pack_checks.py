"""Deep validation of a pack: its table's checksum, and every image that lies in its blobs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from dm05_schemas.errors import DataError
from dm05_schemas.findings import Finding, finding
from dm05_schemas.frame_table import BLOB_FIELDS, FrameTable
from dm05_schemas.pack import PackInfo, blob_path, read_info

from dm05_prep.parallel import default_jobs, ordered_map
from dm05_prep.validate.image_checks import check_image

_TASK_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class RowsTask:
    """Some rows of a pack's table; ``decode`` also decodes every pixel."""

    folder: Path
    rows: Sequence[int]
    decode: bool


class _Image(NamedTuple):
    """Where one image lies, and whose it is."""

    blob: int
    offset: int
    length: int
    crc32: int
    label: str


def check_blobs(
    folder: Path, sample: int | None, decode: bool, jobs: int | None
) -> Iterator[tuple[int, list[Finding]]]:
    """Number of images looked at and findings, task by task; nothing without a pack whose images are in blobs.

    Args:
        folder: the pack's, already known to be whole if it is there.
        sample: look at the images of this many rows only.
        decode: decode every pixel too.
        jobs: processes, all cores when None.
    """
    if not folder.is_dir():
        return
    info = read_info(folder)
    if info.images != "blobs":
        return
    try:
        table = FrameTable(folder, info)
        try:
            table.verify()
        finally:
            table.close()
    except DataError as error:
        yield 0, [finding("pack-broken", error.where or folder, None, error.what)]
        return
    rows: Sequence[int] = range(info.frames)
    if sample is not None and sample < info.frames:
        rows = np.sort(np.random.default_rng(0).choice(info.frames, sample, replace=False)).tolist()
    tasks = [
        RowsTask(folder=folder, rows=rows[start : start + _TASK_ROWS], decode=decode)
        for start in range(0, len(rows), _TASK_ROWS)
    ]
    yield from ordered_map(check_rows, tasks, (jobs or default_jobs()) if len(tasks) > 1 else 1)


def check_rows(task: RowsTask) -> tuple[int, list[Finding]]:
    """Check the images of some rows (in a process of its own)."""
    info = read_info(task.folder)
    paths = [blob_path(task.folder, record) for record in info.blobs]
    table = FrameTable(task.folder, info)
    handles: dict[int, int] = {}
    found: list[Finding] = []
    seen: set[tuple[int, int]] = set()
    try:
        for image in _images(table, info, task.rows):
            if (image.blob, image.offset) in seen:
                continue
            seen.add((image.blob, image.offset))
            found += _check(image, info, paths, handles, task.decode)
    finally:
        table.close()
        for handle in handles.values():
            os.close(handle)
    return len(seen), found


def _images(table: FrameTable, info: PackInfo, rows: Sequence[int]) -> Iterator[_Image]:
    first, count = rows[0], rows[-1] - rows[0] + 1
    episodes, frames = (table.rows(name, first, count) for name in ("episode", "frame"))
    for camera in info.cameras:
        columns = [table.rows(f"{camera}.{name}", first, count) for name in BLOB_FIELDS]
        for row in rows:
            blob, offset, length, crc32 = (int(column[row - first]) for column in columns)
            episode, frame = int(episodes[row - first]), int(frames[row - first])
            yield _Image(blob, offset, length, crc32, f"{camera} of {info.episodes[episode]}:{frame + 1}")


def _check(
    image: _Image, info: PackInfo, paths: Sequence[Path], handles: dict[int, int], decode: bool
) -> Iterator[Finding]:
    path = paths[image.blob]
    try:
        data = read_stretch(image.blob, image.offset, image.length, info, paths, handles)
    except OSError as error:
        yield finding("pack-broken", path, None, f"cannot be read: {error.strerror or error} ({image.label})")
        return
    if len(data) != image.length:
        yield finding("pack-broken", path, None, f"is cut short: {image.label} is not there")
    elif zlib.crc32(data) != image.crc32:
        yield finding("pack-broken", path, None, f"the image was changed since it was packed ({image.label})")
    else:
        _, problems = check_image(data, None, decode)
        yield from (finding(kind, path, None, f"{detail} ({image.label})") for kind, detail in problems)


def read_stretch(
    blob: int, offset: int, length: int, info: PackInfo, paths: Sequence[Path], handles: dict[int, int]
) -> bytes:
    """The bytes of an image; one that reaches past the end of its blob goes on at the start of the next.

    Fewer than ``length`` where a blob is cut short or there is no next one. ``handles``: the blobs opened so far.
    """
    data = b""
    while len(data) < length and blob < len(paths):
        if blob not in handles:
            handles[blob] = os.open(paths[blob], os.O_RDONLY)
        here = min(length - len(data), max(0, info.blobs[blob].bytes - offset))
        piece = os.pread(handles[blob], here, offset)
        if len(piece) < here:
            break
        data += piece
        blob, offset = blob + 1, 0
    return data
