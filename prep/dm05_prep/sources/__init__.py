"""Places to fetch from: a local folder, the Hugging Face hub, Baidu BOS. Each module has one ``open_source``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal, cast

from dm05_prep.sources.base import RemoteFile, Source
from dm05_prep.sources.options import NO_OPTIONS, SourceOptions

SourceName = Literal["bos", "hf", "local"]
Kind = Literal["dataset", "model"]

__all__ = ["Kind", "RemoteFile", "Source", "SourceName", "SourceOptions", "guess_source", "open_source"]


def open_source(
    name: SourceName, uri: str | None, *, kind: Kind, jobs: int = 8, options: SourceOptions = NO_OPTIONS
) -> Source:
    """The source behind ``--source`` and ``--uri``.

    Args:
        uri: None stands for the released data or model at that place.
        kind: what is fetched; decides the default uri and, on a hub, the type of the repository.
        jobs: connections at once.
        options: where and as whom; a source of local files has no use for them.

    Raises:
        UsageError: the uri does not fit the source, or is needed and missing.
    """
    module = importlib.import_module(f"dm05_prep.sources.{name}")
    if name == "local":
        return cast(Source, module.open_source(uri, kind=kind, jobs=jobs))
    return cast(Source, module.open_source(uri, kind=kind, jobs=jobs, options=options))


def guess_source(uri: str | None) -> SourceName:
    """The source that an address belongs to."""
    if uri is None or uri.startswith("bos:"):
        return "bos"
    if uri.startswith(("/", ".", "~", "file:")) or Path(uri).exists():
        return "local"
    return "hf"
