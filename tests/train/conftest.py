"""What the trainer's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import make_workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a dataset and a checkpoint, made once."""
    return make_workspace(tmp_path_factory.mktemp("workspace"))
