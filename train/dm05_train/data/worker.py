"""A process that reads and decodes batches; `main` is its entry point, its arguments are descriptors.

It is a fresh interpreter without torch, so it starts quickly, stays small and shares no lock with the training process.
It ends when the other side of its socket does, however that happens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from dm05_schemas.errors import DM05Error
from numpy.typing import NDArray

from dm05_train.data.arena import Arena, BatchLayout
from dm05_train.data.dataset import DatasetHandle, MemoryMappedDataset


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker is told once."""

    handle: DatasetHandle
    layout: BatchLayout


class Task(NamedTuple):
    """Samples to put into an arena."""

    arena: int
    sample_ids: list[int]


class Filled(NamedTuple):
    """What an arena holds now: sizes (height, width) of its images, prompt numbers [B], normalised states [B, S]."""

    sizes: list[tuple[int, int]]
    prompts: NDArray[np.int64]
    states: NDArray[np.float32]
    capacity: int


class Failed(NamedTuple):
    """Why a batch could not be made: the fields of a DM05Error, and whether they already name episode and frame."""

    what: str
    where: str | None
    fix: str | None
    placed: bool


def fill(dataset: MemoryMappedDataset, arena: Arena, sample_ids: list[int]) -> Filled:
    """Read and decode samples into an arena (all but the tokens).

    Raises:
        DataError: a file is missing, cut short or broken; names episode, frame and file.
    """
    ids = np.array(sample_ids, dtype=np.int64)
    numbers = dataset.numbers(ids)
    arena.arrays["action"][:] = numbers.action
    arena.arrays["action_mask"][:] = numbers.action_mask
    sizes: list[tuple[int, int]] = []
    at = 0
    total = len(sample_ids) * dataset.cameras
    for sample_id in sample_ids:
        for camera in range(dataset.cameras):
            size = dataset.image_into(sample_id, camera, arena.images[at:])
            if isinstance(size, int):
                arena.grow(at + size * (total - len(sizes)))
                size = dataset.image_into(sample_id, camera, arena.images[at:])
                assert not isinstance(size, int)
            sizes.append(size)
            at += size[0] * size[1] * 3
    return Filled(sizes, numbers.prompt, numbers.state, arena.capacity)


def serve(connection: Connection, handles: list[int]) -> None:
    """Answer tasks until the other side closes the connection."""
    job: Job = connection.recv()
    arenas = [Arena(job.layout, handle) for handle in handles]
    dataset: MemoryMappedDataset | None = None
    while True:
        task: Task = connection.recv()
        try:
            dataset = dataset or job.handle.open()
            connection.send(fill(dataset, arenas[task.arena], task.sample_ids))
        except DM05Error as error:
            connection.send(Failed(error.what, error.where, error.fix, placed=dataset is not None))
        except (OSError, MemoryError) as error:
            where = getattr(error, "filename", None)
            connection.send(Failed(f"a data worker failed: {error!r}", where, None, placed=False))


def main() -> None:
    """Entry point of the process: argv holds the descriptors of its socket and its arenas."""
    socket, *arenas = (int(text) for text in sys.argv[1:])
    try:
        serve(Connection(socket), arenas)
    except (EOFError, ConnectionError):
        pass
