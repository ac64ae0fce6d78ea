"""A faultless small dataset with images, for the tests of validation."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from dm05_prep.norm_stats import compute
from dm05_prep.validate import validate
from dm05_schemas.episode import read_episode
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace
from PIL import Image
from workspaces import make_spec, random_episodes, write_vectors

SPEC = make_spec()
J = "jsonl/episode_000.jsonl"
URL = "episode_000/camera_0/000001.jpg"
C = f"image/{URL}"
Change = Callable[[Workspace], object]


def encoded(kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (32, 24), seed: int = 0) -> bytes:
    """A picture as a file's bytes."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(sink, kind)
    return sink.getvalue()


def make_dataset(root: Path, lengths: tuple[int, ...] = (3, 4), spec: DatasetSpec = SPEC) -> Workspace:
    """A complete, faultless dataset: frames, images, index, statistics."""
    workspace = Workspace(root)
    write_vectors(workspace, spec, random_episodes(0, lengths, spec))
    picture = encoded()
    for path in spec.jsonl(workspace).iterdir():
        for urls in read_episode(path, spec).urls:
            for url in urls:
                target = spec.images(workspace) / url
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(picture)
    compute(workspace, spec, 4, "absolute")
    return workspace


def found(workspace: Workspace, deep: bool = True, **options: object) -> list[tuple[str, str]]:
    """Kind and "path:line: detail" of every finding, paths relative to the dataset's folder where they are in it."""
    report = validate(workspace, SPEC, deep=deep, **options)  # type: ignore[arg-type]
    root = f"{SPEC.root(workspace)}{os.sep}"
    return [(item.kind, f"{item.place}: {item.detail}".replace(root, "")) for item in report.findings]


def picture(workspace: Workspace, frame: int = 1) -> Path:
    """The head camera's picture of a frame of the first episode."""
    return SPEC.images(workspace) / f"episode_000/camera_0/{frame:06d}.jpg"


def longer_episode(workspace: Workspace) -> None:
    path = SPEC.root(workspace) / J
    path.write_text(path.read_text() + path.read_text())
