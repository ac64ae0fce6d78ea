"""The list of datasets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dm05_prep.datasets import DatasetsCommand
from dm05_schemas.errors import DataError
from dm05_schemas.registry import BUILT_IN, lookup, read_specs
from dm05_schemas.workspace import Workspace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DM05_DATASETS", raising=False)
    (tmp_path / "datasets.toml").write_text(
        '[my_robot]\nfolder = "data/mine"\nimage_keys = ["images_1"]\nimage_prompts = ["Head"]\n'
        'state_desc = ["joint", "gripper"]\naction_dim = 2\naction_mode = "relative"\n'
    )
    (tmp_path / "data/mine/jsonl").mkdir(parents=True)
    return tmp_path


def test_the_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DatasetsCommand(workspace=root).run()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["name", "state", "action", "mode", "cameras", "here", "registered", "folder"]
    assert lines[1] == [
        "libero_pi0_all", "8", "7", "absolute", "2", "no", "built", "in", "data/libero/libero_pi0_all",
    ]  # fmt: skip
    assert lines[-1] == ["my_robot", "2", "2", "relative", "1", "yes", "yours", "data/mine"]
    assert len(lines) == 1 + len(BUILT_IN) + 1


def test_names_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DatasetsCommand(workspace=root, quiet=True).run()
    assert capsys.readouterr().out.split() == [spec.name for spec in BUILT_IN] + ["my_robot"]


@pytest.mark.parametrize("name", ["libero_pi0_all", "libero_oft_all", "my_robot", "roboter.v2", "机器人"])
def test_one_dataset_is_shown_as_it_would_be_written(root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    if name not in (root / "datasets.toml").read_text() and not name.startswith("libero"):
        text = (root / "datasets.toml").read_text()
        (root / "datasets.toml").write_text(text.replace("[my_robot]", f'["{name}"]'))
    DatasetsCommand(workspace=root, name=name).run()
    text = capsys.readouterr().out
    assert list(tomllib.loads(text)) == [name]
    (root / "again.toml").write_text(text)
    assert read_specs(root / "again.toml")[name] == lookup(name, Workspace(root))


def test_a_wrong_name(root: Path) -> None:
    with pytest.raises(DataError, match="Did you mean my_robot"):
        DatasetsCommand(workspace=root, name="my_robo").run()
