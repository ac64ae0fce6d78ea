"""The JSON Schemas that come with this package (``schemas/*.schema.json``).

They say the form of each file to other programs; the readers of this package check more than a schema can (numbers of
dims, doubled keys, finite numbers, files that exist).
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

NAMES = ("frame", "index_cache", "norm_stats", "pack", "validate_report")


def load_schema(name: str) -> dict[str, Any]:
    """The schema called ``name``, one of NAMES."""
    text = resources.files("dm05_schemas").joinpath("schemas", f"{name}.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
