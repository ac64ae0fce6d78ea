"""Packs the demo episodes the way a hub serves LIBERO: one tar, cut by size into numbered parts.

::

    parts/libero.tar.part-000 ...        concatenated in order they are the archive:
      libero/libero_pi0_all/image/episode_000/camera_0/000000.jpg   one JPEG a frame and camera
      libero/libero_pi0_all/jsonl/episode_000.jsonl                 one frame a line
      libero/libero_goal/video/episode_000/camera_0.mp4             one video an episode and camera
      libero/libero_goal/jsonl/episode_000.jsonl
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dm05_prep.demo.render import SIZE, render
from dm05_prep.demo.video import motion_jpeg
from dm05_prep.demo.world import Trajectory

RATE_HZ = 10
Member = tuple[str, bytes]


class PartWriter(io.RawIOBase):
    """A write-only stream cut into ``stem.part-000``, ``stem.part-001``, ... of ``part_bytes`` each."""

    def __init__(self, folder: Path, stem: str, part_bytes: int) -> None:
        super().__init__()
        self.paths: list[Path] = []
        self._folder, self._stem, self._part_bytes = folder, stem, part_bytes
        self._pending = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pending += data
        while len(self._pending) > self._part_bytes:
            self._cut(self._part_bytes)
        return len(data)

    def close(self) -> None:
        if not self.closed and self._pending:
            self._cut(len(self._pending))
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut(self, count: int) -> None:
        path = self._folder / f"{self._stem}.part-{len(self.paths):03d}"
        path.write_bytes(self._pending[:count])
        self.paths.append(path)
        del self._pending[:count]


def _frame_line(views: Sequence[dict[str, Any]], trajectory: Trajectory, t: int) -> str:
    frame = {
        **{f"images_{number}": view for number, view in enumerate(views, start=1)},
        "state": trajectory.state[t].round(6).tolist(),
        "action": trajectory.action[t].round(6).tolist(),
        "prompt": trajectory.scene.task.text,
        "is_robot": True,
    }
    return json.dumps(frame, ensure_ascii=False) + "\n"


def image_episode(name: str, trajectory: Trajectory) -> Iterator[Member]:
    """Members of one episode of a subset that holds images: its JPEGs, then its jsonl file."""
    lines = []
    for t, moment in enumerate(trajectory.moments):
        urls = [f"{name}/camera_{camera}/{t:06d}.jpg" for camera in (0, 1)]
        for url, picture in zip(urls, render(trajectory.scene, moment), strict=True):
            yield f"image/{url}", picture
        lines.append(_frame_line([{"type": "image", "url": f"./{url}"} for url in urls], trajectory, t))
    yield f"jsonl/{name}.jsonl", "".join(lines).encode()


def video_episode(name: str, trajectory: Trajectory) -> Iterator[Member]:
    """Members of one episode of a subset that holds videos: one file a camera, then its jsonl file."""
    cameras = zip(*(render(trajectory.scene, moment) for moment in trajectory.moments), strict=True)
    urls = [f"{name}/camera_{camera}.mp4" for camera in (0, 1)]
    for url, pictures in zip(urls, cameras, strict=True):
        yield f"video/{url}", motion_jpeg(pictures, size=SIZE, rate_hz=RATE_HZ)
    lines = [
        _frame_line([{"type": "video", "url": f"./{url}", "frame_idx": t} for url in urls], trajectory, t)
        for t in range(len(trajectory.moments))
    ]
    yield f"jsonl/{name}.jsonl", "".join(lines).encode()


def _header(name: str, size: int | None) -> tarfile.TarInfo:
    """A header without a clock or an owner in it, so that the same seed gives the same bytes."""
    info = tarfile.TarInfo(name)
    info.mode, info.size = (0o755, 0) if size is None else (0o644, size)
    if size is None:
        info.type = tarfile.DIRTYPE
    return info


def write_parts(
    folder: Path,
    subsets: dict[str, list[Trajectory]],
    *,
    part_bytes: int,
    on_episode: Callable[[], object],
) -> list[Path]:
    """Tar the subsets under ``libero/`` and cut the tar into ``folder/libero.tar.part-NNN``.

    Subsets named ``libero_pi0_all`` hold images, the others videos, as in the published archive.
    """
    with PartWriter(folder, "libero.tar", part_bytes) as stream:
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            made: set[str] = set()
            for subset, trajectories in subsets.items():
                episode = image_episode if subset == "libero_pi0_all" else video_episode
                for number, trajectory in enumerate(trajectories):
                    for member, content in episode(f"episode_{number:03d}", trajectory):
                        path = Path("libero", subset, member)
                        for parent in [*reversed(path.parents)][1:]:
                            if parent.as_posix() not in made:
                                made.add(parent.as_posix())
                                tar.addfile(_header(parent.as_posix(), None))
                        tar.addfile(_header(path.as_posix(), len(content)), io.BytesIO(content))
                    on_episode()
        stream.flush()
    return stream.paths
