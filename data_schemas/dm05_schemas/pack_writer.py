"""Writes a pack, or the frame table of a jsonl folder: everything in a hidden folder that is renamed when complete."""

from __future__ import annotations

import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dm05_schemas.episode import Episode
from dm05_schemas.frame_table import CHUNK_BYTES, FrameWriter
from dm05_schemas.pack import FRAMES_NAME, FileRecord, ImageStore, PackInfo, write_info
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.version import tool_version

CameraColumns = Mapping[str, Any]


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its place when the block ends well, and is removed when it does not.

    What an earlier, killed run left behind is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name.lstrip('.')}-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    new = target.with_name(f".{target.name.lstrip('.')}-{secrets.token_hex(6)}.tmp")
    new.mkdir()
    try:
        yield new
        old = new.with_suffix(".old.tmp")
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


class PackWriter:
    """Collects episodes into frames.arrow and describes them in pack.json.

    Args:
        folder: the (temporary) folder to write into.
        spec: the dataset.
        images: what the camera columns of :meth:`add` hold, see :mod:`dm05_schemas.pack`.
    """

    def __init__(self, folder: Path, spec: DatasetSpec, images: ImageStore) -> None:
        self._folder, self._spec, self._images = folder, spec, images
        self._path = folder / FRAMES_NAME
        self._table = FrameWriter(self._path, spec, images)
        self._prompts: dict[str, int] = {}
        self._episodes: list[str] = []
        self._frames: list[int] = []

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._table.close()

    def add(self, name: str, episode: Episode, cameras: Sequence[CameraColumns]) -> None:
        """Append one episode.

        Args:
            name: its path relative to the jsonl folder.
            episode: its frames.
            cameras: for each camera, a value [n] for each field of its struct.
        """
        frames = len(episode)
        numbers = np.array([self._prompts.setdefault(text, len(self._prompts)) for text in episode.prompts])
        columns: dict[str, Any] = {
            "episode": np.full(frames, len(self._episodes), dtype=np.int32),
            "frame": np.arange(frames, dtype=np.int32),
            "prompt": numbers[episode.prompt_ids].astype(np.int32),
            "state": episode.state,
            "target": _targets(episode),
            **dict(zip(self._spec.image_keys, cameras, strict=True)),
        }
        self._table.add(columns)
        self._episodes.append(name)
        self._frames.append(frames)

    def finish(
        self,
        *,
        source: str,
        rebuild: str,
        blobs: Sequence[FileRecord] = (),
        largest_image_bytes: int = 0,
    ) -> PackInfo:
        """Close frames.arrow and write pack.json; the folder is then complete."""
        self._table.finish()
        info = PackInfo(
            dataset=self._spec.name,
            images=self._images,
            state_dim=self._spec.state_dim,
            action_dim=self._spec.action_dim,
            cameras=self._spec.image_keys,
            prompts=tuple(self._prompts),
            episodes=tuple(self._episodes),
            episode_frames=tuple(self._frames),
            frames_file=FileRecord(path=FRAMES_NAME, bytes=self._path.stat().st_size),
            frames_crc32=_crc32(self._path),
            blobs=tuple(blobs),
            largest_image_bytes=largest_image_bytes,
            source=source,
            rebuild=rebuild,
            tool_version=tool_version(),
        )
        write_info(self._folder, info)
        return info


def file_columns(episode: Episode) -> list[CameraColumns]:
    """The camera columns of a dataset whose images stay files."""
    cameras = range(episode.frame_idx.shape[1])
    return [{"url": [urls[v] for urls in episode.urls], "frame_idx": episode.frame_idx[:, v]} for v in cameras]


def _targets(episode: Episode) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[n, A]: rows t, t+1, ... of it are the chunk at t. The last row is never a chunk's first and repeats past the
    end."""
    if episode.action is not None:
        return episode.action
    return np.concatenate([episode.state[1:], episode.state[-1:]])


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            crc = zlib.crc32(data, crc)
        os.fsync(file.fileno())
    return crc
