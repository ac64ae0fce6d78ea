"""The error of this package."""

from __future__ import annotations

from dm05_schemas.errors import DM05Error


class PrepError(DM05Error):
    """A source, an archive or a stage of preparation is at fault."""
