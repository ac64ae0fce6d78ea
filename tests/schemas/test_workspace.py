"""Which folder a command works in."""

from __future__ import annotations

from pathlib import Path

import pytest
from dm05_schemas.errors import UsageError
from dm05_schemas.workspace import Workspace


def test_the_argument_then_the_variable_then_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORKSPACE_DIR", raising=False)
    monkeypatch.delenv("DATA_PATH", raising=False)
    assert Workspace.resolve(None) == Workspace(tmp_path)
    monkeypatch.setenv("WORKSPACE_DIR", "sub")
    assert Workspace.resolve(None).root == tmp_path / "sub"
    assert Workspace.resolve(tmp_path / "other").root == tmp_path / "other"


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path)
    assert workspace.index_cache == tmp_path / "index_cache.json"
    assert workspace.norm_stats_dir == tmp_path / "norm_stats"
    assert workspace.checkpoint_dir == tmp_path / "checkpoints/DM05"
    assert workspace.locate("data/a/b") == tmp_path / "data/a/b"
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "disk"))
    moved = Workspace.resolve(tmp_path)
    assert moved.locate("data/a/b") == tmp_path / "disk/a/b"
    assert moved.locate("other/b") == tmp_path / "other/b"


def test_a_file_is_no_workspace(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(UsageError) as caught:
        Workspace.resolve(path)
    assert str(caught.value) == f"{path}: the workspace is not a folder. Give a folder with --workspace"
