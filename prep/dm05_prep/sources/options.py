"""The flags that say where and as whom to fetch; shared by ``dataset``, ``model`` and ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Where and as whom to fetch. Secrets are never flags: they come from the environment or from files."""

    revision: str | None = None
    """Branch, tag or commit of a hub repository; the main branch when not given."""
    endpoint: str | None = None
    """Another server: a hub mirror (else $HF_ENDPOINT), or a BOS endpoint (else bcecmd's configuration)."""
    region: str | None = None
    """BOS region, for example bj or gz; decides the endpoint."""
    credentials: Path | None = None
    """File with BOS keys as bcecmd writes it; else $BCE_ACCESS_KEY_ID ..., else ~/.go-bcecli/credentials."""
    anonymous: bool = False
    """Send no credentials, whatever there is."""


NO_OPTIONS = SourceOptions()
