"""JSON as the contract means it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dm05_schemas.errors import DataError
from dm05_schemas.files import replace_file
from dm05_schemas.strict_json import JsonProblem, parse, read_object
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(VALUES)
def test_good_json_is_read_as_it_is(value: object) -> None:
    assert parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "duplicate-key"),
        (b"[NaN]", "not-finite"),
        (b"-1e400", "not-finite"),
        (b"1" + b"0" * 400, "not-finite"),
        (b'"\xff"', "bad-utf8"),
        (b"\xef\xbb\xbf1", "bad-json"),
        (b"", "bad-json"),
        (b"[1,]", "bad-json"),
        (b"01", "bad-json"),
        (b'"\\ud800"', "bad-json"),
        (b"[" * 100_000, "bad-json"),
        (b'"\x01"', "bad-json"),
    ],
)
def test_what_is_refused(raw: bytes, kind: str) -> None:
    with pytest.raises(JsonProblem) as caught:
        parse(raw)
    assert caught.value.kind == kind


def test_a_file_must_hold_an_object(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    replace_file(path, b'{"a": 1}')
    assert read_object(path) == {"a": 1} and [item.name for item in tmp_path.iterdir()] == ["x.json"]
    replace_file(path, b"[]")
    with pytest.raises(DataError) as caught:
        read_object(path)
    assert str(caught.value) == f"{path}: must hold a JSON object"
