"""The rules by which a platform's environment becomes a torchrun command."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from dm05_schemas.errors import UsageError
from dm05_train.agent import children
from dm05_train.errors import TrainError
from dm05_train.launch import plan, wait_for_machine_0

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_full_sft_distributed.sh"


def test_one_machine() -> None:
    chosen = plan({}, gpus=8)
    assert (chosen.nodes, chosen.node, chosen.per_node, chosen.processes, chosen.address) == (1, 0, 8, 8, "127.0.0.1")
    assert chosen.bucket_mb == 1000
    assert plan({}, gpus=0).processes == 1
    assert plan({}, gpus=1).port != 0


def test_several_machines() -> None:
    environ = {"NNODES": "4", "RANK": "3", "MASTER_ADDR": "ten", "GPUS_PER_NODE": "2"}
    chosen = plan(environ, gpus=8)
    assert (chosen.nodes, chosen.node, chosen.processes, chosen.port, chosen.bucket_mb) == (4, 3, 8, 29500, 512)
    command = chosen.torchrun(["--workspace", "w"])
    for word in ("--nnodes=4", "--node-rank=3", "--nproc-per-node=2", "--master-addr=ten", "--master-port=29500"):
        assert word in command
    assert command[-2:] == ["--workspace", "w"]


def test_a_platforms_rank_and_world_size_mean_machines() -> None:
    chosen = plan({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}, gpus=4)
    assert (chosen.nodes, chosen.node, chosen.per_node, chosen.port) == (2, 1, 4, 1234)
    inside = chosen.environment({"WORLD_SIZE": "2", "RANK": "1", "PET_NNODES": "2", "HOME": "/h"})
    assert inside.pop("TORCH_CPP_LOG_LEVEL") == "ERROR"
    assert inside == {"OMP_NUM_THREADS": "1", "HOME": "/h", "DM05_DDP_BUCKET_CAP_MB": "512"}


def test_variables_that_say_the_same_are_fine() -> None:
    environ = {
        "WORLD_SIZE": "2",
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "GPUS_PER_NODE": "1",
        "RANK": "0",
        "MASTER_ADDR": "a",
    }
    assert plan(environ, gpus=0).processes == 2
    assert plan({"NNODES": "", "RANK": "", "WORLD_SIZE": ""}, gpus=0).processes == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NNODES": "2", "RANK": "0"}, "MASTER_ADDR: 2 machines need a meeting point"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a"}, "RANK: machine 2 of 2 does not exist"),
        ({"RANK": "1"}, "RANK: machine 1 of 1 does not exist"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "which of the 2 machines this is"),
        ({"NNODES": "2", "WORLD_SIZE": "3"}, "NNODES=2 and WORLD_SIZE=3 contradict"),
        ({"NPROC_PER_NODE": "2", "GPUS_PER_NODE": "4"}, "contradict"),
        ({"RANK": "0", "NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "a"}, "contradict"),
        ({"DDP_BUCKET_MB": "1", "DM05_DDP_BUCKET_CAP_MB": "2"}, "contradict"),
        ({"NNODES": "two"}, "NNODES: 'two' is no number of machines"),
        ({"NNODES": "0"}, "NNODES"),
        ({"NNODES": "-1"}, "NNODES"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE"),
        ({"RANK": "x"}, "RANK"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: '70000' is no port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT"),
        ({"JOIN_TIMEOUT": "9" * 20}, "JOIN_TIMEOUT"),
        ({"DDP_BUCKET_MB": "9" * 12}, "from 1 to 1000000"),
        ({"NNODES": "9" * 5000}, "NNODES"),
        ({"NPROC_PER_NODE": "²"}, "NPROC_PER_NODE"),
    ],
)
def test_refused_before_anything_starts(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(environ, gpus=0)
    assert message in str(caught.value) and caught.value.exit_code == 2


def test_more_processes_than_gpus() -> None:
    with pytest.raises(UsageError, match="8 processes on a machine with 2 GPUs"):
        plan({"NPROC_PER_NODE": "8"}, gpus=2)


def test_machine_0_may_come_later() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        threading.Timer(1.0, server.listen).start()
        chosen = plan(
            {"NNODES": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "JOIN_TIMEOUT": "20"}, 0
        )
        began = time.monotonic()
        wait_for_machine_0(chosen)
        assert 0.5 < time.monotonic() - began < 10


@pytest.mark.parametrize(("address", "reason"), [("no-such-machine.invalid", "not known"), ("127.0.0.1", "refused")])
def test_a_wrong_master_addr_is_said(address: str, reason: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    chosen = plan(
        {"NNODES": "2", "RANK": "1", "MASTER_ADDR": address, "MASTER_PORT": str(port), "JOIN_TIMEOUT": "1"}, 0
    )
    with pytest.raises(TrainError, match=reason) as caught:
        wait_for_machine_0(chosen)
    assert f"{address}:{port}" in str(caught.value) and "MASTER_ADDR" in str(caught.value)


def test_machine_0_with_an_unknown_name_for_itself() -> None:
    environ = {"NNODES": "2", "RANK": "0", "MASTER_ADDR": "no-such-machine.invalid", "JOIN_TIMEOUT": "1"}
    with pytest.raises(TrainError, match="the name is not known here"):
        wait_for_machine_0(plan(environ, 0))
    wait_for_machine_0(plan(environ | {"MASTER_ADDR": "localhost"}, 0))


def test_children_are_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]) as child:
        assert child.pid in children(os.getpid())
        child.kill()


def script(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=clean | {"PYTHON": sys.executable} | environ,
        capture_output=True,
        text=True,
    )


def test_the_script_shows_its_command_and_passes_arguments_on() -> None:
    environ = {"NNODES": "2", "RANK": "1", "MASTER_ADDR": "machine0", "NPROC_PER_NODE": "3"}
    done = script(environ, "--dry-run", "--data-config.dataset-name", "a b")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert "--nnodes=2" in words and "--node-rank=1" in words and words[-2:] == ["--data-config.dataset-name", "a b"]


def test_the_script_refuses_with_one_line() -> None:
    done = script({"NNODES": "2", "RANK": "0"})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "MASTER_ADDR" in done.stderr
    done = script({"PER_DEVICE_BATCH": "none"})
    assert done.returncode == 2 and "PER_DEVICE_BATCH" in done.stderr
    done = script({"PYTHON": "/bin/false"})
    assert done.returncode == 1 and "pip install" in done.stderr
