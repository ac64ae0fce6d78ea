"""The process of a machine that starts its ranks: torchrun, run in here so that signals and failures are told in our
own way.

torchrun by itself answers SIGTERM by stopping its ranks and failing, and a rank's failure by a traceback of its own.
Here SIGTERM and SIGUSR1 go to the ranks, which save and finish, and a failure or Ctrl-C is one line.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from dm05_train.env import GAVE_WAY, first_line
from dm05_train.errors import TrainError
from dm05_train.kept import Kept

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
LEFT_TO_TORCHRUN = "SIGINT,SIGHUP,SIGQUIT"


def run_ranks(torchrun: Sequence[str], environ: Mapping[str, str], kept: Kept) -> int:
    """Run torchrun with these arguments and this environment until all ranks have ended.

    Args:
        kept: knows what to do when a rank fails.

    Returns:
        0; or 128 + the signal that arrived before the ranks were there to answer it, or that stopped all (SIGHUP).

    Raises:
        KeyboardInterrupt: Ctrl-C; the ranks have ended.
        TrainError: a rank failed, or the machines did not find each other.
    """
    from torch.distributed import DistError
    from torch.distributed import run as torch_run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    os.environ.clear()
    os.environ.update(environ)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each has a level of its own
    for number in FORWARDED:
        signal.signal(number, _forward)
    arguments = torch_run.parse_args(list(torchrun))
    arguments.signals_to_handle = LEFT_TO_TORCHRUN
    where = f"{arguments.master_addr}:{arguments.master_port}"
    try:
        torch_run.run(arguments)
    except ChildFailedError as error:
        if (stopped_by := _ended_by_forwarded(error)) is not None:
            print("told to stop before the ranks could listen: nothing was saved", file=sys.stderr)
            return 128 + stopped_by
        raise TrainError(_describe(error), fix=kept.advice()) from None
    except (DistError, RendezvousError, TimeoutError) as error:
        raise TrainError(
            f"the machines did not find each other: {first_line(error)}",
            where=where,
            fix="Check MASTER_ADDR and MASTER_PORT, and that every machine was started with the same NNODES; "
            "JOIN_TIMEOUT (seconds) waits longer",
        ) from None
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        print(f"stopped by {stopped.sigval.name}. {kept.advice()}", file=sys.stderr)
        return 128 + stopped.sigval
    except _StoppedEarly as stopped:
        print("told to stop before the ranks were started: nothing was saved", file=sys.stderr)
        return 128 + stopped.number
    return 0


class _StoppedEarly(Exception):
    """A signal came while there was no rank yet to give it to."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_forwarded: set[int] = set()


def _ended_by_forwarded(error: object) -> int | None:
    """The signal that was handed on to ranks and ended the first of them, which was still on its way to listening."""
    code = error.get_first_failure()[1].exitcode  # type: ignore[attr-defined]
    number = -code if code < 0 else code - 128
    return number if number in _forwarded else None


def _forward(number: int, frame: FrameType | None) -> None:
    ranks = children(os.getpid())
    _forwarded.add(number)
    if not ranks:
        raise _StoppedEarly(number)
    for pid in ranks:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in tasks.read_text().split()]
        except OSError:
            continue
    return found


def _describe(error: object) -> str:
    """What ended the run, of the rank that failed first."""
    rank, failure = error.get_first_failure()  # type: ignore[attr-defined]
    code = failure.exitcode
    if code == GAVE_WAY:
        how = "ended because another rank failed; the log of that rank or of machine 0 says why"
    elif code >= 0:
        how = f"ended with exit code {code}; its own message stands above"
    else:
        name = signal.Signals(-code).name
        how = f"was killed by {name}"
        if name == "SIGKILL":
            how += (
                " (the kernel does that when memory runs out; fewer --trainer-config.dataloader-num-workers need less)"
            )
    return f"rank {rank} on {socket.gethostname()} {how}, and the other ranks here were stopped"
