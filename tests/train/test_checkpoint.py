"""The checkpoint folder: complete or not there, whatever happens while it is written, rotated or read."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dm05_train.checkpoint import (
    RunState,
    checkpoint_entries,
    checkpoint_name,
    clean,
    complete_checkpoints,
    latest,
    publish,
    read_state,
    rotate,
    write_tensors,
)
from dm05_train.errors import TrainError
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

STATE = RunState(
    run="a",
    step=1,
    samples=8,
    seed=1,
    updates=1,
    optimizer="adamw",
    precision="bf16",
    dataset="d",
    dataset_samples=80,
    world=1,
    config={},
)


def make(output: Path, step: int, run: str = "a", saved: float = 0.0) -> Path:
    """A published checkpoint with one tensor of weights and one of state."""
    temporary = output / f".{checkpoint_name(step)}.{run}"
    (temporary / "training").mkdir(parents=True)
    write_tensors(temporary / "model.safetensors", {"w": torch.arange(4.0)})
    write_tensors(temporary / "training" / "optimizer-00000-of-00001.safetensors", {"exp_avg:w": torch.ones(4)})
    final = output / checkpoint_name(step)
    publish(temporary, final, replace(STATE, step=step, run=run, saved=saved))
    return final


DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.int64, torch.float64, torch.uint8]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=5))
def test_files_are_safetensors(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    tensors = {f"t{i}": (torch.randn(shape) * 50).to(dtype) for i, (dtype, shape) in enumerate(kinds)}
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    write_tensors(path, tensors)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_views_and_aliases_are_written_whole(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    write_tensors(tmp_path / "x.safetensors", {"a": base[1:3], "b": base.T}, {"c": "a"})
    read = load_file(tmp_path / "x.safetensors")
    assert torch.equal(read["a"], base[1:3]) and torch.equal(read["b"], base.T) and torch.equal(read["c"], base[1:3])
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_published_checkpoint_reads_back(tmp_path: Path) -> None:
    folder = make(tmp_path, 5)
    state = read_state(folder)
    assert state.step == 5 and set(state.files) == {
        "model.safetensors",
        "training/optimizer-00000-of-00001.safetensors",
    }
    entries = list(checkpoint_entries(folder, weights_too=True))
    assert [(kind, name) for kind, name, _ in entries] == [("master", "w"), ("exp_avg", "w")]


@pytest.mark.parametrize(
    "harm", ["remove", "cut", "grow", "state", "version", "words", "below", "beyond", "settings", "list", "no state"]
)
def test_an_incomplete_one_is_never_taken(tmp_path: Path, harm: str) -> None:
    good, bad = make(tmp_path, 1), make(tmp_path, 2)
    state, weights = bad / "training" / "state.json", bad / "model.safetensors"
    if harm == "remove":
        weights.unlink()
    elif harm == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif harm == "grow":
        weights.write_bytes(weights.read_bytes() + b"x")
    elif harm == "state":
        state.write_text(state.read_text()[:-20])
    elif harm == "version":
        state.write_text(json.dumps(json.loads(state.read_text()) | {"version": 99}))
    elif harm == "words":
        state.write_text(json.dumps(json.loads(state.read_text()) | {"step": "two"}))
    elif harm in ("below", "beyond"):
        state.write_text(json.dumps(json.loads(state.read_text()) | {"step": -1 if harm == "below" else 2**63}))
    elif harm == "settings":
        state.write_text(json.dumps(json.loads(state.read_text()) | {"config": None}))
    elif harm == "list":
        state.write_text(json.dumps(json.loads(state.read_text()) | {"files": ["model.safetensors"]}))
    else:
        state.unlink()
    assert latest(tmp_path) == good
    with pytest.raises(TrainError) as caught:
        read_state(bad)
    assert str(bad) in str(caught.value)


def test_one_damaged_at_its_right_size_is_said_in_words(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    path = folder / "training" / "optimizer-00000-of-00001.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    read_state(folder)
    with pytest.raises(TrainError, match=f"{path}: damaged.*resume never"):
        list(checkpoint_entries(folder))


def test_rotation_keeps_the_newest_of_its_own_run(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    other = make(tmp_path, 4, run="b")
    (tmp_path / "checkpoint-000002" / "training" / "state.json").unlink()
    assert rotate(tmp_path, "a", 1) == [tmp_path / "checkpoint-000001"]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-000002", "checkpoint-000003", other.name}
    assert rotate(tmp_path, "a", 1) == []
    assert rotate(tmp_path, "a", None) == []


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 5):
        make(tmp_path, step)
    assert [state.step for _, state in complete_checkpoints(tmp_path)] == [5, 999_999, 1_000_000]
    assert latest(tmp_path) == tmp_path / "checkpoint-1000000"


def test_the_latest_is_the_one_saved_last(tmp_path: Path) -> None:
    """An older run's checkpoint of more steps, and one that rotation must not take for the oldest."""
    make(tmp_path, 300, run="old", saved=10.0)
    make(tmp_path, 6, saved=20.0)
    newest = make(tmp_path, 5, saved=21.0)
    assert latest(tmp_path) == newest
    assert rotate(tmp_path, "a", 1) == [tmp_path / "checkpoint-000006"]
    assert latest(tmp_path) == newest


def test_a_checkpoint_is_replaced_before_the_older_one_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the slow deletion ends, there is a complete checkpoint of this step."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    make(tmp_path, 1, run="old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", killed)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, 1, run="new")
    assert latest(tmp_path) == tmp_path / "checkpoint-000001"
    assert read_state(tmp_path / "checkpoint-000001").run == "new"
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def test_publishing_over_an_older_one_replaces_it(tmp_path: Path) -> None:
    make(tmp_path, 1, run="old")
    folder = make(tmp_path, 1, run="new")
    assert read_state(folder).run == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def test_clean_removes_what_was_half_written_and_nothing_else(tmp_path: Path) -> None:
    good = make(tmp_path, 1)
    (tmp_path / ".checkpoint-000002.a" / "training").mkdir(parents=True)
    (tmp_path / ".trash-checkpoint-000001-77").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    clean(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {good.name, "metrics.jsonl"}


def test_no_output_folder_has_no_latest(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
