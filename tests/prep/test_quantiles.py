"""Order statistics by bits against sorting."""

from __future__ import annotations

import numpy as np
from dm05_prep.columns import frame_weights
from dm05_prep.quantiles import Selection, between, key_value, ordered_keys, rank_of
from dm05_schemas.sample import chunk_rows
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
COLUMN = hnp.arrays(np.float32, st.integers(1, 60), elements=FLOATS)


@given(COLUMN)
def test_keys_have_the_order_of_the_values(column: np.ndarray) -> None:
    keys = ordered_keys(column)
    np.testing.assert_array_equal(np.sort(column) + np.float32(0), [key_value(int(key)) for key in np.sort(keys)])


@given(COLUMN, st.lists(st.floats(0, 1), min_size=1, max_size=4), st.data())
def test_weighted_quantiles_equal_those_of_the_repeated_column(column, quantiles, data) -> None:
    weights = data.draw(hnp.arrays(np.int64, len(column), elements=st.integers(1, 9)))
    cuts = np.sort(data.draw(hnp.arrays(np.int64, 2, elements=st.integers(0, len(column)))))
    whole = np.repeat(column, weights)
    ends = [rank_of(quantile, len(whole)) for quantile in quantiles]
    selection = Selection()
    blocks = list(zip(np.split(column, cuts), np.split(weights, cuts), strict=True))
    for values, counts in blocks:
        selection.first(ordered_keys(values), counts)
    selection.narrow([rank for low, high, _ in ends for rank in (low, high)])
    for values, counts in blocks:
        selection.second(ordered_keys(values), counts)
    found = selection.values()
    got = [between(found[2 * i], found[2 * i + 1], weight) for i, (_, _, weight) in enumerate(ends)]
    np.testing.assert_array_equal(got, np.quantile(whole.astype(np.float64), quantiles))


@given(st.lists(st.tuples(st.integers(2, 30), st.booleans()), min_size=1, max_size=5), st.integers(1, 40))
def test_weights_count_the_chunks_that_hold_a_frame(episodes: list[tuple[int, bool]], chunk_size: int) -> None:
    lengths = np.array([length for length, _ in episodes])
    from_states = np.array([states for _, states in episodes])
    counted = [
        np.bincount(chunk_rows(length, np.arange(length - 1), chunk_size, states).ravel(), minlength=length)
        for length, states in episodes
    ]
    np.testing.assert_array_equal(frame_weights(lengths, from_states, chunk_size), np.concatenate(counted))
