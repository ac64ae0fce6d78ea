"""The prompts of a dataset as token ids, each task encoded once, all padded to one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dm05_train.errors import TrainError
from dm05_train.prompt import PromptBuilder

LENGTH_STEP = 8

Int64 = NDArray[np.int64]


class PromptTable:
    """Token ids by prompt number.

    Args:
        builder: makes the prompts.
        tasks: the dataset's task texts.
        state_dim: S, for datasets that show their state.
        length: L, the length to pad to; None takes the longest prompt of the dataset, rounded up to 8.

    Raises:
        TrainError: `length` is shorter than a prompt.
    """

    def __init__(self, builder: PromptBuilder, tasks: Sequence[str], state_dim: int, length: int | None = None) -> None:
        self._builder, self._tasks = builder, tasks
        longest = builder.longest(tasks, state_dim)
        self.length = length if length is not None else -(-longest // LENGTH_STEP) * LENGTH_STEP
        if self.length < longest:
            raise TrainError(f"the longest prompt has {longest} tokens, more than a prefix of {self.length}")
        self._fixed = None if builder.shows_state else [builder.build(task) for task in tasks]

    def write(self, arrays: dict[str, Int64], prompts: Int64, states: NDArray[np.float32]) -> None:
        """Write a batch's ids, token types and attention mask [B, L] into `arrays`, padded on the right."""
        for i, number in enumerate(prompts.tolist()):
            if self._fixed is not None:
                ids, types = self._fixed[number]
            else:
                ids, types = self._builder.build(self._tasks[number], states[i], limit=self.length)
            arrays["input_ids"][i] = self._builder.pad_token_id
            arrays["token_type_ids"][i] = 0
            arrays["attention_mask"][i] = np.arange(self.length) < len(ids)
            arrays["input_ids"][i, : len(ids)] = ids
            arrays["token_type_ids"][i, : len(types)] = types
