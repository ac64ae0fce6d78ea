"""The version that statistics, indexes and packs record."""

from __future__ import annotations

from importlib import metadata


def tool_version() -> str:
    """The version of this distribution."""
    return metadata.version("dm05")
