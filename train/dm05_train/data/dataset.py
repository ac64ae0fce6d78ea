"""Samples by number, from a pack or from a jsonl folder, in any process and any order.

A worker holds a few file handles and one entry an episode; nothing a frame. See `dm05_schemas.pack` for the files,
`dm05_schemas.sample` for what a sample is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from dm05_schemas import sample
from dm05_schemas.commands import aiming
from dm05_schemas.errors import DataError, mending
from dm05_schemas.frame_table import FrameTable
from dm05_schemas.image import decode_into, decode_rgb
from dm05_schemas.index import Index, require_fresh
from dm05_schemas.pack import PACK_DIR, SAME_SOURCE, PackInfo, check_files, check_matches, read_info, read_pack
from dm05_schemas.registry import ActionMode, DatasetSpec
from dm05_schemas.stats import NormStats
from dm05_schemas.workspace import Workspace
from numpy.typing import NDArray

from dm05_train.data.frames_cache import frames_of
from dm05_train.data.pictures import Encoded, Pictures, open_pictures

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Layout = Literal["auto", "jsonl", "pack"]
Split = Literal["train", "val", "all"]

ACTION_DIM = 32


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training sample. Letters: S state dims, H chunk size.

    state [S] and action [H, 32] are normalised float32, action padded with 0; action_mask [H, 32] is 1 on real dims;
    images: uint8 [height, width, 3] RGB for each camera, as stored.
    """

    episode: str
    frame: int
    task: str
    state: Float32
    action: Float32
    action_mask: Float32
    images: tuple[NDArray[np.uint8], ...]


class Numbers(NamedTuple):
    """What a batch of B samples holds beside its images: prompt [B], state [B, S], action and mask [B, H, 32]."""

    prompt: Int64
    state: Float32
    action: Float32
    action_mask: Float32


@dataclass(frozen=True, kw_only=True)
class DatasetHandle:
    """What another process needs to open the same dataset; small, and holds no open file."""

    folder: Path
    images: Path
    crc32: int
    stats: NormStats
    chunk_size: int
    relative: bool
    gripper_dims: tuple[int, ...]
    episodes: tuple[int, ...] | None
    rebuild: str
    """What errors of the frame table and of blobs say to do."""
    mend: str
    """What errors of images say to do."""

    def open(self) -> MemoryMappedDataset:
        """Open the dataset again.

        Raises:
            DataError: it was written anew since the handle was made.
        """
        info = replace(read_info(self.folder, self.rebuild), rebuild=self.rebuild)
        if info.frames_crc32 != self.crc32:
            raise DataError("was written anew while this run reads it", where=self.folder, fix="Start the run again")
        return MemoryMappedDataset(self, info)


class MemoryMappedDataset:
    """The samples of a dataset: `len()` of them, `[i]` any one, in any order.

    Args:
        handle: where the files are and how samples are cut from them.
        info: the pack.json of that folder.

    Raises:
        DataError: a file is missing or not what pack.json says.
    """

    def __init__(self, handle: DatasetHandle, info: PackInfo) -> None:
        check_files(handle.folder, info)
        self.handle, self.info = handle, info
        self._table = FrameTable(handle.folder, info)
        self._pictures: Pictures = open_pictures(handle.folder, handle.images, info, self._table)
        frames = np.array(info.episode_frames, dtype=np.int64)
        first = np.concatenate([[0], np.cumsum(frames)[:-1]]) if len(frames) else frames
        chosen = np.arange(len(frames)) if handle.episodes is None else np.array(handle.episodes, dtype=np.int64)
        self._episode, self._first, self._frames = chosen, first[chosen], frames[chosen]
        self._before = np.concatenate([[0], np.cumsum(self._frames - 1)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids = np.array([index % len(self)], dtype=np.int64)
        numbers = self.numbers(ids)
        _, episode, frame = self.locate(int(ids[0]))
        return Sample(
            episode=episode,
            frame=frame,
            task=self.prompts[int(numbers.prompt[0])],
            state=numbers.state[0],
            action=numbers.action[0],
            action_mask=numbers.action_mask[0],
            images=tuple(self.image(int(ids[0]), camera) for camera in range(self.cameras)),
        )

    def close(self) -> None:
        """Close the files."""
        self._table.close()
        self._pictures.close()

    @property
    def prompts(self) -> tuple[str, ...]:
        """The task texts that prompt numbers stand for."""
        return self.info.prompts

    @property
    def cameras(self) -> int:
        """V, number of images a sample has."""
        return len(self.info.cameras)

    @property
    def episodes(self) -> list[str]:
        """The episodes these samples are from (paths relative to the jsonl folder)."""
        return [self.info.episodes[i] for i in self._episode]

    def locate(self, sample_id: int) -> tuple[int, str, int]:
        """Row of frames.arrow, episode and frame number of a sample."""
        at = int(np.searchsorted(self._before, sample_id, side="right")) - 1
        frame = int(sample_id - self._before[at])
        return int(self._first[at]) + frame, self.info.episodes[int(self._episode[at])], frame

    def numbers(self, sample_ids: Int64) -> Numbers:
        """Everything but the images of some samples [B].

        Raises:
            DataError: frames.arrow was cut short or is corrupt; names episode, frame and file.
        """
        rows = [self._row(int(i)) for i in sample_ids]
        states = np.stack([state for _, state, _ in rows])
        chunks = np.stack([chunk for _, _, chunk in rows])
        if self.handle.relative:
            chunks = sample.relative(chunks, states, self.handle.gripper_dims)
        stats = self.handle.stats
        action, mask = sample.pad_action(sample.normalise(chunks, stats.action.q01, stats.action.q99), ACTION_DIM)
        prompt = np.array([number for number, _, _ in rows], dtype=np.int64)
        return Numbers(prompt, sample.normalise(states, stats.state.q01, stats.state.q99), action, mask)

    def stored(self, sample_id: int) -> tuple[Float32, Float32]:
        """State [S] and action chunk [H, A] of a sample as the dataset has them: absolute, in its own units."""
        _, state, chunk = self._row(sample_id)
        return state, chunk

    def image(self, sample_id: int, camera: int) -> NDArray[np.uint8]:
        """An image: uint8 [H, W, 3], RGB.

        Raises:
            DataError: missing, cut short, changed or broken; names episode, frame and file.
        """
        with mending(self.handle.mend):
            picture, where = self.encoded(sample_id, camera)
            return picture if isinstance(picture, np.ndarray) else decode_rgb(picture, where)

    def image_into(self, sample_id: int, camera: int, buffer: NDArray[np.uint8]) -> tuple[int, int] | int:
        """Decode an image into the front of a flat buffer; (height, width), or the bytes needed when it is too small.

        Raises:
            DataError: see `image`.
        """
        with mending(self.handle.mend):
            picture, where = self.encoded(sample_id, camera)
            if not isinstance(picture, np.ndarray):
                return decode_into(picture, buffer, where)
        if picture.size > buffer.size:
            return picture.size
        buffer[: picture.size] = picture.reshape(-1)
        return picture.shape[0], picture.shape[1]

    def verify(self) -> None:
        """Read frames.arrow once and compare its checksum.

        Raises:
            DataError: it was changed.
        """
        self._table.verify()

    def encoded(self, sample_id: int, camera: int) -> tuple[Encoded, str]:
        """An image as stored (pixels [H, W, 3] where it is a frame of a video), and the name errors should give it.

        Raises:
            DataError: missing, cut short or changed; names episode, frame and file.
        """
        row, episode, frame = self.locate(sample_id)
        return self._pictures.read(row, camera, f"episode {episode}, frame {frame}, {self.info.cameras[camera]}")

    def _row(self, sample_id: int) -> tuple[int, Float32, Float32]:
        """Prompt number, state [S] and action chunk [H, A] of a sample, as stored."""
        at = int(np.searchsorted(self._before, sample_id, side="right")) - 1
        frame, frames = int(sample_id - self._before[at]), int(self._frames[at])
        row = int(self._first[at]) + frame
        take = min(self.handle.chunk_size, frames - frame)
        try:
            rows = self._table.frames(row, take)
            if int(rows.frame[0]) != frame or not 0 <= rows.prompt[0] < len(self.prompts):
                raise self._table.error(f"row {row} is not the frame that pack.json says")
        except DataError as error:
            episode = self.info.episodes[int(self._episode[at])]
            what = f"episode {episode}, frame {frame}: {error.what}"
            raise DataError(what, where=error.where, fix=error.fix) from error
        chunk = rows.target
        if take < self.handle.chunk_size:
            last = np.repeat(chunk[-1:], self.handle.chunk_size - take, axis=0)
            chunk = np.concatenate([chunk, last])
        return int(rows.prompt[0]), rows.state[0], chunk


def open_dataset(
    workspace: Workspace,
    spec: DatasetSpec,
    stats: NormStats,
    chunk_size: int,
    action_mode: ActionMode,
    layout: Layout = "auto",
    *,
    val_episodes: float = 0,
    split: Split = "train",
) -> MemoryMappedDataset:
    """Open a dataset for training, checked.

    Args:
        workspace: where it is.
        spec: its registry entry.
        stats: statistics for this chunk size and mode.
        chunk_size: H.
        action_mode: absolute, or relative to the current state.
        layout: read the pack, the jsonl folder, or the pack when there is one (auto).
        val_episodes: episodes kept out of training: their number, or below 1 their share. Chosen by a hash of their
            names, so that the choice stays when others come or go.
        split: the samples trained on, those kept out, or all.

    Raises:
        DataError: not there, not complete, stale, or too few episodes; the text says what to run.
    """
    folder = spec.root(workspace) / PACK_DIR
    info, index = check_source(workspace, spec, layout)
    if info is None:
        assert index is not None and index.fingerprint is not None
        with aiming(workspace, spec.name):
            folder, info = frames_of(spec.root(workspace), spec, index, index.fingerprint)
        check_matches(folder, info, spec, index.fingerprint)
    sample.require_chunk(chunk_size, max(info.episode_frames, default=0), spec.name)
    _check_stats(stats, workspace, spec, info.source)
    handle = DatasetHandle(
        folder=folder,
        images=spec.images(workspace),
        crc32=info.frames_crc32,
        stats=stats,
        chunk_size=chunk_size,
        relative=action_mode == "relative",
        gripper_dims=spec.gripper_dims,
        episodes=_chosen(info, val_episodes, split),
        rebuild=info.rebuild,
        mend=_mend(workspace, spec, info),
    )
    dataset = MemoryMappedDataset(handle, info)
    dataset.verify()
    return dataset


def check_source(workspace: Workspace, spec: DatasetSpec, layout: Layout) -> tuple[PackInfo | None, Index | None]:
    """What a run would read: a pack (None: the jsonl folder) and, where that folder is there, its index; quickly.

    Raises:
        DataError: neither is there, or what is there is stale or of another dataset; the text says what to run.
    """
    folder = spec.root(workspace) / PACK_DIR
    packed = layout == "pack" or (layout == "auto" and folder.exists())
    alone = packed and not spec.jsonl(workspace).is_dir()
    index = None if alone else require_fresh(workspace, spec)
    info = read_pack(workspace, spec) if packed else None
    if info is not None:
        check_matches(folder, info, spec, index.fingerprint if index else None)
    return info, index


def held_out(names: Sequence[str], val_episodes: float) -> set[str]:
    """The episodes kept out of training: a number of them, or below 1 a share.

    Raises:
        DataError: none would be left to train on.
    """
    ranked = sorted(names, key=_hash)
    count = int(val_episodes) if val_episodes >= 1 else sum(_hash(name) < val_episodes for name in names)
    if names and count >= len(names):
        what = f"{count} episodes to keep out of {len(names)} leave none to train on"
        raise DataError(what, fix="Lower --data-config.val-episodes")
    return set(ranked[:count])


def _hash(name: str) -> float:
    """An episode's name as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") / 2**56


def _chosen(info: PackInfo, val_episodes: float, split: Split) -> tuple[int, ...] | None:
    if split == "all" or (split == "train" and val_episodes == 0):
        return None
    kept_out = held_out(info.episodes, val_episodes)
    return tuple(i for i, name in enumerate(info.episodes) if (name in kept_out) == (split == "val"))


def _mend(workspace: Workspace, spec: DatasetSpec, info: PackInfo) -> str:
    """What to do about an image that is missing or broken."""
    find = f"dm05-prep validate --deep --dataset-name {spec.name} {workspace.flag} lists all of that kind"
    if info.images == "blobs":
        return f"Replace it or remove its episode ({find}), then make the pack anew. {info.rebuild}"
    again = f"dm05-prep dataset --subset {spec.name} {workspace.flag} --force {SAME_SOURCE}"
    return f"Put a good one there ({find}), or run {again}"


def _check_stats(stats: NormStats, workspace: Workspace, spec: DatasetSpec, source: str) -> None:
    for name, vector, dims in (("state", stats.state, spec.state_dim), ("action", stats.action, spec.action_dim)):
        if len(vector.q01) != dims:
            raise DataError(f"the statistics have {len(vector.q01)} {name} dims, dataset {spec.name} has {dims}")
    if stats.source_fingerprint not in ("", source):
        command = f"dm05-prep norm-stats --dataset-name {stats.dataset} --chunk-size {stats.chunk_size}"
        what = f"the normalisation statistics of {stats.dataset} are of other episodes than those here"
        raise DataError(what, fix=f"Run {command} --action-mode {stats.action_mode} {workspace.flag} --force")
