"""Batches on the model's device, in the order of `dm05_train.data.sampler`, made while the last one is trained on.

A batch (B samples, V cameras, L tokens, H actions, S pixels):

    input_ids, token_type_ids, attention_mask   int64 [B, L], padded on the right; token type 1 on image tokens
    pixel_values                                float32 [B * V, 3, S, S], -1 .. 1, sample by sample
    action, action_mask                         float32 [B, H, 32], normalised; mask 1 on real dims
    sample_ids                                  int64 [B], on the CPU: number of each sample in the dataset
    position                                    int64 [], on the CPU: global position of the first; the others follow

Encoded images are decoded by worker processes straight into page-locked memory, which goes to the GPU in one copy, in a
stream of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from dm05_schemas.errors import DM05Error
from torch import Tensor

from dm05_train.data.arena import BatchLayout
from dm05_train.data.augment import augment, draws
from dm05_train.data.dataset import ACTION_DIM, MemoryMappedDataset
from dm05_train.data.device import Batch, Staged, Stager
from dm05_train.data.pool import LocalPool, WorkerPool
from dm05_train.data.sampler import Schedule
from dm05_train.data.tokens import PromptTable
from dm05_train.prompt import PromptBuilder


class Loader:
    """Endless batches of one rank.

    Args:
        dataset: what to load.
        prompt_builder: makes the prompts.
        image_size: side of pixel_values.
        device: where batches go.
        world_size: number of ranks.
        rank: this one.
        per_device_batch: B.
        accumulation: batches of a step.
        workers: processes that read and decode; 0 does it here, when a batch is asked for.
        seed: of order and augmentation.
        start_position: global position of the first step.
        prefix_length: L; None takes the longest prompt, rounded up to 8.
        augment_images: crop, turn and recolour the images.
        shuffle: False keeps the samples in order.

    Raises:
        TrainError: an epoch has fewer samples than a step takes, or a prompt is longer than L.
        DataError: the first sample cannot be read.
    """

    def __init__(
        self,
        dataset: MemoryMappedDataset,
        prompt_builder: PromptBuilder,
        *,
        image_size: int,
        device: torch.device | str = "cpu",
        world_size: int = 1,
        rank: int = 0,
        per_device_batch: int,
        accumulation: int = 1,
        workers: int = 0,
        seed: int = 0,
        start_position: int = 0,
        prefix_length: int | None = None,
        augment_images: bool = False,
        shuffle: bool = True,
    ) -> None:
        self.schedule = Schedule(
            seed=seed,
            samples=len(dataset),
            batch=per_device_batch,
            ranks=world_size,
            rank=rank,
            accumulation=accumulation,
            shuffle=shuffle,
        )
        self.prompts = PromptTable(prompt_builder, dataset.prompts, dataset.info.state_dim, prefix_length)
        self.layout = BatchLayout(
            batch=per_device_batch,
            cameras=dataset.cameras,
            chunk_size=dataset.handle.chunk_size,
            action_dim=ACTION_DIM,
            prefix_length=self.prompts.length,
        )
        self._dataset, self._workers, self._augment = dataset, workers, augment_images
        self._device = torch.device(device)
        self._stager = Stager(self._device, image_size)
        self._pool: LocalPool | WorkerPool | None = None
        self._start = start_position
        self._error: DM05Error | None = None
        self._reset()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            DataError: the data are at fault; names episode, frame and file.
            TrainError: a worker was killed.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._next()
        except DM05Error as error:
            self._error = error
            self.close()
            raise

    def _next(self) -> Batch:
        self._fill_up()
        staged = self._ahead.popleft() if self._ahead else self._stage()
        batch = staged.take()
        self._given += 1
        self._fill_up()
        if not self._ahead and self._open_pool().ready():
            self._ahead.append(self._stage())
        return batch

    def state_dict(self) -> dict[str, int]:
        """A few integers to go on from: the position of the first step that is not complete."""
        steps = self._given // self.schedule.accumulation
        return self.schedule.state(self._start + steps * self.schedule.global_batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader (of any number of ranks, batch size or workers) stopped.

        Raises:
            TrainError: the state is of another order.
        """
        self._start = self.schedule.restore(state)
        self.close()
        self._error = None
        self._reset()

    def close(self) -> None:
        """End the workers and give up their memory."""
        if self._pool is not None:
            for staged in [*self._ahead, *self._copying]:
                staged.wait_copied()
            self._pool.close()
            self._pool = None

    def _reset(self) -> None:
        self._given = self._asked = self._staged = 0
        self._ahead: deque[Staged] = deque()
        self._copying: deque[Staged] = deque()
        self._positions: deque[np.ndarray[Any, np.dtype[np.int64]]] = deque()

    def _open_pool(self) -> LocalPool | WorkerPool:
        if self._pool is None:
            if self._workers:
                self._pool = WorkerPool(self._dataset, self.layout, self._device, self._workers)
            else:
                self._pool = LocalPool(self._dataset, self.layout, self._device)
        return self._pool

    def _fill_up(self) -> None:
        """Ask for as many batches as there are free arenas; one is free again when its copy is done."""
        pool = self._open_pool()
        while self._asked - self._staged + len(self._copying) < pool.slots or self._freed():
            positions = self.schedule.positions(self._start, self._asked)
            self._positions.append(positions)
            pool.submit(self.schedule.sample_ids(positions).tolist())
            self._asked += 1

    def _freed(self) -> bool:
        """Whether an arena could be freed, waiting for its copy only if no batch is being made."""
        if not self._copying or not (self._copying[0].is_copied() or self._asked == self._staged):
            return False
        self._copying.popleft().wait_copied()
        return True

    def _stage(self) -> Staged:
        pinned, filled = self._open_pool().next()
        self._staged += 1
        positions = self._positions.popleft()
        sample_ids = self.schedule.sample_ids(positions)
        arrays = pinned.arena.arrays
        self.prompts.write(arrays, filled.prompts, filled.states)
        staged = self._stager.stage(pinned, filled.sizes, self._change(positions, sample_ids))
        staged.batch["sample_ids"] = torch.from_numpy(sample_ids)
        staged.batch["position"] = torch.tensor(int(positions[0]))
        self._copying.append(staged)
        return staged

    def _change(self, positions: np.ndarray[Any, Any], sample_ids: np.ndarray[Any, Any]) -> Any:
        if not self._augment:
            return None
        epochs = positions // self.schedule.samples
        numbers = torch.from_numpy(draws(self.schedule.seed, epochs, sample_ids, self._dataset.cameras))

        def change(levels: Tensor) -> Tensor:
            return augment(levels, numbers.to(levels.device, non_blocking=True))

        return change
