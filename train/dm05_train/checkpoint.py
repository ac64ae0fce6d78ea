"""Checkpoints: the released layout plus what it takes to go on training, published by one rename.

::

    OUTPUT/checkpoint-000100/
      model.safetensors       the weights under their released names, lm_head included
      config.json, tokenizer.json, ...     copied from the folder the run started from
      norm_stats/NAME_DIGEST.{parquet,json}
      training/
        optimizer-00000-of-00002.safetensors   tensors `KIND:NAME` (exp_avg, exp_avg_sq, remainder, master, ...), each
        whole, optimizer-00001-of-00002.safetensors   keyed by released parameter name; files only share out the writing
        rng.safetensors       `cpu`: state of torch's generator
        state.json            step, samples drawn, seed, run id, sizes of all files; written last
    OUTPUT/.checkpoint-000100.RUN/   the same while it is being written; never read, removed by the next start

A folder is a complete checkpoint when its state.json is there and every file it lists has the size it says.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from dm05_schemas.errors import DM05Error
from dm05_schemas.files import sync_path
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dm05_train.errors import TrainError
from dm05_train.staging import Staging

VERSION = 1
OTHER = "Continue from an older checkpoint, or start anew with --trainer-config.resume never"
STATE = Path("training") / "state.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int16: "I16",
    torch.uint8: "U8",
}


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run needs beside its tensors to go on."""

    run: str
    """Names the run across restarts; rotation deletes only this run's checkpoints."""
    step: int
    """Optimizer steps done."""
    samples: int
    """Global samples drawn, which is the data position."""
    seed: int
    updates: int
    """Steps that moved the weights (the skipped ones did not)."""
    optimizer: str
    precision: str
    dataset: str
    dataset_samples: int
    """Samples of an epoch; the data position means nothing with another number."""
    world: int
    config: dict[str, Any]
    saved: float = 0.0
    """When, in seconds since 1970: of several runs in one folder the newest checkpoint has not the most steps."""
    files: dict[str, int] = field(default_factory=dict)
    version: int = VERSION


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after ``step`` optimizer steps."""
    return f"checkpoint-{step:06d}"


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str] | None = None,
    *,
    staging: Staging | None = None,
) -> None:
    """Write a safetensors file tensor by tensor (no second copy in memory) and flush it to the disk.

    Args:
        tensors: by name, on the host or on a GPU.
        aliases: further names for tensors already there; their bytes are written again under the new name.
        staging: by way of which GPU tensors come; needed for them alone.
    """
    everything = {**tensors, **{new: tensors[old] for new, old in (aliases or {}).items()}}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in everything.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in (staging or Staging(torch.device("cpu"), 0)).bytes_of(everything.values()):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, final: Path, state: RunState) -> None:
    """Complete a written folder: state.json with the size of every file, then one rename.

    A folder already under the final name (an earlier run's, or the same step once more) is moved aside first.
    """
    files = {p.relative_to(temporary).as_posix(): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()}
    text = json.dumps(asdict(state) | {"files": files}, indent=1)
    path = temporary / STATE
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    older = _put_aside(final) if final.exists() else None
    temporary.rename(final)
    sync_path(final.parent)
    if older is not None:  # only now: deleting takes long, and until the rename there is no other one of this step
        shutil.rmtree(older, ignore_errors=True)


def discard(folder: Path) -> None:
    """Delete a checkpoint: renamed first, so that a half-deleted one never looks like a checkpoint."""
    shutil.rmtree(_put_aside(folder), ignore_errors=True)


def _put_aside(folder: Path) -> Path:
    trash = folder.with_name(f".trash-{folder.name}-{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)  # one that could not be deleted before
    return folder.rename(trash)


def clean(output: Path) -> None:
    """Remove what killed runs left half written in an output folder."""
    for pattern in (".checkpoint-*", ".trash-*"):
        for left in output.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def rotate(output: Path, run: str, keep: int | None) -> list[Path]:
    """Delete the oldest complete checkpoints of a run beyond ``keep``; gives those deleted.

    Called after a new one is published, so the last good one always stays. Other runs' folders are not touched.
    """
    if keep is None:
        return []
    mine = [folder for folder, state in complete_checkpoints(output) if state.run == run]
    old = mine[: max(0, len(mine) - max(1, keep))]
    for folder in old:
        discard(folder)
    return old


def complete_checkpoints(output: Path) -> list[tuple[Path, RunState]]:
    """The complete checkpoints of an output folder, oldest first (by when they were saved, then by step); the others
    are passed over."""
    found: list[tuple[Path, RunState]] = []
    for folder in output.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", folder.name):
            with contextlib.suppress(DM05Error):
                found.append((folder, read_state(folder)))
    return sorted(found, key=lambda pair: (pair[1].saved, pair[1].step))


def latest(output: Path) -> Path | None:
    """The complete checkpoint that was saved last in an output folder, if any."""
    return next((folder for folder, _ in reversed(complete_checkpoints(output))), None)


def read_state(folder: Path) -> RunState:
    """The training state of a complete checkpoint.

    Raises:
        TrainError: it is incomplete, of another version, or unreadable.
    """
    path = folder / STATE
    try:
        raw = json.loads(path.read_text("utf-8"))
        version = raw["version"]
        if version != VERSION:
            raise TrainError(f"written in version {version} of the layout, this is version {VERSION}", where=path)
        state = RunState(**raw)
        numbers = [getattr(state, name) for name in ("step", "samples", "seed", "dataset_samples")]
        if not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
            raise ValueError("a number is due where none is")
        if not isinstance(state.config, dict):
            raise ValueError("settings are due where none are")
        files = dict(state.files)
    except FileNotFoundError:
        raise TrainError(f"this checkpoint is incomplete: {STATE} is missing", where=folder, fix=OTHER) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(f"not a training state: {error}", where=path, fix=OTHER) from None
    for name, size in files.items():
        file = folder / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            found = "missing" if actual is None else f"cut to {actual} of {size} bytes"
            raise TrainError(f"this checkpoint is incomplete: {name} is {found}", where=folder, fix=OTHER)
    return state


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file of a checkpoint.

    Raises:
        TrainError: it is damaged, or a tensor is not in it.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        what = f"damaged, though of the right size: {str(error).splitlines()[0]}"
        raise TrainError(what, where=path, fix=OTHER) from None


def checkpoint_entries(folder: Path, *, weights_too: bool = False) -> Iterator[tuple[str, str, Tensor]]:
    """(kind, released name, tensor) of a checkpoint's optimizer state, one at a time from the file's map.

    ``weights_too`` gives the float32 weights first, as kind ``master``: a model that is held in BF16 has rounded them.
    """
    files = sorted((folder / "training").glob("optimizer-*.safetensors"))
    if weights_too:
        files.insert(0, folder / "model.safetensors")
    for path in files:
        with opened(path) as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                kind, _, name = key.partition(":") if path.parent != folder else ("master", "", key)
                yield kind, name, file.get_tensor(key)
