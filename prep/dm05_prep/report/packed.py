"""The pictures of a dataset whose images lie in its pack and nowhere else."""

from __future__ import annotations

import os

from dm05_schemas.errors import DataError
from dm05_schemas.frame_table import BLOB_FIELDS, FrameTable
from dm05_schemas.pack import PACK_DIR, blob_path, check_files, check_matches, read_pack
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace

from dm05_prep.validate.pack_checks import read_stretch


class PackedImages:
    """Reads encoded images from a pack, by episode, frame and camera."""

    def __init__(self, workspace: Workspace, spec: DatasetSpec) -> None:
        """Open it.

        Raises:
            DataError: it is not whole, of another dataset, or without images.
        """
        folder = spec.root(workspace) / PACK_DIR
        info = read_pack(workspace, spec)
        check_files(folder, info)
        check_matches(folder, info, spec)
        if info.images != "blobs":
            raise DataError("holds no images", where=folder, fix=info.rebuild)
        self._paths = [blob_path(folder, record) for record in info.blobs]
        self._info, self._table = info, FrameTable(folder, info)
        self._handles: dict[int, int] = {}
        self._first: dict[str, tuple[int, int]] = {}
        row = 0
        for name, frames in zip(info.episodes, info.episode_frames, strict=True):
            self._first[name] = (row, frames)
            row += frames

    def close(self) -> None:
        """Close its table and blobs."""
        self._table.close()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def read(self, episode: str, frame: int, camera: str) -> bytes:
        """The bytes of an image.

        Raises:
            FileNotFoundError: the pack was made without this episode or frame.
            DataError: the table says what cannot be.
            OSError: a blob cannot be read.
        """
        row, frames = self._first.get(episode, (0, 0))
        if frame >= frames:
            raise FileNotFoundError(episode)
        at = (int(self._table.rows(f"{camera}.{name}", row + frame)[0]) for name in BLOB_FIELDS[:3])
        blob, offset, length = at
        data = read_stretch(blob, offset, length, self._info, self._paths, self._handles) if blob >= 0 else b""
        if len(data) < length:
            raise self._table.error(f"row {row + frame} reaches past the last blob")
        return data
