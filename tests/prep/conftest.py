"""Fixtures for what fetches: services in processes of their own, and an environment without anything of the user's."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dm05_prep.demo.checkpoint import write_checkpoint
from process import Service


@pytest.fixture
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No keys, tokens, proxies or configuration of the user; short pauses. Returns the home folder."""
    for name in list(os.environ):
        if name.startswith(("BCE_", "BOS_", "HF_", "HUGGING", "DM05_", "TRANSFORMERS_")) or name.lower().endswith(
            "_proxy"
        ):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setenv("DM05_PREP_RETRY_PAUSE_S", "0.001")
    monkeypatch.setenv("DM05_PREP_STALL_S", "0.6")
    if "huggingface_hub" in sys.modules:  # its connections remember the proxies of the test before
        sys.modules["huggingface_hub"].close_session()
    return home


@pytest.fixture(scope="module")
def bos_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path]]:
    root = tmp_path_factory.mktemp("bos")
    with Service("bos_server", root) as service:
        yield service, root


@pytest.fixture(scope="module")
def hub_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path]]:
    root = tmp_path_factory.mktemp("hub")
    with Service("hub_server", root) as service:
        yield service, root


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint; not to be changed."""
    folder = tmp_path_factory.mktemp("checkpoint") / "DM05"
    folder.mkdir()
    write_checkpoint(folder, 0)
    return folder


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))
