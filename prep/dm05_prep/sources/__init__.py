"""Places to fetch from: a local folder, the Hugging Face hub, Baidu BOS. Each module has one ``open_source``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal, cast

from dm05_schemas.errors import UsageError

from dm05_prep.sources.base import RemoteFile, Source
from dm05_prep.sources.options import NO_OPTIONS, SourceOptions

SourceName = Literal["bos", "hf", "local"]
Kind = Literal["dataset", "model"]

# flag of SourceOptions -> the sources that it is for
APPLIES: dict[str, tuple[SourceName, ...]] = {
    "revision": ("hf",),
    "endpoint": ("bos", "hf"),
    "region": ("bos",),
    "credentials": ("bos",),
    "anonymous": ("bos", "hf"),
}

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
        UsageError: the uri or an option does not fit the source, or the uri is needed and missing.
    """
    _check_options(name, options)
    module = importlib.import_module(f"dm05_prep.sources.{name}")
    if name == "local":
        return cast(Source, module.open_source(uri, kind=kind, jobs=jobs))
    return cast(Source, module.open_source(uri, kind=kind, jobs=jobs, options=options))


def _check_options(name: SourceName, options: SourceOptions) -> None:
    """A flag that would do nothing is no flag to give: whoever gives it expects something else."""
    for flag, known in APPLIES.items():
        if getattr(options, flag) != getattr(NO_OPTIONS, flag) and name not in known:
            what = f"means nothing for --source {name}"
            raise UsageError(what, where=f"--{flag}", fix=f"Leave it out, or use --source {' or '.join(known)}")


def guess_source(uri: str | None) -> SourceName:
    """The source that an address belongs to."""
    if uri is None or uri.startswith("bos:"):
        return "bos"
    if uri.startswith(("/", ".", "~", "file:")) or Path(uri).exists():
        return "local"
    return "hf"
