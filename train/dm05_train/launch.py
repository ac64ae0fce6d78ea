"""Starting the processes of a run with torchrun, on one machine or many, by the rules of a platform's environment.

Here RANK (or NODE_RANK) and WORLD_SIZE (or NNODES) count machines, as platforms inject them; NPROC_PER_NODE (or
GPUS_PER_NODE) counts the processes of this machine. Everything that cannot work is refused before anything starts.

    python -m dm05_train.launch [--dry-run] [flags of dm05-train]
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dm05_schemas.cli import run
from dm05_schemas.errors import UsageError
from dm05_schemas.stops import end_at_once
from dm05_schemas.workspace import Workspace

from dm05_train.agent import run_ranks
from dm05_train.config import MOST_MINUTES, TrainConfig, whole_number
from dm05_train.errors import TrainError
from dm05_train.kept import Kept
from dm05_train.perf.switches import MOST_MB

DEFAULT_PORT = 29500
ANY = 10**18
MOST_SECONDS = 60 * MOST_MINUTES
BUCKET_MB_ONE_MACHINE, BUCKET_MB_SEVERAL = 1000, 512


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which processes to start here, and where they meet the others."""

    nodes: int
    node: int
    per_node: int
    address: str
    port: int
    join_seconds: int
    bucket_mb: int

    @property
    def processes(self) -> int:
        """Processes of the whole run."""
        return self.nodes * self.per_node

    def torchrun(self, arguments: Sequence[str]) -> list[str]:
        """The arguments of torchrun on this machine."""
        meet = [f"--master-addr={self.address}", f"--master-port={self.port}", f"--node-rank={self.node}"]
        meet.append(f"--rdzv-conf=timeout={self.join_seconds}")
        return [
            *(f"--nnodes={self.nodes}", f"--nproc-per-node={self.per_node}"),
            *meet,
            *("-m", "dm05_train", *arguments),
        ]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of torchrun: a platform's machine counts would be mistaken for processes further down."""
        machine = ("RANK", "WORLD_SIZE", "NODE_RANK", "NNODES", "NPROC_PER_NODE", "GPUS_PER_NODE", "DDP_BUCKET_MB")
        kept = {name: value for name, value in environ.items() if name not in machine and not name.startswith("PET_")}
        return {
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **kept,
            "DM05_DDP_BUCKET_CAP_MB": str(self.bucket_mb),
        }


def plan(environ: Mapping[str, str], gpus: int) -> Plan:
    """What to start, by the environment.

    Args:
        environ: the environment; empty values count as unset.
        gpus: GPUS of this machine (0: a run on the CPU).

    Raises:
        UsageError: a value is no number, two variables contradict each other, a machine's rank or address is missing or
        out of range.
    """
    nodes = _agreeing(environ, ("NNODES", "WORLD_SIZE"), "number of machines", least=1)
    node = _agreeing(environ, ("NODE_RANK", "RANK"), "rank of this machine", least=0)
    per_node = _agreeing(environ, ("NPROC_PER_NODE", "GPUS_PER_NODE"), "number of processes a machine", least=1)
    bucket = _agreeing(environ, ("DDP_BUCKET_MB", "DM05_DDP_BUCKET_CAP_MB"), "bucket size in MB", least=1, most=MOST_MB)
    port = _agreeing(environ, ("MASTER_PORT",), "port", least=1, most=65535)
    join = _agreeing(environ, ("JOIN_TIMEOUT",), "wait in seconds", least=1, most=MOST_SECONDS)
    machines = nodes or 1
    if gpus and per_node and per_node > gpus:
        raise UsageError(
            f"{per_node} processes on a machine with {gpus} GPUs",
            where="NPROC_PER_NODE",
            fix=f"Set it to {gpus} or less",
        )
    if node is not None and node >= machines:
        raise UsageError(
            f"machine {node} of {machines} does not exist: ranks go from 0 to {machines - 1}",
            where="RANK",
            fix="Correct RANK, or set NNODES to the number of machines",
        )
    if machines > 1 and node is None:
        raise UsageError(
            f"it is not said which of the {machines} machines this is",
            where="RANK",
            fix=f"Set RANK to 0 on the first machine, up to {machines - 1}",
        )
    if machines > 1 and not environ.get("MASTER_ADDR"):
        raise UsageError(
            f"{machines} machines need a meeting point",
            where="MASTER_ADDR",
            fix="Set MASTER_ADDR to the address of machine 0, the same on every machine",
        )
    return Plan(
        nodes=machines,
        node=node or 0,
        per_node=per_node or max(1, gpus),
        address=environ.get("MASTER_ADDR") or "127.0.0.1",
        port=port or (DEFAULT_PORT if machines > 1 else free_port()),
        join_seconds=join or 600,
        bucket_mb=bucket or (BUCKET_MB_ONE_MACHINE if machines == 1 else BUCKET_MB_SEVERAL),
    )


def _agreeing(
    environ: Mapping[str, str], names: tuple[str, ...], what: str, *, least: int, most: int = ANY
) -> int | None:
    """The one number that these variables give, None when all are unset."""
    found: dict[str, int] = {}
    for name in names:
        if text := environ.get(name, "").strip():
            number = whole_number(text)
            if number is None or not least <= number <= most:
                bounds = f"from {least} to {most}" if most < ANY else f"of {least} or more"
                raise UsageError(f"{text!r} is no {what}", where=name, fix=f"Give a whole number {bounds}")
            found[name] = number
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name}={value}" for name, value in found.items())
        raise UsageError(f"{said} contradict each other about the {what}", fix="Set one of them, or both alike")
    return next(iter(found.values()), None)


def free_port() -> int:
    """A port nobody uses on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def count_gpus() -> int:
    """GPUs this machine shows to us."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def wait_for_machine_0(plan: Plan) -> None:
    """Wait until machine 0 answers (on machine 0 itself: until its name is known), however early or late it starts.

    Raises:
        TrainError: it does not answer in time; the text says at which point it fails.
    """
    where = f"{plan.address}:{plan.port}"
    end, reason, told = time.monotonic() + plan.join_seconds, "", False
    while time.monotonic() < end:
        try:
            if plan.node == 0:
                socket.getaddrinfo(plan.address, plan.port)
                return
            with socket.create_connection((plan.address, plan.port), timeout=min(10.0, plan.join_seconds)):
                return
        except socket.gaierror:
            reason = "the name is not known here"
        except TimeoutError:
            reason = "no answer"
        except OSError as error:
            reason = error.strerror or str(error)
        if not told:
            print(f"machine {plan.node}: waiting for machine 0 at {where} ({reason})", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.5)
    raise TrainError(
        f"machine 0 could not be reached in {plan.join_seconds} s: {reason}",
        where=where,
        fix="Check MASTER_ADDR and MASTER_PORT, and that machine 0 was started; JOIN_TIMEOUT (seconds) waits longer",
    )


def start(chosen: Plan, config: TrainConfig, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start a run by its plan and wait for it; gives the exit code.

    Raises:
        DM05Error: it cannot start, or a rank failed.
    """
    from dm05_train.precheck import check_before_start
    from dm05_train.start import output_folder

    inside = chosen.environment(environ)
    check_before_start(config, inside, machines=chosen.nodes)
    kept = Kept.now(config, output_folder(config, Workspace.resolve(config.workspace)))
    if chosen.nodes > 1:
        wait_for_machine_0(chosen)
    return run_ranks(chosen.torchrun(arguments), inside, kept)


def main() -> int:
    """Entry point of the launch script."""
    arguments = sys.argv[1:]
    dry = "--dry-run" in arguments
    if dry:
        arguments.remove("--dry-run")
    chosen = plan(os.environ, count_gpus())
    from dm05_train.cli import read_train_config

    config = read_train_config(arguments)  # a wrong flag is said here once, not by every process
    if dry:
        print(shlex.join(["torchrun", *chosen.torchrun(arguments)]))
        return 0
    return start(chosen, config, arguments, os.environ)


if __name__ == "__main__":
    end_at_once("run_full_sft_distributed.sh", usr1=True)
    run(main, "run_full_sft_distributed.sh")
