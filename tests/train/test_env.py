"""Who a process is, by the variables torchrun sets and by those a platform sets."""

from __future__ import annotations

import pytest
import torch
from dm05_schemas.errors import DataError, UsageError
from dm05_train.env import World, broadcast, first_line, lost_peers, together, under_torchrun
from dm05_train.errors import TrainError


def test_torchruns_variables() -> None:
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    environ |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    environ |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("local rank 1 needs a second GPU")
    world = World.from_env(environ)
    assert (world.rank, world.local_rank, world.size, world.node, world.nodes) == (5, 1, 8, 1, 2)
    assert not world.is_main


def test_a_platforms_variables_alone_are_not_torchruns() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    assert not under_torchrun(environ)
    assert World.from_env(environ).size == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"RANK": "x"}, "RANK: 'x' is no number"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK: '1.5' is no number"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE"),
        ({"GROUP_RANK": "-1"}, "GROUP_RANK"),
        ({"LOCAL_WORLD_SIZE": "9" * 5000}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "3"}, "RANK: rank 3 of 2 does not exist"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT: 2 ranks need a meeting point"),
    ],
)
def test_variables_like_torchruns_that_cannot_be(more: dict[str, str], message: str) -> None:
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(UsageError) as caught:
        World.from_env(environ | more)
    assert message in str(caught.value) and "torchrun" in str(caught.value)


def test_empty_variables_count_as_unset() -> None:
    assert World.from_env({"RANK": "", "LOCAL_RANK": "", "WORLD_SIZE": ""}).size == 1


def test_alone_everything_is_itself() -> None:
    world = World()
    assert together(world, lambda: 3) == 3 and broadcast(world, "x") == "x"
    with pytest.raises(DataError):
        together(world, _raise)


def _raise() -> None:
    raise DataError("bad")


def test_a_lost_peer_is_one_line_and_other_errors_stay() -> None:
    with (
        pytest.raises(TrainError, match=r"rank 0 of 2 lost the others: Connection closed by peer.*Go on so"),
        lost_peers(World(size=2), lambda: "Go on so"),
    ):
        raise RuntimeError("Connection closed by peer\nmore")
    words = "[/w/gloo/pair.cc:553] Connection closed by peer [::1]:7. This is typically caused by a remote worker"
    with (
        pytest.raises(TrainError, match=r"others: Connection closed by peer \[::1\]:7\. See"),
        lost_peers(World(size=2), lambda: "Go on so"),
    ):
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="shapes"), lost_peers(World(size=2), lambda: "Go on so"):
        raise RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="closed"), lost_peers(World(), str):
        raise RuntimeError("Connection closed by peer")


def test_first_line() -> None:
    assert first_line(RuntimeError("\n a \nb")) == "a" and first_line(ValueError()) == "ValueError"
