"""``dm05-prep demo``: real input for the whole job, made on the spot from a seed.

::

    DIR/parts/libero.tar.part-000 ...   a LIBERO-like archive as a hub serves it (demo.archive)
    DIR/DM05/                           a tiny checkpoint with the released names (demo.checkpoint)
    DIR/demo.json                       what was written, last: its presence says that the rest is whole
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from dm05_schemas.errors import UsageError
from dm05_schemas.files import replace_file
from dm05_schemas.version import tool_version

from dm05_prep.console import human_bytes, progress, say
from dm05_prep.demo.archive import write_parts
from dm05_prep.demo.checkpoint import write_checkpoint
from dm05_prep.demo.world import TASKS, Trajectory, draw_scene, simulate

MARK = "demo.json"
_FOLDERS = ("parts", "DM05")
_STAGING = ".demo.tmp"
_VIDEO_EPISODES = 2


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What lies in the folder; ``written`` is False when it was all there already."""

    parts: tuple[Path, ...]
    checkpoint: Path
    episodes: int
    frames: int
    written: bool


def draw_episodes(rng: np.random.Generator, count: int, frames: int) -> list[Trajectory]:
    """``count`` episodes of about ``frames`` frames, the tasks in turn."""
    spread = frames // 8
    return [
        simulate(draw_scene(TASKS[number % len(TASKS)], rng), frames + int(rng.integers(-spread, spread + 1)))
        for number in range(count)
    ]


def write_demo(
    folder: Path,
    *,
    seed: int = 0,
    episodes: int = 14,
    frames: int = 45,
    part_bytes: int = 750_000,
    force: bool = False,
    show_progress: bool = False,
) -> DemoResult:
    """Write parts and checkpoint under ``folder``, or find them there from an earlier run with the same settings.

    Args:
        folder: made when missing; other things in it are left alone.
        seed: decides every byte.
        episodes: of libero_pi0_all; libero_goal gets two more, as videos.
        frames: mean length of an episode.
        part_bytes: size of a part; the last one is shorter.
        force: replace what an earlier run left.
        show_progress: show a bar.

    Raises:
        UsageError: the folder holds parts or a checkpoint that this call would not have written.
    """
    settings = {"seed": seed, "episodes": episodes, "frames": frames, "part_bytes": part_bytes}
    if (found := _find(folder, settings)) is not None and not force:
        return found
    for path in (folder / name for name in _FOLDERS):
        if path.exists() and not force:
            fix = "Give another folder, or --force to replace it"
            raise UsageError("is there already and was not made by this demo with these settings", where=path, fix=fix)
    rng = np.random.default_rng(seed)
    images, videos = draw_episodes(rng, episodes, frames), draw_episodes(rng, _VIDEO_EPISODES, frames)
    staging = folder / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    try:
        for name in _FOLDERS:
            (staging / name).mkdir(parents=True)
        with progress(len(images) + len(videos), "episodes", "demo", quiet=not show_progress) as bar:
            subsets = {"libero_pi0_all": images, "libero_goal": videos}
            write_parts(staging / "parts", subsets, part_bytes=part_bytes, on_episode=bar.update)
        write_checkpoint(staging / "DM05", seed)
        (folder / MARK).unlink(missing_ok=True)
        for name in _FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
            (staging / name).rename(folder / name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    total = sum(len(trajectory.moments) for trajectory in images)
    document = {"settings": settings, "version": tool_version(), "frames": total, "files": _sizes(folder)}
    replace_file(folder / MARK, (json.dumps(document, indent=1) + "\n").encode())
    return _result(folder, settings, total, written=True)


def _sizes(folder: Path) -> dict[str, int]:
    paths = (path for name in _FOLDERS for path in sorted((folder / name).iterdir()))
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def _find(folder: Path, settings: dict[str, int]) -> DemoResult | None:
    """The demo of these settings, when it is all there."""
    try:
        document: dict[str, Any] = json.loads((folder / MARK).read_text("utf-8"))
        whole = document["files"] == _sizes(folder)
        same = document["settings"] == settings and document["version"] == tool_version()
        return _result(folder, settings, document["frames"], written=False) if whole and same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _result(folder: Path, settings: dict[str, int], frames: int, *, written: bool) -> DemoResult:
    parts = tuple(sorted((folder / "parts").iterdir()))
    return DemoResult(
        parts=parts, checkpoint=folder / "DM05", episodes=settings["episodes"], frames=frames, written=written
    )


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Write a small LIBERO-like dataset as tar parts, and a tiny DM05 checkpoint: real input for every other command.

    An arm puts blocks on a plate or in a basket, seen by two cameras; a tiny model learns it in a few hundred steps on
    a CPU. The same seed gives the same bytes.

    Examples:
      dm05-prep demo demo
      dm05-prep demo demo --episodes 40 --seed 7
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Where to write: DIR/parts and DIR/DM05."""
    seed: int = 0
    """Decides every byte that is written."""
    episodes: int = 14
    """Episodes of libero_pi0_all (libero_goal gets two more, as videos)."""
    frames: int = 45
    """Mean number of frames of an episode."""
    part_kb: int = 750
    """Size of a part in units of 1000 bytes."""
    force: bool = False
    """Replace what is there."""
    quiet: bool = False
    """No progress bar, no lines but errors."""

    def run(self) -> int:
        """Do it, and say what to run next."""
        for flag, value, least in (("--episodes", self.episodes, 1), ("--frames", self.frames, 2)):
            if value < least:
                raise UsageError(f"{value} is too few", where=flag, fix=f"Give {least} or more")
        if self.part_kb < 1:
            raise UsageError(f"{self.part_kb} is too small", where="--part-kb", fix="Give 1 or more")
        result = write_demo(
            self.folder,
            seed=self.seed,
            episodes=self.episodes,
            frames=self.frames,
            part_bytes=self.part_kb * 1000,
            force=self.force,
            show_progress=not self.quiet,
        )
        self._report(result)
        return 0

    def _report(self, result: DemoResult) -> None:
        size = sum(part.stat().st_size for part in result.parts)
        state = "written" if result.written else "already there"
        say(
            f"demo       {result.episodes} episodes, {result.frames} frames in {len(result.parts)} parts "
            f"({human_bytes(size)}), {state}: {self.folder / 'parts'}",
            self.quiet,
        )
        say(f"demo       tiny checkpoint, {state}: {result.checkpoint}", self.quiet)
        workspace = self.folder / "dm05"
        say(
            f"next       dm05-prep dataset --source local --uri {self.folder / 'parts'} --workspace {workspace}",
            self.quiet,
        )
        say(f"           dm05-prep model --source local --uri {result.checkpoint} --workspace {workspace}", self.quiet)
        say(f"           dm05-train --workspace {workspace}", self.quiet)
