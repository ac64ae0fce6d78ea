"""The version that statistics, indexes and packs record."""

from __future__ import annotations

from importlib import metadata


def tool_version() -> str:
    """The version of this distribution; "source" where it runs from a folder on the path and is not installed."""
    try:
        return metadata.version("dm05")
    except metadata.PackageNotFoundError:
        return "source"
