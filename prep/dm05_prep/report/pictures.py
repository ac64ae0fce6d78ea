"""A few frames of a few episodes as small JPEGs, ready to stand in a page."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dm05_schemas.episode import Episode, read_episode
from dm05_schemas.errors import DataError, DM05Error
from dm05_schemas.findings import Finding, finding
from dm05_schemas.image import decode_rgb
from dm05_schemas.pack import PACK_DIR
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.video import VideoReader
from dm05_schemas.workspace import Workspace
from PIL import Image

from dm05_prep.report.facts import EpisodeFacts, Facts
from dm05_prep.report.packed import PackedImages

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
        self.videos = VideoReader()
        self._packed: PackedImages | None = None
        self._only_pack = not spec.images(workspace).is_dir() and (spec.root(workspace) / PACK_DIR).is_dir()
        if self._only_pack:
            with contextlib.suppress(DataError):  # the check of the layout says what is wrong with it
                self._packed = PackedImages(workspace, spec)
        self.findings: list[Finding] = []
        """What was wrong with the pictures fetched so far."""

    def close(self) -> None:
        """Close the videos and the pack."""
        self.videos.close()
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
        url, index = episode.urls[t][view], int(episode.frame_idx[t, view])
        path = self.spec.images(self.workspace) / url
        kind = "image-broken" if index < 0 else "video-broken"
        try:
            if self._packed:
                kind = "pack-broken"
                data = self._packed.read(episode.path.name, t, self.spec.image_keys[view])
                pixels = decode_rgb(data, url)
            elif index >= 0:
                pixels = self.videos.read(path, index, url)
            else:
                pixels = decode_rgb(path.read_bytes(), url)
        except FileNotFoundError:
            kind, problem = "image-missing", f"{self.spec.image_keys[view]}: {url} is not there"
        except OSError as error:
            problem = f"{self.spec.image_keys[view]}: {url} cannot be read: {error.strerror or error}"
        except DM05Error as error:
            problem = f"{self.spec.image_keys[view]}: {error}"
        else:
            return Picture(frame=t, data=_data_uri(Image.fromarray(pixels), size))
        self.findings.append(finding(kind, episode.path, t + 1, problem))
        return Picture(frame=t, data=None, problem="missing" if kind == "image-missing" else "unreadable")


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
