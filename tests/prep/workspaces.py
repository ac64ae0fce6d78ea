"""Small datasets on disk for the tests of prep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace

GOLDEN = Path(__file__).parent.parent / "golden"


def make_spec(
    name: str = "toy", state_desc: Sequence[str] = ("joint",) * 3 + ("gripper",), action_dim: int = 3, **changes: Any
) -> DatasetSpec:
    """A dataset of two cameras at data/NAME."""
    given: dict[str, Any] = {
        "name": name,
        "folder": Path("data") / name,
        "image_keys": ("images_1", "images_2"),
        "image_prompts": ("Head", "Wrist"),
        "state_desc": tuple(state_desc),
        "action_dim": action_dim,
    }
    return DatasetSpec(**(given | changes))


def make_frame(
    episode: str, number: int, state: Sequence[float], action: Sequence[float] | None, **changes: Any
) -> dict[str, Any]:
    """One frame whose images are ``EPISODE/camera_C/NNNNNN.jpg``."""
    frame: dict[str, Any] = {
        f"images_{camera + 1}": {"type": "image", "url": f"./{episode}/camera_{camera}/{number:06d}.jpg"}
        for camera in (0, 1)
    }
    frame["state"] = list(state)
    if action is not None:
        frame["action"] = list(action)
    return frame | {"prompt": "put the bowl on the plate", "is_robot": True} | changes


def write_lines(path: Path, frames: Sequence[object]) -> Path:
    """An episode file of these frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(frame) + "\n" for frame in frames), encoding="utf-8")
    return path


def write_vectors(
    workspace: Workspace, spec: DatasetSpec, episodes: Sequence[tuple[np.ndarray, np.ndarray | None]]
) -> None:
    """Episodes ``episode_NNN`` of the given states [n, S] and actions [n, A] (or None)."""
    for number, (states, actions) in enumerate(episodes):
        name = f"episode_{number:03d}"
        frames = [
            make_frame(name, t, states[t].tolist(), None if actions is None else actions[t].tolist())
            for t in range(len(states))
        ]
        write_lines(spec.jsonl(workspace) / f"{name}.jsonl", frames)


def random_episodes(
    seed: int, lengths: Sequence[int], spec: DatasetSpec, with_action: bool = True
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Random vectors for episodes of these lengths."""
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(n, spec.state_dim)), rng.normal(size=(n, spec.action_dim)) if with_action else None)
        for n in lengths
    ]
