"""The Gemma 3 chat turn of one sample: task, cameras and, where a dataset shows it, the state.

    <bos><start_of_turn>user
    Robot: R            only if known
    Control mode: C     only if known
    Overall speed: S
    Task: P.
    LABEL image:        for each camera, followed by its image:
                        \\n\\n<start_of_image> + N x <image_soft_token> + <end_of_image>\\n\\n
    States: b1 b2 ...   only if the dataset shows its state
    <end_of_turn>
    <start_of_turn>model

What a dataset writes in a task is text: `<bos>` or `<start_of_image>` in it is encoded as those letters, never as the
control token (the processor of the public code would let it through).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from dm05_schemas.registry import DatasetSpec
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dm05_train.errors import TrainError
from dm05_train.model.config import DM05Config

BOS, START_OF_TURN, END_OF_TURN = "<bos>", "<start_of_turn>", "<end_of_turn>"
START_OF_IMAGE, IMAGE, END_OF_IMAGE = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
STATE_BINS = 255

IntArray = NDArray[np.int64]


def bin_state(state: NDArray[np.float32]) -> IntArray:
    """Bin numbers 0..255 of a normalised state [S]: clipped to [-1, 1], `floor((x + 1) / 2 * 255)` in float32."""
    clipped = np.clip(np.asarray(state, dtype=np.float32), np.float32(-1), np.float32(1))
    return np.floor((clipped + np.float32(1)) / np.float32(2) * np.float32(STATE_BINS)).astype(np.int64)


class PromptBuilder:
    """Turns a task into token ids.

    Args:
        tokenizer_path: the checkpoint's tokenizer.json.
        config: the model's config (number of tokens an image, ids of image and padding).
        spec: the dataset's registry entry (camera labels, robot, control mode, speed, state shown or not).
        model_max_length: longest prompt in tokens; the end of a task is cut to fit.

    Raises:
        TrainError: the tokenizer cannot be read, lacks a control token or does not belong to the model.
    """

    def __init__(
        self, tokenizer_path: Path, config: DM05Config, spec: DatasetSpec, *, model_max_length: int = 1024
    ) -> None:
        self.model_max_length = model_max_length
        self.pad_token_id = config.pad_token_id
        self.shows_state = spec.state_in_prompt
        self._path, self._config, self._spec = tokenizer_path, config, spec
        self._tokenizer = _read_tokenizer(tokenizer_path)
        names = (BOS, START_OF_TURN, END_OF_TURN, START_OF_IMAGE, IMAGE, END_OF_IMAGE)
        self._ids = {name: self._control_id(name) for name in names}
        if self._ids[IMAGE] != config.image_token_id:
            raise TrainError(
                f"{IMAGE} has id {self._ids[IMAGE]}, but the model's config.json says image_token_index "
                f"{config.image_token_id}",
                where=tokenizer_path,
                fix="Use the tokenizer.json that came with the checkpoint",
            )
        self._special = self._special_ids()
        self._image_ids = [
            self._ids[START_OF_IMAGE],
            *[self._ids[IMAGE]] * config.mm_tokens_per_image,
            self._ids[END_OF_IMAGE],
        ]
        self._warned: set[str] = set()

    def build(
        self,
        task: str,
        state_normalised: NDArray[np.float32] | Sequence[float] | None = None,
        *,
        limit: int | None = None,
    ) -> tuple[IntArray, IntArray]:
        """Token ids of one prompt.

        Args:
            task: what the robot is to do, as the dataset writes it.
            state_normalised: [S], needed exactly when the dataset shows its state.
            limit: a shorter limit than model_max_length.

        Returns:
            input_ids [L] and token_type_ids [L] (1 on image tokens), L at most the limit.

        Raises:
            TrainError: even an empty task does not fit, or the state is missing.
        """
        if self.shows_state and state_normalised is None:
            raise TrainError("this dataset shows the state in its prompts, but none was given")
        states = None
        if self.shows_state:
            states = bin_state(np.asarray(state_normalised, dtype=np.float32))
        ids = self._encode(task, states)
        longest = self.model_max_length if limit is None else min(limit, self.model_max_length)
        if len(ids) > longest:
            ids = self._longest_fit(task, states, len(ids), longest)
        input_ids = np.asarray(ids, dtype=np.int64)
        return input_ids, (input_ids == self._ids[IMAGE]).astype(np.int64)

    def longest(self, tasks: Sequence[str], state_dim: int) -> int:
        """Length of the longest prompt over `tasks`; where the state is shown, over every state the bins can write."""
        if not self.shows_state:
            return max(len(self.build(task)[0]) for task in tasks)
        # A tokenizer may write some numbers shorter than others, so the longest bin is looked up, not assumed.
        longest = max(range(STATE_BINS + 1), key=lambda number: len(self._encode_text(f" {number}")))
        state = np.full(state_dim, (longest + 0.5) / STATE_BINS * 2 - 1, dtype=np.float32)
        return max(len(self.build(task, state)[0]) for task in tasks)

    def _encode(self, task: str, states: IntArray | None) -> list[int]:
        first, *rest = _texts(task, self._spec, states)
        ids = [self._ids[BOS], self._ids[START_OF_TURN], *self._encode_text(f"user\n{first}")]
        for text in rest:
            ids += self._image_ids
            ids += self._encode_text(text)
        ids += [self._ids[END_OF_TURN], *self._encode_text("\n")]
        return [*ids, self._ids[START_OF_TURN], *self._encode_text("model\n")]

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not self._special.isdisjoint(ids):
            token = self._tokenizer.id_to_token(next(i for i in ids if i in self._special))
            raise TrainError(f"this tokenizer writes {token} in a text as a control token", where=self._path)
        return ids

    def _longest_fit(self, task: str, states: IntArray | None, full: int, limit: int) -> list[int]:
        """Ids of the longest beginning of `task` that fits."""
        keep, excess = len(task), full - limit
        while excess > 0 and keep > 0:
            # One character adds a handful of tokens at most (a rare one is written byte by byte),
            # so an eighth of the excess never jumps over the longest fit.
            keep -= min(keep, max(1, excess // 8))
            ids = self._encode(task[:keep], states)
            excess = len(ids) - limit
        if excess > 0:
            raise TrainError(
                f"a prompt with an empty task has {limit + excess} tokens, more than model_max_length {limit}",
                fix="Raise --trainer-config.model-max-length",
            )
        if task not in self._warned:
            self._warned.add(task)
            warnings.warn(
                f"a prompt of {full} tokens is longer than model_max_length {limit}: "
                f"kept the first {keep} of {len(task)} characters of the task {task[:60]!r}",
                stacklevel=2,
            )
        return ids

    def _control_id(self, name: str) -> int:
        number = self._tokenizer.token_to_id(name)
        if number is None:
            raise TrainError(
                f"no token {name}", where=self._path, fix="Use the tokenizer.json that came with the checkpoint"
            )
        return int(number)

    def _special_ids(self) -> frozenset[int]:
        """Ids that no text may produce: the special tokens but `<unk>`, which stands for letters unknown to it."""
        added = self._tokenizer.get_added_tokens_decoder()
        largest, limit = max([*added, *self._ids.values()]), self._config.text.vocab_size
        if largest >= limit:
            raise TrainError(
                f"token id {largest} lies outside the model's vocabulary of {limit}",
                where=self._path,
                fix="Use the tokenizer.json that came with the checkpoint",
            )
        return frozenset(number for number, token in added.items() if token.special and token.content != "<unk>")


def _texts(task: str, spec: DatasetSpec, states: IntArray | None) -> list[str]:
    """The texts before, between and after the images, each with the blank lines an image brings along.

    Texts that follow each other without an image between them are one item, and an item loses its outer white space.
    """
    header = f"Robot: {spec.robot_type}\n" if spec.robot_type else ""
    header += f"Control mode: {spec.control_mode}\n" if spec.control_mode else ""
    header += f"Overall speed: {spec.speed}\nTask: {task}.\n"
    labels = [f"{label} image: " for label in spec.image_prompts]
    tail = "" if states is None else "States: " + " ".join(str(number) for number in states)
    *before_images, last = [*labels, tail]
    items = [header + before_images[0], *before_images[1:], last] if before_images else [header + last]
    texts = [item.strip() for item in items]
    return [("" if i == 0 else "\n\n") + text + ("" if i == len(texts) - 1 else "\n\n") for i, text in enumerate(texts)]


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TrainError("no such tokenizer", where=path, fix="Run dm05-prep model to fetch the checkpoint again")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise TrainError(f"not a tokenizer.json: {error}", where=path) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer
