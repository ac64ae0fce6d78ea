"""What a sample is: the action chunk, relative mode, normalisation. NumPy, float32, any number of leading dims.

Letters: n frames of an episode, H chunk size, A action dims, S state dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dm05_schemas.errors import DataError

Float32 = NDArray[np.float32]

RANGE_EPS = np.float32(1e-6)
ALWAYS_ALLOWED = 100
"""Chunks of this length are taken from episodes of any length."""
# What errors say that both commands meet, whose flags are called differently.
USE_ABSOLUTE = "Use --action-mode absolute (dm05-train: --data-config.action-mode absolute)"
CHUNK_FLAGS = "--chunk-size (dm05-train: --model-config.chunk-size)"


def require_chunk(chunk_size: int, longest: int, dataset: str) -> None:
    """That chunks hold more than repetitions of the last row: refused when longer than any episode (and than most use).

    Args:
        chunk_size: H.
        longest: frames of the longest episode.
        dataset: its name, for the text.

    Raises:
        DataError: they are longer.
    """
    most = max(longest, ALWAYS_ALLOWED)
    if chunk_size > most:
        what = f"a chunk of {chunk_size:,} actions is longer than any episode of {dataset}"
        raise DataError(f"{what}: the longest has {longest:,} frames", fix=f"Give {CHUNK_FLAGS} {most} or less")


def chunk_rows(frames: int, t: ArrayLike, chunk_size: int, from_states: bool) -> NDArray[np.int64]:
    """Frame numbers [..., H] that the chunks at frames ``t`` [...] hold; past the end the last frame repeats."""
    start = np.asarray(t, dtype=np.int64)[..., None] + (1 if from_states else 0)
    rows: NDArray[np.int64] = np.minimum(start + np.arange(chunk_size, dtype=np.int64), frames - 1)
    return rows


def action_chunk(episode: Float32, t: ArrayLike, chunk_size: int, from_states: bool) -> Float32:
    """The action chunks at frames ``t`` [...] of one episode.

    Args:
        episode: [n, A] the actions, or the states when the episode has no actions.
        t: frame number(s), 0 .. n-2.
        chunk_size: H.
        from_states: True when ``episode`` holds states; the targets are then the following ones.

    Returns:
        [..., H, A]: rows t .. t+H-1 of the actions, or t+1 .. t+H of the states; the last row repeats past the end.
    """
    return episode[chunk_rows(len(episode), t, chunk_size, from_states)]


def relative(chunk: Float32, state: Float32, gripper_dims: Sequence[int]) -> Float32:
    """Chunks [..., H, A] minus the current states [..., A]; ``gripper_dims`` stay absolute.

    Raises:
        DataError: state and action have different dims.
    """
    if chunk.shape[-1] != state.shape[-1]:
        dims = f"{chunk.shape[-1]} action and {state.shape[-1]} state dims"
        raise DataError(f"relative mode needs as many action as state dims, here are {dims}", fix=USE_ABSOLUTE)
    base = np.array(state, dtype=np.float32)
    base[..., list(gripper_dims)] = 0
    return np.subtract(chunk, base[..., None, :], dtype=np.float32)


def normalise(x: ArrayLike, q01: ArrayLike, q99: ArrayLike) -> Float32:
    """``x`` [..., D] clipped to [q01, q99] and scaled to -1 .. 1; a dim with q01 = q99 = 0 gives 0."""
    low, high = np.asarray(q01, dtype=np.float32), np.asarray(q99, dtype=np.float32)
    clipped = np.clip(np.asarray(x, dtype=np.float32), low, high)
    scaled = (clipped - low) / (high - low + RANGE_EPS) * np.float32(2) - np.float32(1)
    return np.where(_unused(low, high), np.float32(0), scaled)


def denormalise(y: ArrayLike, q01: ArrayLike, q99: ArrayLike) -> Float32:
    """The inverse of :func:`normalise` inside the quantiles; a dim with q01 = q99 = 0 gives 0."""
    low, high = np.asarray(q01, dtype=np.float32), np.asarray(q99, dtype=np.float32)
    scaled = (np.asarray(y, dtype=np.float32) + np.float32(1)) / np.float32(2) * (high - low + RANGE_EPS) + low
    return np.where(_unused(low, high), np.float32(0), scaled)


def pad_action(chunk: Float32, dim: int = 32) -> tuple[Float32, Float32]:
    """Chunks [..., H, A] padded with 0 to [..., H, dim], and the mask of that shape: 1 on the real dims.

    Raises:
        DataError: A is more than ``dim``.
    """
    real = chunk.shape[-1]
    if real > dim:
        raise DataError(f"an action has {real} dims, the model takes at most {dim}")
    shape = (*chunk.shape[:-1], dim)
    padded, mask = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    padded[..., :real] = chunk
    mask[..., :real] = 1
    return padded, mask


def _unused(low: Float32, high: Float32) -> NDArray[np.bool_]:
    unused: NDArray[np.bool_] = (low == 0) & (high == 0)
    return unused
