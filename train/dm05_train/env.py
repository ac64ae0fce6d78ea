"""Who this process is among the others of a run, and what the ranks decide together.

Under torchrun every process has RANK, LOCAL_RANK and WORLD_SIZE. A platform's own RANK and WORLD_SIZE (without
LOCAL_RANK) mean machines, not processes: those belong to ``launch``, and a process that sees only them is alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from dm05_schemas.errors import DM05Error, UsageError

from dm05_train.config import whole_number
from dm05_train.errors import TrainError

T = TypeVar("T")
CPU = torch.device("cpu")
LIKE_TORCHRUN = (
    "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by torchrun: start with it, or unset them"
)
TURN_SECONDS = 10.0
HUSH_SECONDS = 1.0
GAVE_WAY = 3
"""Exit code of a rank that left it to another one to say what happened."""
PEER_NOISE = re.compile(r"\[\S+\.cc:\d+\]|This is typically caused .*")
PEER_WORDS = ("gloo", "nccl", "connection reset", "connection closed", "timed out waiting", "broken pipe", "store")


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run: one rank a GPU, on ``nodes`` machines."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    device: torch.device = CPU

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> World:
        """The world torchrun describes, else a world of one."""
        if not under_torchrun(environ):
            return cls(device=torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
        local, rank, size = (_number(environ, name) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))
        if rank >= size:
            raise UsageError(f"rank {rank} of {size} does not exist", where="RANK", fix=LIKE_TORCHRUN)
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 and not environ.get(name)]
        if missing:
            raise UsageError(f"{size} ranks need a meeting point", where=" and ".join(missing), fix=LIKE_TORCHRUN)
        if torch.cuda.is_available() and local >= torch.cuda.device_count():
            raise TrainError(
                f"local rank {local} has no GPU of its own: this machine shows {torch.cuda.device_count()}",
                fix="Set NPROC_PER_NODE to the number of GPUs, or widen CUDA_VISIBLE_DEVICES",
            )
        return cls(
            rank=rank,
            size=size,
            local_rank=local,
            local_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
            node=_number(environ, "GROUP_RANK"),
            nodes=_number(environ, "GROUP_WORLD_SIZE", 1),
            device=torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu"),
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes."""
        return self.rank == 0


def under_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun (or something that sets the same variables) started this process."""
    return all(environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    text = environ.get(name, "").strip()
    number = whole_number(text) if text else default
    if number is None:
        raise UsageError(f"{text!r} is no number", where=name, fix=LIKE_TORCHRUN)
    return number


def join(world: World, *, minutes: float = 10.0) -> None:
    """Meet the other ranks (nothing to do alone). GPU tensors travel by NCCL, host tensors by gloo.

    Raises:
        TrainError: they did not all come within ``minutes``.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.size == 1:
        return
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timedelta(minutes=minutes))
        dist.barrier(device_ids=[world.device.index] if world.device.type == "cuda" else None)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise TrainError(
            f"rank {world.rank} of {world.size} did not meet the others: {first_line(error)}",
            where=address,
            fix="Check that MASTER_ADDR is machine 0 and reachable from here, and that every machine was started",
        ) from None


def leave() -> None:
    """Part from the other ranks; harmless when alone or when they are gone."""
    if dist.is_initialized():
        gc.collect()  # a group that something still holds when Python ends would end the process with an abort
        dist.destroy_process_group()


@contextlib.contextmanager
def speaking_in_turn(environ: Mapping[str, str]) -> Iterator[None]:
    """What all ranks of a machine find wrong before they meet is said by the first of them.

    The others wait meanwhile: torchrun ends them when the first one has ended.
    """
    try:
        yield
    except DM05Error:
        if under_torchrun(environ) and environ["LOCAL_RANK"] != "0":
            time.sleep(TURN_SECONDS)
        raise


def give_way() -> NoReturn:
    """End this rank without a word, as another one says what happened; that one gets time to speak first."""
    time.sleep(HUSH_SECONDS)  # torchrun stops all when the first of them ends
    raise SystemExit(GAVE_WAY)


def together(world: World, action: Callable[[], T]) -> T:
    """Run something on every rank; when it fails on any, every rank ends, and rank 0 names the rank and machine.

    The first rank at fault says it too when it is on another machine, whose log then tells.

    Raises:
        DM05Error: this rank's own error.
        TrainError: another rank failed, and this is rank 0.
        SystemExit: a rank failed, and others say so.
    """
    mine: DM05Error | None = None
    result: Any = None
    try:
        result = action()
    except DM05Error as error:
        mine = error
    except OSError as error:
        mine = TrainError(error.strerror or str(error), where=error.filename)
    if world.size > 1:
        texts: list[str | None] = [None] * world.size
        dist.all_gather_object(texts, None if mine is None else f"rank {world.rank} on {socket.gethostname()}: {mine}")
        failed = [rank for rank, text in enumerate(texts) if text is not None]
        if failed and not (world.is_main or (world.rank == failed[0] and world.node > 0)):
            give_way()
        if failed and mine is None:
            more = len(failed) - 1
            others = f" (and {more} more rank{'s' if more > 1 else ''})" if more else ""
            raise TrainError(f"{texts[failed[0]]}{others}")
    if mine is not None:
        raise mine
    return result


def broadcast(world: World, value: T) -> T:
    """Rank 0's value on every rank (picklable)."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return cast(T, box[0])


def first_line(error: BaseException) -> str:
    """The first line of a foreign error's text, for a message of one line."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


@contextlib.contextmanager
def lost_peers(world: World, advice: Callable[[], str]) -> Iterator[None]:
    """Turn what torch raises when another rank is gone into one line, with ``advice`` on how to go on.

    Raises:
        TrainError: the others cannot be reached any more.
    """
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not any(word in str(error).lower() for word in PEER_WORDS):
            raise
        raise TrainError(
            f"rank {world.rank} of {world.size} lost the others: {PEER_NOISE.sub('', first_line(error)).strip(' .')}",
            fix=f"See the log of the rank that ended first. {advice()}",
        ) from None
