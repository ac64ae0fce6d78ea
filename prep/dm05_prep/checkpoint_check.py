"""Is a checkpoint folder whole, and what is in it: seconds, since of the weights only the header is read.

::

    checkpoints/DM05/
      model.safetensors            names, dtypes and shapes are compared with what config.json asks for
      config.json                  needed
      tokenizer.json               needed; its control tokens, and the image token that config.json names
      norm_stats.json              tells what the checkpoint was trained for
      *.json, chat_template.jinja  read, when they are there
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dm05_schemas import strict_json
from dm05_schemas.checkpoint import TensorEntry, expected_tensors, read_header
from dm05_schemas.errors import DataError
from dm05_schemas.stats import NormStats, read_stats

from dm05_prep.console import human_bytes

WEIGHTS, CONFIG, TOKENIZER, STATS = "model.safetensors", "config.json", "tokenizer.json", "norm_stats.json"
NEEDED = (CONFIG, TOKENIZER, WEIGHTS)
RELEASED_BYTES = 11_658_431_136
LM_HEAD = "model.vlm.lm_head.weight"
IMAGE_TOKEN = "<image_soft_token>"
CONTROL_TOKENS = (
    "<pad>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    IMAGE_TOKEN,
)
SHOWN = 3
FIX = "dm05-prep model --force fetches it again"

# Published statistics of the actions of LIBERO (libero_pi0_all), to recognise a checkpoint trained on it.
LIBERO_ACTION_MEAN = (0.0205, 0.0994, -0.0424, 0.0007, 0.0068, -0.0062, -0.0244)
LIBERO_ACTION_STD = (0.2933, 0.3516, 0.4458, 0.0387, 0.0639, 0.0764, 0.9997)


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """What a folder holds; ``bytes`` counts the weights, ``notes`` are worth a look and no errors."""

    tensors: int
    parameters: int
    dtypes: tuple[str, ...]
    bytes: int
    kind: str
    tokens: int
    chunk_size: int
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """What to print."""
        size = f"{self.tensors:,} tensors {'/'.join(self.dtypes)}, {_count(self.parameters)}, {human_bytes(self.bytes)}"
        return [
            f"checked    {size}, chunk size {self.chunk_size}, {self.tokens:,} tokens: names and shapes are right",
            f"checkpoint {self.kind}",
            *(f"note       {note}" for note in self.notes),
        ]


def check_checkpoint(folder: Path) -> CheckpointReport:
    """Check the files of ``folder`` against each other.

    Raises:
        DataError: a file is missing or broken, or does not fit the others; the text names it.
    """
    for name in NEEDED:
        if not (folder / name).is_file():
            raise DataError("is missing", where=folder / name, fix="dm05-prep model fetches it")
    config = strict_json.read_object(folder / CONFIG)
    if config.get("model_type") != "dm05":
        raise DataError(f"model_type is {config.get('model_type')!r}, not 'dm05'", where=folder / CONFIG, fix=FIX)
    header = read_header(folder / WEIGHTS)
    notes = list(_check_tensors(header, expected_tensors(config), folder / WEIGHTS))
    tokens = _check_tokenizer(folder, config)
    notes += _check_others(folder, config)
    size = (folder / WEIGHTS).stat().st_size
    dtypes = Counter(entry.dtype for entry in header.values())
    parameters = sum(math.prod(entry.shape) for name, entry in header.items() if name != LM_HEAD)
    return CheckpointReport(
        tensors=len(header),
        parameters=parameters,
        dtypes=tuple(dtype for dtype, _ in dtypes.most_common()),
        bytes=size,
        kind=f"{'DM05' if size == RELEASED_BYTES else 'DM05 of another size'}, {describe_kind(folder)}",
        tokens=tokens,
        chunk_size=config.get("chunk_size", 0),
        notes=tuple(notes),
    )


def describe_kind(folder: Path) -> str:
    """What the checkpoint was trained for, by the statistics that lie beside it.

    Raises:
        DataError: the statistics cannot be read.
    """
    path = folder / STATS
    if (folder / "training" / "state.json").is_file():
        return "written by dm05-train: training continues from it"
    if not path.is_file():
        return "no norm_stats.json: cannot tell what it was trained for"
    document = strict_json.read_object(path)
    robots = document.get("norm_stats_by_robot")
    if not isinstance(robots, dict):
        return _describe_stats(read_stats(path))
    described = [f"{robot} ({_dims(read_stats(path, robot))})" for robot in sorted(robots)]
    default = document.get("default_robot_type")
    if len(described) == 1:
        return f"{_describe_stats(read_stats(path, next(iter(robots))))}, robot {described[0]}"
    return f"base: statistics of {len(described)} robots, by default {default}: {', '.join(described)}"


def _describe_stats(stats: NormStats) -> str:
    mean, std = np.asarray(LIBERO_ACTION_MEAN), np.asarray(LIBERO_ACTION_STD)
    if len(stats.action.mean) == len(mean):
        near = np.abs(stats.action.mean - mean) < 0.05 * std
        if near.all() and (np.abs(stats.action.std - std) < 0.05 * std).all():
            return f"LIBERO: its action statistics are those of libero_pi0_all ({_dims(stats)})"
    return f"for one dataset ({_dims(stats)})"


def _dims(stats: NormStats) -> str:
    return f"state {len(stats.state.mean)}, action {len(stats.action.mean)}"


def _check_tensors(
    header: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]], path: Path
) -> Iterator[str]:
    missing = sorted(set(expected) - set(header))
    if missing == [LM_HEAD]:  # it equals the embeddings
        yield f"{LM_HEAD} is not in the file: the embeddings stand for it"
        missing = []
    for what, names in (("lacks", missing), ("has unknown", sorted(set(header) - set(expected)))):
        if names:
            raise DataError(f"{what} {_some(names)}, by config.json beside it", where=path, fix=FIX)
    wrong = [
        f"{name} {list(entry.shape)} instead of {list(expected[name])}"
        for name, entry in header.items()
        if entry.shape != expected[name]
    ]
    if wrong:
        raise DataError(f"has another shape than config.json asks for: {_some(wrong)}", where=path, fix=FIX)
    strange = sorted({entry.dtype for entry in header.values()} - {"BF16", "F16", "F32"})
    if strange:
        raise DataError(f"holds tensors of type {', '.join(strange)}", where=path, fix=FIX)


def _check_tokenizer(folder: Path, config: Mapping[str, Any]) -> int:
    """The number of tokens."""
    path = folder / TOKENIZER
    document = strict_json.read_object(path)
    try:
        added = {token["content"]: token["id"] for token in document["added_tokens"]}
        ids = {**document["model"]["vocab"], **added}
        image, vocabulary = config["vlm_config"]["image_token_index"], config["vlm_config"]["text_config"]["vocab_size"]
    except (KeyError, TypeError) as error:
        raise DataError(f"has no usable {error}", where=path, fix=FIX) from None
    odd = next((token for token, number in ids.items() if type(number) is not int or number < 0), None)
    if odd is not None:
        raise DataError(f"the id of {odd!r} is {ids[odd]!r}, not a number", where=path, fix=FIX)
    missing = [token for token in CONTROL_TOKENS if token not in ids]
    if missing:
        raise DataError(f"has no token {', '.join(missing)}", where=path, fix=FIX)
    if ids[IMAGE_TOKEN] != image:
        what = f"{IMAGE_TOKEN} has id {ids[IMAGE_TOKEN]}, config.json says {image}"
        raise DataError(what, where=path, fix=FIX)
    if max(ids.values()) >= vocabulary:
        what = f"has ids up to {max(ids.values())}, the model knows those below {vocabulary}"
        raise DataError(what, where=path, fix=FIX)
    return len(ids)


def _check_others(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Notes on the smaller files; DataError for one that cannot be read or contradicts config.json."""
    for path in sorted(folder.glob("*.json")):
        if path.name not in (CONFIG, TOKENIZER):
            strict_json.read_object(path)
    path = folder / "preprocessor_config.json"
    if path.is_file():
        size = strict_json.read_object(path).get("size")
        wanted = config["vlm_config"]["vision_config"]["image_size"]
        height = size.get("height") if isinstance(size, dict) else size
        if height is not None and height != wanted:
            yield f"{path.name} says images of {height}, config.json {wanted}: {wanted} is used"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _count(parameters: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if parameters >= unit:
            return f"{parameters / unit:.2f} {name} parameters"
    return f"{parameters:,} parameters"
