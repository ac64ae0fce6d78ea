"""Checkpoints that are none: each is refused in one line that names the file and the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from dm05_prep.checkpoint_check import check_checkpoint
from dm05_prep.demo.checkpoint import write_checkpoint
from dm05_prep.errors import PrepError
from dm05_prep.model import ModelCommand, plan_files
from dm05_prep.sources.local import LocalSource
from dm05_schemas.errors import DataError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "DM05"
    folder.mkdir()
    write_checkpoint(folder, 0)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def change(path: Path, edit: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("value", [0, -1, "2", True, 10**9, 1.5, None])
@pytest.mark.parametrize("part, name", [("vision_config", "patch_size"), ("text_config", "num_hidden_layers")])
def test_sizes_that_are_none(folder: Path, part: str, name: str, value: object) -> None:
    change(folder / "config.json", lambda config: config["vlm_config"][part].update({name: value}))
    with pytest.raises(DataError, match=f"config.json has no usable {name}: .* is no size"):
        check_checkpoint(folder)


def test_a_chunk_size_that_is_none(folder: Path) -> None:
    change(folder / "config.json", lambda config: config.update(chunk_size="ten"))
    with pytest.raises(DataError, match="chunk_size"):
        check_checkpoint(folder)


@pytest.mark.parametrize("number", ["x", -1, None, 1.5])
def test_ids_that_are_no_numbers(folder: Path, number: object) -> None:
    change(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({"zz": number}))
    with pytest.raises(DataError, match="the id of 'zz' is"):
        check_checkpoint(folder)


def test_a_pointer_in_place_of_the_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DataError, match="pointer of Git LFS"):
        check_checkpoint(folder)


def test_weights_in_several_files(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(PrepError, match="holds its weights in several files"):
        plan_files(LocalSource(folder), tmp_path / "target", force=False)


def test_a_target_that_is_no_folder(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "ws" / "checkpoints"
    place.mkdir(parents=True)
    command = ModelCommand(source="local", uri=str(folder), workspace=tmp_path / "ws")
    (place / "DM05").write_text("x")
    with pytest.raises(DataError, match="is not a folder"):
        command.run()
    (place / "DM05").unlink()
    (place / "DM05").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not a folder"):
        command.run()
