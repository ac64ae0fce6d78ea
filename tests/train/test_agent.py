"""Runs of several processes and machines (all on this one, over gloo): the same curve, and no hang when one is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from dm05_train.agent import children
from training_runs import finish, flags, losses, run, start

pytestmark = pytest.mark.slow

SAVING = {"save_strategy": "steps", "save_steps": 2}
SPLIT = {"per_device_train_batch_size": 1}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def machines(count: int, *, port: str, seconds: int = 60) -> list[dict[str, str]]:
    """The environment a platform would inject on each machine."""
    return [
        {
            "WORLD_SIZE": str(count),
            "RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "JOIN_TIMEOUT": str(seconds),
        }
        for rank in range(count)
    ]


@pytest.fixture(scope="module")
def alone(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the reference run: one process, batches of 4."""
    output = tmp_path_factory.mktemp("alone")
    done = run(flags(workspace, output, per_device_train_batch_size=4, **SAVING))
    assert done.returncode == 0, done.stderr
    return output


def same(output: Path, reference: Path) -> None:
    found, wanted = losses(output), losses(reference)
    assert [step for step, _, _ in found] == [step for step, _, _ in wanted]
    for (_, loss, norm), (_, other, other_norm) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(other, rel=2e-6) and norm == pytest.approx(other_norm, rel=2e-5)


def wait_for_rows(output: Path, process: subprocess.Popen[str]) -> None:
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)


def cut_back(output: Path) -> None:
    """As if the run had been lost after its checkpoint of step 4."""
    shutil.rmtree(output / "checkpoint-000006")


def test_two_ranks_save_together_and_one_goes_on(workspace: Path, alone: Path, tmp_path: Path) -> None:
    two = {"per_device_train_batch_size": 2, "logging_steps": 1}
    done = finish(start(flags(workspace, tmp_path, **two, **SAVING), script=True, NPROC_PER_NODE="2"))
    assert done.returncode == 0, done.stderr
    assert "global batch  4 = 1 machines x 2 GPUs x 2 a GPU x 1 accumulated" in done.stdout
    same(tmp_path, alone)
    files = sorted(path.name for path in (tmp_path / "checkpoint-000004" / "training").iterdir())
    assert files[:2] == ["optimizer-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"]
    assert not list((tmp_path / "checkpoint-000004").glob(".*"))
    cut_back(tmp_path)
    done = run(flags(workspace, tmp_path, resume="latest", per_device_train_batch_size=4))
    assert done.returncode == 0 and "4 steps and 16 samples done" in done.stdout
    same(tmp_path, alone)


def test_shards_save_whole_tensors_and_others_go_on(workspace: Path, alone: Path, tmp_path: Path) -> None:
    """Two shards save; one process continues from that, and so do two shards that are sent the state."""
    more = {"per_device_train_batch_size": 2, "parallel": "fsdp"}
    done = finish(start(flags(workspace, tmp_path, **more, **SAVING), script=True, NPROC_PER_NODE="2"))
    assert done.returncode == 0, done.stderr
    assert "fsdp over 2 ranks" in done.stdout
    same(tmp_path, alone)
    cut_back(tmp_path)
    sent = shutil.copytree(tmp_path, tmp_path.with_name("sent"))
    done = run(flags(workspace, tmp_path, resume="latest", per_device_train_batch_size=4))
    assert done.returncode == 0, done.stderr
    same(tmp_path, alone)
    more["model_config__load"] = "broadcast"
    done = finish(start(flags(workspace, sent, resume="latest", **more), script=True, NPROC_PER_NODE="2"))
    assert done.returncode == 0, done.stderr
    same(sent, alone)


def test_told_to_stop_all_ranks_save_once(workspace: Path, tmp_path: Path) -> None:
    process = start(flags(workspace, tmp_path, steps=900, logging_steps=1, **SPLIT), script=True, NPROC_PER_NODE="2")
    wait_for_rows(tmp_path, process)
    process.terminate()
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("told to stop: saved after step") == 1
    assert len(list(tmp_path.glob("checkpoint-*/training/state.json"))) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_told_to_stop_while_the_ranks_still_start(workspace: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(flags(workspace, tmp_path, steps=900, **SPLIT), script=True, NPROC_PER_NODE="2")
    while process.poll() is None and len(children(process.pid)) < 2:
        time.sleep(0.05)
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == 128 + number
    assert done.stderr.strip() == "told to stop before the ranks could listen: nothing was saved"


def test_ctrl_c_is_one_line(workspace: Path, tmp_path: Path) -> None:
    """As a terminal sends it: to the launcher and to its ranks."""
    words = flags(workspace, tmp_path, steps=900, logging_steps=1, **SPLIT)
    process = start(words, script=True, within=["setsid"], NPROC_PER_NODE="2")
    wait_for_rows(tmp_path, process)
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert (done.returncode, done.stderr) == (130, "run_full_sft_distributed.sh: interrupted\n")


def test_a_killed_rank_ends_the_others_with_a_message(workspace: Path, tmp_path: Path) -> None:
    process = start(flags(workspace, tmp_path, steps=900, logging_steps=1, **SPLIT), script=True, NPROC_PER_NODE="2")
    wait_for_rows(tmp_path, process)
    ranks = children(process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], 9)
    began = time.monotonic()
    done = finish(process)
    assert done.returncode == 1 and time.monotonic() - began < 40
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "was killed by SIGKILL" in last
        and "start again with the same command" in last
        and "Traceback" not in done.stderr
    )


def without(folder: Path, empty: Path) -> list[str]:
    """Words that start a command as on a machine where ``folder`` is empty; skips where that needs more rights."""
    empty.mkdir()
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("a mount namespace needs more rights than there are here")
    return ["unshare", "-m", "bash", "-c", f'mount --bind {empty} {folder}; exec "$@"', "machine"]


def test_two_machines_of_which_one_comes_late_and_lacks_the_weights(
    workspace: Path, alone: Path, tmp_path: Path
) -> None:
    """Machine 1 starts first and has data but no weights; rank 0 sends them, and it is the same run."""
    first, second = machines(2, port=free_port())
    more = {"model_config__load": "broadcast", **SPLIT}
    within = without(workspace / "checkpoints", tmp_path / "empty")
    late = start(flags(workspace, tmp_path / "1", **more), script=True, within=within, NPROC_PER_NODE="2", **second)
    time.sleep(2)
    early = start(flags(workspace, tmp_path / "0", **more), script=True, NPROC_PER_NODE="2", **first)
    done, other = finish(early), finish(late)
    assert done.returncode == 0 and other.returncode == 0, done.stderr + other.stderr
    assert "waiting for machine 0" in other.stderr
    assert "global batch  4 = 2 machines x 2 GPUs x 1 a GPU x 1 accumulated" in done.stdout
    same(tmp_path / "0", alone)
    assert not (tmp_path / "1").exists()


def test_a_machine_without_the_weights_is_named_on_all(workspace: Path, tmp_path: Path) -> None:
    first, second = machines(2, port=free_port())
    within = without(workspace / "checkpoints", tmp_path / "empty")
    here = start(flags(workspace, tmp_path / "out", **SPLIT), script=True, NPROC_PER_NODE="1", **first)
    there = start(flags(workspace, tmp_path / "out", **SPLIT), script=True, within=within, NPROC_PER_NODE="1", **second)
    for done in (finish(here), finish(there)):
        assert done.returncode == 1
        assert "no such folder" in done.stderr and "--model-config.load broadcast" in done.stderr
        assert socket.gethostname() in done.stderr and "Traceback" not in done.stderr


def test_nobody_else_comes(workspace: Path, tmp_path: Path) -> None:
    first, _ = machines(2, port=free_port(), seconds=4)
    done = finish(start(flags(workspace, tmp_path / "out"), script=True, NPROC_PER_NODE="1", **first))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "did not find each other" in last and "MASTER_ADDR" in last and "Traceback" not in done.stderr
    assert "frame #" not in done.stderr


def test_told_to_stop_while_nobody_else_comes(workspace: Path, tmp_path: Path) -> None:
    first, _ = machines(2, port=free_port(), seconds=8)
    process = start(flags(workspace, tmp_path / "out"), script=True, NPROC_PER_NODE="1", **first)
    while process.poll() is None and not listening(int(first["MASTER_PORT"])):
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    done = finish(process)
    assert done.returncode == 128 + signal.SIGUSR1
    assert done.stderr.strip() == "told to stop before the ranks were started: nothing was saved"


def test_a_machine_killed_ends_the_other(workspace: Path, tmp_path: Path) -> None:
    first, second = machines(2, port=free_port())
    here = start(
        flags(workspace, tmp_path, steps=900, logging_steps=1, **SPLIT), script=True, NPROC_PER_NODE="1", **first
    )
    there = start(flags(workspace, tmp_path, steps=900, **SPLIT), script=True, NPROC_PER_NODE="1", **second)
    wait_for_rows(tmp_path, here)
    for pid in [*children(there.pid), there.pid]:
        os.kill(pid, 9)
    done = finish(here)
    there.communicate()
    assert done.returncode == 1
    assert "lost the others" in done.stderr and "Traceback" not in done.stderr


def test_state_is_readable(alone: Path) -> None:
    state = json.loads((alone / "checkpoint-000006" / "training" / "state.json").read_text())
    assert state["version"] == 1 and state["samples"] == 24 and state["files"]["model.safetensors"] > 0


def test_machines_with_networks_of_their_own(workspace: Path, alone: Path, tmp_path: Path) -> None:
    """Two network namespaces joined by one wire: nothing but MASTER_ADDR leads from one to the other."""
    tag = f"dm{os.getpid() % 100000}"
    names, wires = [f"{tag}n{i}" for i in "01"], [f"{tag}w{i}" for i in "01"]
    made = [f"ip link add {wires[0]} type veth peer name {wires[1]}"]
    for number, (name, wire) in enumerate(zip(names, wires, strict=True)):
        made += [f"ip netns add {name}", f"ip link set {wire} netns {name}"]
        made += [f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev {wire}"]
        made += [f"ip -n {name} link set {wire} up", f"ip -n {name} link set lo up"]
    try:
        for command in made:
            if subprocess.run(command.split(), capture_output=True).returncode != 0:
                pytest.skip("a network namespace needs more rights than there are here")
        several = [e | {"MASTER_ADDR": "10.77.0.1"} for e in machines(2, port="29500")]
        both = [
            start(
                flags(workspace, tmp_path / name, per_device_train_batch_size=2),
                script=True,
                within=["ip", "netns", "exec", name],
                NPROC_PER_NODE="1",
                GLOO_SOCKET_IFNAME=wire,
                **environ,
            )
            for name, wire, environ in zip(names, wires, several, strict=True)
        ]
        for done in [finish(process) for process in both]:
            assert done.returncode == 0, done.stderr
        same(tmp_path / names[0], alone)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", wires[0]], capture_output=True)
