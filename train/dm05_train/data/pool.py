"""The worker processes of a loader: micro-batch k goes to worker k % W, answers come back in order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from dm05_schemas.errors import DataError

from dm05_train.data.arena import Arena, BatchLayout
from dm05_train.data.dataset import MemoryMappedDataset
from dm05_train.data.device import Pinned
from dm05_train.data.worker import Failed, Filled, Job, Task, fill
from dm05_train.errors import TrainError

ARENAS = 2
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ENTRY = "from dm05_train.data.worker import main; main()"
# What reaches the whole process group is for the training process to answer, which ends its workers when it is done.
_LEFT_TO_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOP_SECONDS = 5.0


class LocalPool:
    """No processes: a batch is read when it is asked for."""

    def __init__(self, dataset: MemoryMappedDataset, layout: BatchLayout, device: torch.device) -> None:
        self._dataset = dataset
        self._waiting: list[list[int]] = []
        self._pinned = Pinned(Arena(layout, image_bytes=_image_bytes(dataset, layout)), device)
        self.slots = 1

    def submit(self, sample_ids: list[int]) -> None:
        """Ask for a batch."""
        self._waiting.append(sample_ids)

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting."""
        return False

    def next(self) -> tuple[Pinned, Filled]:
        """The oldest batch asked for."""
        filled = fill(self._dataset, self._pinned.arena, self._waiting.pop(0))
        self._pinned.follow(filled.capacity)
        return self._pinned, filled

    def close(self) -> None:
        """Give up the memory."""
        self._pinned.close()


@dataclass(kw_only=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    arenas: list[Pinned]
    tasks: list[list[int]]


class WorkerPool:
    """Processes that fill arenas ahead of time; each has two, one being filled while the other is read.

    Args:
        dataset: read by the workers through files of their own.
        layout: of the batches.
        device: where the batches go on to.
        workers: number of processes, at least 1.
    """

    def __init__(self, dataset: MemoryMappedDataset, layout: BatchLayout, device: torch.device, workers: int) -> None:
        self._dataset = dataset
        self._workers: list[_Worker] = []
        self._stop = weakref.finalize(self, _stop, self._workers)
        room = _image_bytes(dataset, layout)
        for _ in range(workers):
            arenas = [Pinned(Arena(layout, image_bytes=room), device) for _ in range(ARENAS)]
            self._workers.append(_start(arenas))
            self._workers[-1].connection.send(Job(handle=dataset.handle, layout=layout))
        self.slots = workers * ARENAS
        self._asked = self._given = 0

    def submit(self, sample_ids: list[int]) -> None:
        """Ask for a batch; at most `slots` may be asked for and not yet given back."""
        turn, worker = divmod(self._asked, len(self._workers))
        self._asked += 1
        chosen = self._workers[worker]
        chosen.tasks.append(sample_ids)
        try:
            chosen.connection.send(Task(turn % ARENAS, sample_ids))
        except OSError:
            raise self._died(chosen) from None

    def ready(self) -> bool:
        """Whether the next batch can be had without waiting."""
        return self._given < self._asked and self._workers[self._given % len(self._workers)].connection.poll()

    def next(self) -> tuple[Pinned, Filled]:
        """The oldest batch asked for; blocks until it is there.

        Raises:
            DataError: the data are at fault; names episode, frame and file.
            TrainError: the worker was killed.
        """
        turn, number = divmod(self._given, len(self._workers))
        worker = self._workers[number]
        try:
            answer: Filled | Failed = worker.connection.recv()
        except (EOFError, OSError):
            raise self._died(worker) from None
        if isinstance(answer, Failed):
            what = answer.what if answer.placed else f"{self._place(worker)}: {answer.what}"
            raise DataError(what, where=answer.where, fix=answer.fix)
        self._given += 1
        worker.tasks.pop(0)
        pinned = worker.arenas[turn % ARENAS]
        pinned.follow(answer.capacity)
        return pinned, answer

    def close(self) -> None:
        """End the processes."""
        self._stop()

    def _place(self, worker: _Worker) -> str:
        """The first sample of what a worker is at."""
        _, episode, frame = self._dataset.locate(worker.tasks[0][0])
        return f"episode {episode}, frame {frame}"

    def _died(self, worker: _Worker) -> TrainError:
        code = worker.process.wait(STOP_SECONDS)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return TrainError(
            f"data worker {worker.process.pid} {how} while it read samples from {self._place(worker)} on",
            where=self._dataset.handle.folder,
            fix="If memory ran out, lower --trainer-config.dataloader-num-workers",
        )


def _image_bytes(dataset: MemoryMappedDataset, layout: BatchLayout) -> int:
    """Room for a batch's images: as large as any in a pack, else as the first sample's (arenas grow when needed)."""
    images = layout.batch * layout.cameras
    if dataset.info.largest_image_bytes:
        return images * dataset.info.largest_image_bytes
    return layout.batch * sum(image.size for image in dataset[0].images)


def _start(arenas: list[Pinned]) -> _Worker:
    ours, theirs = socket.socketpair()
    handles = [theirs.fileno(), *(pinned.arena.handle for pinned in arenas)]
    environ = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    command = [sys.executable, "-c", _ENTRY, *map(str, handles)]
    # Blocked signals stay blocked in a new program, from its first instruction on.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_TRAINER)
    try:
        process = subprocess.Popen(command, pass_fds=handles, env=environ, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return _Worker(process=process, connection=Connection(ours.detach()), arenas=arenas, tasks=[])


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        try:
            worker.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        for pinned in worker.arenas:
            pinned.close()
    workers.clear()
