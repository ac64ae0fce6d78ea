"""Work spread over processes, results in the order of the items."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.context import BaseContext
from typing import TypeVar

from dm05_schemas.errors import UsageError

from dm05_prep.errors import PrepError

Item = TypeVar("Item")
Result = TypeVar("Result")

_PRELOAD = ["dm05_schemas.episode"]
# The server's socket adds 32 bytes to the name of the temporary folder, and a socket's path has at most 107.
_LONGEST_TEMPORARY_FOLDER = 72


def default_jobs() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen_jobs(jobs: int | None) -> int | None:
    """The value of ``--jobs``.

    Raises:
        UsageError: less than 1.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs must be 1 or more, not {jobs}")
    return jobs


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """``function`` of every item, in order, in up to ``jobs`` processes; at most ``2 * jobs`` results wait in memory.

    With one job nothing is started and the calls are made here. ``function`` must be importable by name.

    Raises:
        PrepError: a process died, as it does when memory runs out. Errors of ``function`` come through as they are.
    """
    if jobs <= 1:
        yield from map(function, items)
        return
    context = _context()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_worker)
    rest = iter(items)
    try:
        waiting: deque[Future[Result]] = deque(pool.submit(function, item) for item in islice(rest, 2 * jobs))
        while waiting:
            result = waiting.popleft().result()
            for item in islice(rest, 1):
                waiting.append(pool.submit(function, item))
            yield result
    except BrokenProcessPool as error:
        raise PrepError("a worker process died, perhaps for lack of memory", fix="Lower --jobs") from error
    except BaseException:
        # Nobody wants the results any more; what the processes are at may take long.
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def batches(items: Iterable[Item], weight: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Neighbouring items in lists whose weights add up to ``limit`` or a little more."""
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += weight(item)
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _context() -> BaseContext:
    """How processes start: forked off a server that has imported already, where its socket's path is short enough."""
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TEMPORARY_FOLDER:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _begin_worker() -> None:
    """Ctrl-C reaches every process of a terminal, only the first one answers it; workers end when that one is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
