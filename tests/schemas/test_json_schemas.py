"""The JSON Schemas say the same as the readers, as far as a schema can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from dm05_schemas.frame import check_frame
from dm05_schemas.json_schemas import NAMES, load_schema
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace

GOLDEN = Path(__file__).parent.parent / "golden"
SPEC = lookup("libero_pi0_all", Workspace(Path(".")))


@pytest.mark.parametrize("name", NAMES)
def test_they_are_schemas(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(load_schema(name))


def frames() -> list[dict[str, Any]]:
    good = json.loads((GOLDEN / "stats_absolute/jsonl/episode_000.jsonl").read_text().splitlines()[0])
    changes: list[dict[str, Any]] = [
        {},
        {"is_robot": False, "other": [1]},
        {"is_robot": 1},
        {"prompt": 1},
        {"state": "x"},
        {"state": [1, None] * 4},
        {"state": [1e39] * 8},
        {"state": [True] * 8},
        {"action": ["1"] * 7},
        {"images_1": "x.jpg"},
        {"images_1": {"type": "image"}},
        {"images_1": {"type": "depth", "url": "x"}},
        {"images_1": {"type": "image", "url": ""}},
        {"images_1": {"type": "image", "url": "/x"}},
        {"images_1": {"type": "image", "url": "s3://x/y"}},
        {"images_1": {"type": "image", "url": "x", "frame_idx": None}},
        {"images_1": {"type": "video", "url": "x"}},
        {"images_1": {"type": "video", "url": "x", "frame_idx": -1}},
        {"images_1": {"type": "video", "url": "x", "frame_idx": 3}},
    ]
    return [good | change for change in changes]


@pytest.mark.parametrize("frame", frames())
def test_a_frame(frame: dict[str, Any]) -> None:
    valid = jsonschema.Draft202012Validator(load_schema("frame")).is_valid(frame)
    assert valid == (check_frame(frame, SPEC) == [])
