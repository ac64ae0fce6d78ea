"""Where the images of a pack come from: the files of an image folder, or the members of an archive as it streams by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from dm05_schemas.episode import Episode
from dm05_schemas.errors import DataError
from dm05_schemas.frame_table import CameraColumns
from dm05_schemas.pack import FileRecord
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace

from dm05_prep.blobs import BLOB_BYTES, BlobWriter, Place, Places, decoded_bytes, read_image, video_images

READERS = 8
LOG_NAME = "members.log"


class CopiedImages:
    """Copies image files (and the frames of video files, as JPEGs) into blobs, one episode after the other.

    Args:
        folder: where the blobs go.
        images: the dataset's image folder.
        spec: the dataset.
        blob_bytes: see :class:`~dm05_prep.blobs.BlobWriter`.
    """

    def __init__(self, folder: Path, images: Path, spec: DatasetSpec, *, blob_bytes: int = BLOB_BYTES) -> None:
        self._images, self._spec = images, spec
        self._blobs = BlobWriter(folder, blob_bytes=blob_bytes)
        self._pool = ThreadPoolExecutor(READERS)
        self.largest_image_bytes = 0

    def columns(self, episode: Episode) -> list[CameraColumns]:
        """See :class:`~dm05_prep.pack.Images`; an image that several frames name is copied once an episode."""
        places = Places()
        known: dict[tuple[str, int], int] = {}
        numbers: list[list[int]] = []
        for camera in range(episode.frame_idx.shape[1]):
            keys = _keys(episode, camera)
            first: dict[tuple[str, int], int] = {}
            for line, key in enumerate(keys, 1):
                first.setdefault(key, line)
            new = [key for key in first if key not in known]
            for key, where, data in self._read(episode, new, first):
                self.largest_image_bytes = max(self.largest_image_bytes, decoded_bytes(data, where))
                known[key] = places.add(self._blobs.append(data))
            numbers.append([known[key] for key in keys])
        return [places.columns(rows) for rows in numbers]

    def finish(self) -> list[FileRecord]:
        """See :class:`~dm05_prep.pack.Images`."""
        return self._blobs.close()

    def _read(
        self, episode: Episode, keys: Sequence[tuple[str, int]], lines: dict[tuple[str, int], int]
    ) -> Iterator[tuple[tuple[str, int], str, bytes]]:
        """Every image that is due, with the name errors give it."""

        def where(key: tuple[str, int]) -> str:
            return f"{episode.path}:{lines[key]}"

        files = [key for key in keys if key[1] < 0]
        contents = self._pool.map(lambda key: read_image(self._images / key[0], where(key)), files)
        for key, data in zip(files, contents, strict=True):
            yield key, f"{where(key)}: {self._images / key[0]}", data
        videos = {url: [key for key in keys if key[0] == url] for url, frame in keys if frame >= 0}
        for url, wanted in videos.items():
            name = f"{where(wanted[0])}: {self._images / url}"
            due = {frame: key for key in wanted for frame in [key[1]]}
            for frame, data in enumerate(video_images(self._images / url, name)):
                if frame in due:
                    yield due.pop(frame), name, data
            if due:
                raise DataError(f"{self._images / url} has no frame {min(due)}", where=where(due[min(due)]))


class ArchiveState(NamedTuple):
    """How far :class:`ArchiveImages` has got, durable on disk: enough to go on from there."""

    log_bytes: int
    blob_bytes: tuple[int, ...]


class ArchiveImages:
    """Learns where the images of an archive lie while it streams by, so that it can be trained from as it is.

    ::

        FOLDER/members.log       one JSON list a member: url; image, video, link or broken; the places and decoded
                                 sizes of its images, the target of the link, or why it is none
        FOLDER/images-00000.bin  copied images, as in the pack

    Args:
        folder: the pack's, under its temporary name.
        parts: the archive's parts, in order, as pack.json should name them (see :func:`part_records`). Empty: the
            parts will not stay, and every image is copied into blobs of the pack's own, in the order of the archive.
        state: where an earlier, interrupted run is to be continued.
    """

    def __init__(self, folder: Path, parts: Sequence[FileRecord] = (), state: ArchiveState | None = None) -> None:
        done = state or ArchiveState(0, ())
        self._parts = list(parts)
        self._blobs = BlobWriter(folder, first=len(self._parts), sizes=done.blob_bytes)
        self._places = Places()
        self._numbers: dict[str, int | list[int] | str] = {}
        self.largest_image_bytes = 0
        self._log_path = folder / LOG_NAME
        self._log = self._log_path.open("r+b" if state else "w+b")
        for line in self._log.read(done.log_bytes).splitlines():
            self._note(*orjson.loads(line))
        self._log.seek(done.log_bytes)
        self._log.truncate()

    def member(self, url: str, part: int, offset: int, data: bytes) -> None:
        """One regular file of the archive's image folder. One that is no image matters only if a frame names it.

        Args:
            url: its path below the image folder.
            part: number of the part its content begins in.
            offset: of its first byte in that part.
            data: its content; it may reach over the end of the part.
        """
        try:
            if _is_video(url):
                images = [(self._blobs.append(image), decoded_bytes(image, url)) for image in video_images(data, url)]
                self._write(url, "video", [[*place, size] for place, size in images])
                return
            size = decoded_bytes(data, url)
        except DataError as error:
            self._write(url, "broken", str(error))
            return
        place = Place.of(part, offset, data) if self._parts else self._blobs.append(data)
        self._write(url, "image", [[*place, size]])

    def link(self, url: str, target: str) -> None:
        """A hard link of the archive: ``url`` has the content of the earlier member ``target``."""
        self._write(url, "link", target)

    def sync(self) -> ArchiveState:
        """Make everything so far durable; the state to continue from."""
        self._blobs.sync()
        self._log.flush()
        os.fsync(self._log.fileno())
        return ArchiveState(self._log.tell(), tuple(self._blobs.sizes))

    def columns(self, episode: Episode) -> list[CameraColumns]:
        """See :class:`~dm05_prep.pack.Images`."""
        return [
            self._places.columns([self._number(key, episode, line) for line, key in enumerate(_keys(episode, c), 1)])
            for c in range(episode.frame_idx.shape[1])
        ]

    def finish(self) -> list[FileRecord]:
        """See :class:`~dm05_prep.pack.Images`."""
        self._log.close()
        return [*self._parts, *self._blobs.close()]

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove the log from the finished pack; until it has its name the work can be taken up again from the log."""
        (folder / LOG_NAME).unlink(missing_ok=True)

    def _write(self, url: str, kind: str, found: Any) -> None:
        self._log.write(orjson.dumps([url, kind, found]) + b"\n")
        self._note(url, kind, found)

    def _note(self, url: str, kind: str, found: Any) -> None:
        """Take in a line of the log."""
        if kind == "broken":
            self._numbers[url] = found
        elif kind == "link":
            self._numbers |= {url: self._numbers[found]} if found in self._numbers else {}
        else:
            numbers = [self._places.add(Place(*place)) for *place, _ in found]
            self._numbers[url] = numbers if kind == "video" else numbers[0]
            self.largest_image_bytes = max([self.largest_image_bytes, *(size for *_, size in found)])

    def _number(self, key: tuple[str, int], episode: Episode, line: int) -> int:
        url, frame = key
        where = f"{episode.path}:{line}"
        found = self._numbers.get(url)
        if found is None:
            raise DataError(f"the archive holds no {url}", where=where)
        if isinstance(found, str):
            raise DataError(found, where=where)
        if isinstance(found, int):
            return found
        if not 0 <= frame < len(found):
            raise DataError(f"{url} is a video of {len(found)} frames, frame {frame} is not there", where=where)
        return found[frame]


def part_records(parts: Sequence[tuple[Path, int]], pack: Path, workspace: Workspace) -> list[FileRecord]:
    """The parts of an archive as pack.json names them: relative to the pack when both move together, else absolute.

    Args:
        parts: where each will stay and its size in bytes, in order.
        pack: the pack's final folder.
        workspace: parts inside it (or inside its data folder) move with the pack.
    """
    homes = [home.resolve() for home in (workspace.root, workspace.data)]
    base = pack.resolve()
    records = []
    for part, size in parts:
        path = part.resolve()
        inside = any(path.is_relative_to(home) and base.is_relative_to(home) for home in homes)
        records.append(FileRecord(path=os.path.relpath(path, base) if inside else str(path), bytes=size))
    return records


def _keys(episode: Episode, camera: int) -> list[tuple[str, int]]:
    """(url, frame number or -1) of every frame."""
    return [
        (urls[camera], frame) for urls, frame in zip(episode.urls, episode.frame_idx[:, camera].tolist(), strict=True)
    ]


def _is_video(url: str) -> bool:
    return url.rpartition(".")[2].lower() in ("mp4", "mkv", "webm", "avi", "mov", "m4v")
