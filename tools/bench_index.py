"""The index at LIBERO's size against plain ways of making it, in one run. For developers; never a test.

    python tools/bench_index.py                   1,693 episodes, 273 thousand frames (150 MB), temporary
    python tools/bench_index.py --images          with the 546 thousand (empty) image files around them

Plain ways, one core each: *split* opens every file as text, splits it into lines and keeps those that are not blank, as
the public loader does after a recursive glob for ``*.jsonl``; *parse* also reads each line as JSON, which is what makes
sure that a line is a frame. Ours counts bytes, notices blank lines, and takes a checksum of every file.
"""

from __future__ import annotations

import glob
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro
from dm05_prep.index import build_index
from dm05_prep.index_scan import Counted, count_bytes
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.workspace import Workspace
from synthetic_episodes import LIBERO_EPISODES, LIBERO_FRAMES, write_episodes


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time the index against plain ways of making it."""

    episodes: int = LIBERO_EPISODES
    """Number of episode files."""
    frames: int = LIBERO_FRAMES
    """About how many frames they have together."""
    images: bool = False
    """Also lay out empty image files, which a recursive glob has to walk through."""
    repeats: int = 5
    """Runs of each way; the best one counts."""


def main(bench: Bench) -> None:
    """Write the files, time every way, print a table."""
    with tempfile.TemporaryDirectory(prefix="dm05-bench-") as folder:
        workspace = Workspace(Path(folder))
        spec = lookup("libero_pi0_all", workspace)
        frames = write_episodes(spec.jsonl(workspace), bench.episodes, bench.frames)
        if bench.images:
            _write_images(spec, workspace)
        root, size = spec.root(workspace), sum(path.stat().st_size for path in spec.jsonl(workspace).iterdir())
        print(f"{bench.episodes:,} episodes, {frames:,} frames, {size / 1e6:.0f} MB, files in the page cache")
        known = _known(spec, workspace)
        ways: dict[str, Callable[[], int]] = {
            "plain: glob, split": lambda: _split(root),
            "plain: glob, parse": lambda: _parse(root),
            "ours, every file read": lambda: build_index(workspace, spec, force=True).frames,
            "ours, counted while extracting": lambda: build_index(workspace, spec, force=True, known=known).frames,
            "ours, nothing changed": lambda: build_index(workspace, spec).frames,
        }
        seconds = {}
        for name, way in ways.items():
            seconds[name] = min(_timed(way, frames) for _ in range(bench.repeats if "parse" not in name else 1))
        print(f"{'':<32}{'seconds':>9}{'x split':>9}{'x parse':>9}")
        for name, took in seconds.items():
            split, parse = (seconds[f"plain: glob, {word}"] / took for word in ("split", "parse"))
            print(f"{name:<32}{took:>9.3f}{split:>9.1f}{parse:>9.1f}")


def _timed(way: Callable[[], int], frames: int) -> float:
    begin = time.perf_counter()
    counted = way()
    took = time.perf_counter() - begin
    assert counted == frames, (counted, frames)
    return took


def _split(root: Path) -> int:
    counts = {}
    for name in glob.glob(f"{root}/**/*.jsonl", recursive=True):
        with open(name) as file:
            counts[name] = len([line for line in file.readlines() if line.strip()])
    json.dumps({"data": counts})
    return sum(counts.values())


def _parse(root: Path) -> int:
    counts = {}
    for name in glob.glob(f"{root}/**/*.jsonl", recursive=True):
        with open(name) as file:
            counts[name] = len([json.loads(line) for line in file.readlines() if line.strip()])
    json.dumps({"data": counts})
    return sum(counts.values())


def _known(spec: DatasetSpec, workspace: Workspace) -> dict[Path, Counted]:
    return {path: count_bytes(path.read_bytes(), path) for path in spec.jsonl(workspace).iterdir()}


def _write_images(spec: DatasetSpec, workspace: Workspace) -> None:
    for path in spec.jsonl(workspace).iterdir():
        frames = path.read_bytes().count(b"\n")
        for camera in ("camera_0", "camera_1"):
            folder = spec.images(workspace) / path.stem / camera
            folder.mkdir(parents=True)
            for t in range(frames):
                (folder / f"{t:06d}.jpg").touch()


if __name__ == "__main__":
    main(tyro.cli(Bench, description=__doc__))
