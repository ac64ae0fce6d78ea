"""Episode files of LIBERO's shape without images, for the benchmarks of index and statistics."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import orjson

LIBERO_EPISODES, LIBERO_FRAMES = 1693, 273_000


def write_episodes(folder: Path, episodes: int, frames: int, seed: int = 0) -> int:
    """Write ``episodes`` files of together about ``frames`` frames; returns the number of frames.

    A frame has two image urls, 8 state and 7 action numbers with all their digits and one of ten prompts, some 540
    bytes, as LIBERO's have. Lengths vary by 40%.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    mean = frames / episodes
    total = 0
    for number in range(episodes):
        length = max(2, round(mean * rng.uniform(0.6, 1.4)))
        name = f"episode_{number:06d}"
        states = np.cumsum(rng.normal(scale=0.02, size=(length, 8)), axis=0)
        actions = np.clip(rng.normal(scale=0.4, size=(length, 7)), -1, 1)
        prompt = f"pick up the black bowl number {number % 10} and place it on the plate"
        lines = [
            orjson.dumps(
                {
                    "images_1": {"type": "image", "url": f"./{name}/camera_0/{t:06d}.jpg"},
                    "images_2": {"type": "image", "url": f"./{name}/camera_1/{t:06d}.jpg"},
                    "state": states[t].tolist(),
                    "action": actions[t].tolist(),
                    "prompt": prompt,
                    "is_robot": True,
                }
            )
            for t in range(length)
        ]
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        total += length
    return total


def link_episodes(folder: Path, times: int) -> int:
    """Make ``folder`` hold every episode ``times`` times over, as hard links; returns the number of files."""
    originals = sorted(folder.glob("*.jsonl"))
    for copy in range(1, times):
        for path in originals:
            os.link(path, folder / f"copy_{copy:03d}_{path.name}")
    return times * len(originals)
