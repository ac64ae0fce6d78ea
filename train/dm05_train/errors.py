"""The error of this package."""

from __future__ import annotations

from dm05_schemas.errors import DM05Error


class TrainError(DM05Error):
    """A training run cannot start or go on."""
