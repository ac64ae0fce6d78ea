"""What the trainer's tests share."""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports triton: without a GPU its kernels run in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import load_weights
from safetensors.torch import load_file
from training_runs import make_workspace

TINY = Path(__file__).parent.parent / "golden" / "tiny_dm05"


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a dataset and a checkpoint, made once."""
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture()
def model() -> DM05:
    """The golden tiny model."""
    model = DM05(DM05Config.from_json(TINY))
    load_weights(model, TINY)
    return model


@pytest.fixture(scope="session")
def batch() -> dict[str, torch.Tensor]:
    """Its batch, noise and times included."""
    return load_file(TINY / "batch.safetensors")
