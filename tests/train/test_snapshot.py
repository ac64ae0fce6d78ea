"""A snapshot: each tensor to exactly one rank, evenly, by its released names, and deaf to what happens next."""

from __future__ import annotations

import pytest
import torch
from dm05_train.env import World
from dm05_train.loop import train_step
from dm05_train.optim.precision import Mode
from dm05_train.optim.state import restore
from dm05_train.snapshot import MODEL_FILE, deal, own_files, released, take_snapshot
from golden_run import config, golden_run
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8), st.sampled_from([1, 4]), st.integers(0, 5000))
def test_every_name_is_dealt_once_and_evenly(sizes: list[int], ranks: int, parts: int, model: int) -> None:
    named = {("exp_avg", f"p{i}"): size for i, size in enumerate(sizes)}
    shares = deal(named, model, ranks * parts, parts)
    assert sorted(key for share in shares for key in share) == sorted(named)
    loads = [sum(named[key] for key in share) for share in shares]
    others = loads[parts:] or loads
    assert max(others) - min(others) <= max(sizes, default=0) + (model if ranks == 1 else 0)


def test_machine_0_writes_everything_between_its_ranks() -> None:
    sizes = {("", "w"): 10, ("exp_avg", "w"): 10, ("exp_avg_sq", "w"): 10, ("steps", ""): 8}
    files: dict[str, list[tuple[str, str]]] = {}
    for rank in range(4):
        world = World(rank=rank, size=4, local_rank=rank % 2, local_size=2, node=rank // 2, nodes=2)
        mine = own_files(world, sizes)
        assert (mine == {}) == (rank >= 2)
        files |= mine
    assert sorted(key for keys in files.values() for key in keys) == sorted(sizes)
    assert MODEL_FILE in files and len(files) == 3


def test_a_snapshot_does_not_follow_the_run() -> None:
    run = golden_run(config(batch=3))
    train_step(run)
    snapshot = take_snapshot(run)
    before = {name: tensor.clone() for file in snapshot.files.values() for name, tensor in file.items()}
    train_step(run)
    after = {name: tensor for file in snapshot.files.values() for name, tensor in file.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert snapshot.state.step == 1 and snapshot.state.samples == 3


def test_packed_tensors_get_their_released_names() -> None:
    rows = torch.arange(10.0).view(5, 2)
    packed = {"qkv": (("q", 3), ("k", 2))}
    found = released({("", "qkv"): rows, ("exp_avg", "qkv"): rows + 1, ("", "other"): rows}, packed)
    assert set(found) == {"q", "k", "exp_avg:q", "exp_avg:k", "other"}
    assert torch.equal(found["exp_avg:k"], rows[3:] + 1)


@pytest.mark.parametrize("mode", ["bf16_compensated", "fp32_master"])
def test_state_goes_into_another_precision_and_back(mode: Mode) -> None:
    """The float32 weights of a run survive a checkpoint of a run that holds them in BF16, to the bit."""
    run = golden_run(config(batch=3))
    for _ in range(3):
        train_step(run)
    wanted = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    other = golden_run(config(batch=3), mode=mode)
    restore(other.optimizer, other.model, [("master", name, weight) for name, weight in wanted.items()])
    saved = take_snapshot(other).files
    back = golden_run(config(batch=3))
    with torch.no_grad():
        for name, parameter in back.model.named_parameters():
            parameter.copy_(saved[MODEL_FILE][name])
    state = next(tensors for file, tensors in saved.items() if file.startswith("training/optimizer"))
    restore(back.optimizer, back.model, [(*key.split(":", 1), tensor) for key, tensor in state.items()])
    for name, parameter in back.model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, wanted[name])
