"""What a sample is."""

from __future__ import annotations

import numpy as np
import pytest
from dm05_schemas.errors import DataError
from dm05_schemas.sample import action_chunk, denormalise, normalise, pad_action, relative
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

EPISODE = np.arange(12, dtype=np.float32).reshape(6, 2)


def test_chunks_repeat_the_last_frame() -> None:
    assert action_chunk(EPISODE, 4, 3, False).tolist() == [[8, 9], [10, 11], [10, 11]]
    assert action_chunk(EPISODE, 4, 3, True).tolist() == [[10, 11]] * 3
    assert action_chunk(EPISODE, 0, 2, True).tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize("from_states", [False, True])
def test_leading_dims(from_states: bool) -> None:
    times = np.array([[0, 1], [3, 4]])
    chunks = action_chunk(EPISODE, times, 4, from_states)
    assert chunks.shape == (2, 2, 4, 2) and chunks.dtype == np.float32
    for place in np.ndindex(2, 2):
        np.testing.assert_array_equal(chunks[place], action_chunk(EPISODE, times[place], 4, from_states))
    state = EPISODE[times]
    moved = relative(chunks, state, [1])
    for place in np.ndindex(2, 2):
        np.testing.assert_array_equal(moved[place], relative(chunks[place], state[place], [1]))
        np.testing.assert_array_equal(moved[place][:, 1], chunks[place][:, 1])
        np.testing.assert_array_equal(moved[place][:, 0], chunks[place][:, 0] - state[place][0])


def test_relative_needs_equal_dims_and_leaves_its_input() -> None:
    state = EPISODE[0].copy()
    relative(EPISODE[:2], state, [0])
    np.testing.assert_array_equal(state, EPISODE[0])
    with pytest.raises(DataError) as caught:
        relative(EPISODE[:2], np.zeros(3, np.float32), [])
    assert "here are 2 action and 3 state dims. Use --action-mode absolute (dm05-train: " in str(caught.value)


FLOATS = hnp.arrays(np.float32, (5, 3), elements=st.floats(-100, 100, width=32))


@given(FLOATS, st.floats(-10, 10, width=32), st.floats(0, 10, width=32))
def test_there_and_back(x: np.ndarray, low: float, gap: float) -> None:
    q01, q99 = np.array([low, low, 0.0]), np.array([low + gap, low + gap, 0.0])
    y = normalise(x, q01, q99)
    assert y.dtype == np.float32 and (y >= -1.0001).all() and (y <= 1.0001).all()
    assert (y[:, 2] == 0).all()
    back = denormalise(y, q01, q99)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, np.clip(x, np.float32(q01), np.float32(q99)), atol=2e-5)


def test_padding() -> None:
    chunk = action_chunk(EPISODE, np.arange(3), 4, False)
    padded, mask = pad_action(chunk, 5)
    assert padded.shape == mask.shape == (3, 4, 5) and padded.dtype == mask.dtype == np.float32
    np.testing.assert_array_equal(padded[..., :2], chunk)
    assert not padded[..., 2:].any()
    assert mask[..., :2].all() and not mask[..., 2:].any()
    with pytest.raises(DataError):
        pad_action(chunk, 1)
