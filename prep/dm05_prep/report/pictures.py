"""A few frames of a few episodes as small JPEGs, ready to stand in a page."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dm05_schemas.episode import Episode, read_episode
from dm05_schemas.errors import DataError
from dm05_schemas.findings import Finding
from dm05_schemas.frame import Problem
from dm05_schemas.image import decode_rgb
from dm05_schemas.pack import PACK_DIR
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.video import VideoReader
from dm05_schemas.workspace import Workspace
from numpy.typing import NDArray
from PIL import Image

from dm05_prep.report.facts import EpisodeFacts, Facts
from dm05_prep.report.packed import PackedImages
from dm05_prep.validate.image_checks import NamedFile, check_image, read_frame, read_image

QUALITY = 72


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One frame of one camera; ``data`` is a ``data:`` URI, or None when ``problem`` says why there is none."""

    frame: int
    data: str | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Frames of one episode, evenly spaced from the first to the last: one row of pictures a camera."""

    episode: EpisodeFacts
    frames: tuple[int, ...]
    rows: tuple[tuple[Picture, ...], ...]


class Camera:
    """Fetches frames of a dataset as pictures: from its image folder or, where there is none, from its pack."""

    def __init__(self, workspace: Workspace, spec: DatasetSpec) -> None:
        self.workspace, self.spec = workspace, spec
        self._videos = VideoReader()
        self._packed: PackedImages | None = None
        self._only_pack = not spec.images(workspace).is_dir() and (spec.root(workspace) / PACK_DIR).is_dir()
        if self._only_pack:
            with contextlib.suppress(DataError):  # the check of the layout says what is wrong with it
                self._packed = PackedImages(workspace, spec)
        self._found: dict[tuple[str, str], Finding] = {}

    @property
    def findings(self) -> list[Finding]:
        """What was wrong with the pictures fetched so far, once for each file and kind."""
        return list(self._found.values())

    def close(self) -> None:
        """Close the videos and the pack."""
        self._videos.close()
        if self._packed:
            self._packed.close()

    def glance(self, episode: EpisodeFacts, share: float, size: int) -> Picture:
        """One frame of the first camera, at ``share`` (0 .. 1) of the episode."""
        full = self._read(episode)
        t = round(share * (episode.frames - 1))
        return self._fetch(full, t, 0, size)

    def strip(self, episode: EpisodeFacts, count: int, size: int, cameras: int | None = None) -> Strip:
        """``count`` frames (all, of a shorter episode) of the first ``cameras`` cameras, ``size`` pixels at most."""
        frames = np.unique(np.linspace(0, episode.frames - 1, count).round().astype(int)).tolist()
        full = self._read(episode)
        rows = tuple(
            tuple(self._fetch(full, t, view, size) for t in frames)
            for view in range(cameras or len(self.spec.image_keys))
        )
        return Strip(episode=episode, frames=tuple(frames), rows=rows)

    def _read(self, episode: EpisodeFacts) -> Episode:
        return read_episode(self.spec.jsonl(self.workspace) / episode.name, self.spec)

    def _fetch(self, episode: Episode, t: int, view: int, size: int) -> Picture:
        if self._only_pack and not self._packed:
            return Picture(frame=t, data=None, problem="unreadable")
        root, url, index = self.spec.images(self.workspace), episode.urls[t][view], int(episode.frame_idx[t, view])
        pixels = self._pixels(NamedFile(root, url, episode.path, t, self.spec.image_keys[view]), index)
        if not isinstance(pixels, Finding):
            return Picture(frame=t, data=_data_uri(Image.fromarray(pixels), size))
        self._found.setdefault((pixels.kind, url), pixels)
        missing = pixels.kind in ("image-missing", "image-case", "broken-link")
        return Picture(frame=t, data=None, problem="missing" if missing else "unreadable")

    def _pixels(self, named: NamedFile, index: int) -> NDArray[np.uint8] | Finding:
        """A frame, uint8 [H, W, 3], or what deep validation says of it."""
        if self._packed:
            return _from_pack(self._packed, named)
        if index >= 0:
            return read_frame(self._videos, named, index)
        data = read_image(named)
        if isinstance(data, Finding):
            return data
        try:
            return decode_rgb(data, named.url)
        except DataError:
            return named.at_file(check_image(data, named.url, decode=True)[1][0])


def _from_pack(packed: PackedImages, named: NamedFile) -> NDArray[np.uint8] | Finding:
    try:
        return decode_rgb(packed.read(named.episode.name, named.row, named.camera), named.url)
    except FileNotFoundError:
        return named.at_line(Problem("image-missing", f"{named.url} is not in the pack"))
    except OSError as error:
        return named.at_line(Problem("pack-broken", f"{named.url} cannot be read: {error.strerror or error}"))
    except DataError as error:
        return named.at_line(Problem("pack-broken", str(error)))


def _data_uri(image: Image.Image, size: int) -> str:
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def varied(facts: Facts, count: int) -> list[EpisodeFacts]:
    """Episodes to show: of as many tasks as there are, frequent ones first, each near its task's usual length."""
    by_task: dict[int, list[EpisodeFacts]] = {}
    for episode in facts.episodes:
        by_task.setdefault(episode.task, []).append(episode)
    queues = [_typical(group) for _, group in sorted(by_task.items(), key=lambda item: (-len(item[1]), item[0]))]
    chosen: list[EpisodeFacts] = []
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue) and len(chosen) < count:
                chosen.append(queue[turn])
    return chosen


def _typical(group: Sequence[EpisodeFacts]) -> list[EpisodeFacts]:
    middle = float(np.median([episode.frames for episode in group]))
    return sorted(group, key=lambda episode: (abs(episode.frames - middle), episode.name))
