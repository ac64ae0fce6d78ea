"""Writes a pack, or the frame table of a jsonl folder: everything in a hidden folder that is renamed when complete."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dm05_schemas.episode import Episode
from dm05_schemas.files import folder_lock, is_locked, naming
from dm05_schemas.frame_table import CHUNK_BYTES, CameraColumns, FrameWriter, Rows, url_checksum
from dm05_schemas.pack import FRAMES_NAME, FileRecord, ImageStore, PackInfo, write_info
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.version import tool_version


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its place when the block ends well, and is removed when it does not.

    What earlier, killed runs left behind is removed first.

    Raises:
        OSError: the folder cannot be made, or ``target`` is a file.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file where a folder is due", str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    stem = f".{target.name.lstrip('.')}-"
    new = target.with_name(f"{stem}{secrets.token_hex(6)}.tmp")
    with ExitStack() as held:
        with folder_lock(target.parent):
            for leftover in target.parent.glob(f"{stem}*.tmp"):
                _remove_if_left(leftover)
            new.mkdir()
            held.enter_context(folder_lock(new))
        try:
            with naming(target):
                yield new
                put_in_place(new, target)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def put_in_place(new: Path, target: Path) -> None:
    """Give the complete folder ``new``, on the same file system, the name ``target``; what was there is removed."""
    old = target.with_name(f".{target.name.lstrip('.')}-{secrets.token_hex(6)}.tmp")
    with folder_lock(target.parent):
        if target.exists():
            target.rename(old)
        new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    """Remove a temporary folder that no living process is writing to."""
    with suppress(OSError):
        if not is_locked(folder):
            shutil.rmtree(folder, ignore_errors=True)


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
        rows = Rows(
            episode=np.full(frames, len(self._episodes), dtype=np.int32),
            frame=np.arange(frames, dtype=np.int32),
            prompt=numbers[episode.prompt_ids].astype(np.int32),
            state=episode.state,
            target=_targets(episode),
        )
        self._table.add(rows, dict(zip(self._spec.image_keys, cameras, strict=True)))
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
    columns: list[CameraColumns] = []
    for camera in range(episode.frame_idx.shape[1]):
        urls, frames = [urls[camera] for urls in episode.urls], episode.frame_idx[:, camera].tolist()
        checks = [url_checksum(url, frame) for url, frame in zip(urls, frames, strict=True)]
        columns.append({"url": urls, "frame_idx": frames, "crc32": checks})
    return columns


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
