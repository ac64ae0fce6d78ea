"""The background writer: two ranks make one checkpoint, and whatever goes wrong on one is told by rank 0."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dm05_train.checkpoint import RunState, latest, read_state
from dm05_train.env import World
from dm05_train.errors import TrainError
from dm05_train.saver import Saver
from dm05_train.snapshot import MODEL_FILE, Snapshot, take_snapshot
from golden_run import config, golden_run

RANKS = [World(rank=rank, size=2, local_rank=rank, local_size=2) for rank in (0, 1)]


@pytest.fixture(scope="module")
def state() -> RunState:
    return take_snapshot(golden_run(config(batch=3))).state


def parts(state: RunState) -> list[Snapshot]:
    """What each of two ranks writes."""
    first = {
        MODEL_FILE: {"w": torch.ones(3)},
        "training/optimizer-00000-of-00002.safetensors": {"exp_avg:w": torch.ones(3)},
    }
    second = {"training/optimizer-00001-of-00002.safetensors": {"exp_avg_sq:w": torch.ones(3)}}
    return [Snapshot(state=state, files=files, aliases={}) for files in (first, second)]


def savers(output: Path, says: Callable[[str], None] = lambda text: None, **more: object) -> list[Saver]:
    extras = [{"config.json": b"{}", "norm_stats/x.json": b"{}"}, {}]
    return [
        Saver(world, output, extras=extra, keep=None, say=says, **more)  # type: ignore[arg-type]
        for world, extra in zip(RANKS, extras, strict=True)
    ]


def test_two_ranks_make_one_checkpoint(tmp_path: Path, state: RunState) -> None:
    said: list[str] = []
    both = savers(tmp_path, said.append)
    for saver, part in zip(both, parts(state), strict=True):
        saver.save(part)
    for saver in both:
        saver.wait()
    folder = latest(tmp_path)
    assert folder is not None and both[0].last == folder and len(said) == 1
    assert set(read_state(folder).files) == {
        MODEL_FILE,
        "config.json",
        "norm_stats/x.json",
        "training/optimizer-00000-of-00002.safetensors",
        "training/optimizer-00001-of-00002.safetensors",
    }
    assert not list(folder.rglob(".*"))


def test_training_goes_on_while_it_is_written(tmp_path: Path, state: RunState) -> None:
    """``save`` returns before the other rank has even begun, and nothing is published until it has."""
    both = savers(tmp_path)
    first, second = parts(state)
    both[0].save(first)
    assert latest(tmp_path) is None
    both[1].save(second)
    for saver in both:
        saver.wait()
    assert latest(tmp_path) is not None


def test_what_fails_on_one_rank_fails_the_checkpoint(tmp_path: Path, state: RunState) -> None:
    both = savers(tmp_path, last=tmp_path / "checkpoint-000001")
    first, second = parts(state)
    bad = replace(second, files={"no such folder/x.safetensors": {"w": torch.ones(1)}})
    both[0].save(first)
    both[1].save(bad)
    for saver in both[::-1]:
        with pytest.raises(
            TrainError, match=r"cannot write a checkpoint.*The last good checkpoint is .*checkpoint-000001"
        ):
            saver.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_full_for_the_note_of_it(tmp_path: Path, state: RunState) -> None:
    """The other rank can make files but write no byte, as on a full disk: rank 0 is told all the same."""
    both = savers(tmp_path)
    first, second = parts(state)
    both[0].save(first)
    end = time.monotonic() + 20
    while not list(tmp_path.glob(".checkpoint-*/norm_stats/x.json")) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.2)  # that file is the last one of rank 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        both[1].save(second)
        with pytest.raises(TrainError, match="cannot write a checkpoint: File too large"):
            both[1].wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(TrainError, match="rank 1 could not write its part, nor a note of why"):
        both[0].wait()


def test_a_rank_that_never_writes(tmp_path: Path, state: RunState) -> None:
    first = savers(tmp_path, minutes=0.005)[0]
    first.save(parts(state)[0])
    with pytest.raises(TrainError, match="rank 1 has not written its part"):
        first.wait()
    assert latest(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_other_machines_write_nothing(tmp_path: Path, state: RunState) -> None:
    world = World(rank=2, size=4, local_size=2, node=1, nodes=2)
    saver = Saver(world, tmp_path / "elsewhere", extras={}, keep=None, say=print)
    before = threading.active_count()
    saver.save(Snapshot(state=state, files={}))
    assert threading.active_count() == before
    saver.wait()
    assert not (tmp_path / "elsewhere").exists()
