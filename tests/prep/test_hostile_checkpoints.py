"""Checkpoints that are none: each is refused in one line that names the file and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from dm05_prep.checkpoint_check import check_checkpoint
from dm05_prep.errors import PrepError
from dm05_prep.model import ModelCommand, plan_files
from dm05_prep.sources.local import LocalSource
from dm05_schemas.errors import DataError


def change(path: Path, edit: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("value", [0, -1, "2", True, 10**9, 1.5, None])
@pytest.mark.parametrize("part, name", [("vision_config", "patch_size"), ("text_config", "num_hidden_layers")])
def test_sizes_that_are_none(copy: Path, part: str, name: str, value: object) -> None:
    change(copy / "config.json", lambda config: config["vlm_config"][part].update({name: value}))
    with pytest.raises(DataError, match=f"config.json has no usable {name}: .* is no size"):
        check_checkpoint(copy)


def test_a_chunk_size_that_is_none(copy: Path) -> None:
    change(copy / "config.json", lambda config: config.update(chunk_size="ten"))
    with pytest.raises(DataError, match="chunk_size"):
        check_checkpoint(copy)


@pytest.mark.parametrize("number", ["x", -1, None, 1.5])
def test_ids_that_are_no_numbers(copy: Path, number: object) -> None:
    change(copy / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({"zz": number}))
    with pytest.raises(DataError, match="the id of 'zz' is"):
        check_checkpoint(copy)


def test_a_pointer_in_place_of_the_weights(copy: Path) -> None:
    (copy / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DataError, match="pointer of Git LFS"):
        check_checkpoint(copy)


def test_weights_in_several_files(copy: Path, tmp_path: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    with pytest.raises(PrepError, match="holds its weights in several files"):
        plan_files(LocalSource(copy), tmp_path / "target", force=False)


def test_a_target_that_is_no_folder(copy: Path, tmp_path: Path) -> None:
    place = tmp_path / "ws" / "checkpoints"
    place.mkdir(parents=True)
    command = ModelCommand(source="local", uri=str(copy), workspace=tmp_path / "ws")
    (place / "DM05").write_text("x")
    with pytest.raises(DataError, match="is not a folder"):
        command.run()
    (place / "DM05").unlink()
    (place / "DM05").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not a folder"):
        command.run()
