"""What the trainer's tests share."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports triton: without a GPU its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from training_runs import make_workspace


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a dataset and a checkpoint, made once."""
    return make_workspace(tmp_path_factory.mktemp("workspace"))
