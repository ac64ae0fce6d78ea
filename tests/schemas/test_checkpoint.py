"""Tensors of the released checkpoint, and headers of safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from dm05_schemas.checkpoint import expected_tensors, read_header
from dm05_schemas.errors import DataError
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parent.parent / "golden"


def test_every_tensor_of_the_released_checkpoint_and_nothing_else() -> None:
    golden = json.loads((GOLDEN / "checkpoint_tensors.json").read_text())
    expected = expected_tensors(json.loads((GOLDEN / "dm05_config.json").read_text()))
    assert expected == {name: tuple(shape) for name, shape in golden["tensors"].items()}
    assert list(expected) == sorted(expected) and len(expected) == golden["count"]


def test_the_tiny_checkpoint() -> None:
    header = read_header(GOLDEN / "tiny_dm05/model.safetensors")
    expected = expected_tensors(json.loads((GOLDEN / "tiny_dm05/config.json").read_text()))
    assert {name: entry.shape for name, entry in header.items()} == expected
    assert {entry.dtype for entry in header.values()} == {"F32"}


def test_a_config_without_a_size() -> None:
    config = json.loads((GOLDEN / "dm05_config.json").read_text())
    del config["action_config"]["head_dim"]
    with pytest.raises(DataError) as caught:
        expected_tensors(config)
    assert str(caught.value) == "config.json has no usable 'head_dim'. dm05-prep model fetches the released one"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.arange(4, dtype=np.int64), "c": np.zeros(0)}, path)
    return path


def test_offsets_are_those_of_the_file(path: Path) -> None:
    header = read_header(path)
    assert header["a"].shape == (2, 3) and header["c"].shape == (0,)
    data = path.read_bytes()
    assert data[header["b"].start : header["b"].end] == np.arange(4, dtype=np.int64).tobytes()


def rewrite(path: Path, header: object, body: bytes = b"\0" * 8) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN: list[tuple[object, bytes, str]] = [
    ({"a": entry()}, b"\0" * 7, "is cut short: 76 of 77 bytes"),
    ({"a": entry()}, b"\0" * 9, "has 1 bytes too many"),
    ({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12, "has a gap or an overlap before b"),
    ({"a": entry(offsets=(8, 16))}, b"\0" * 16, "has a gap or an overlap before a"),
    ({"a": entry(shape=(3,))}, b"\0" * 8, "has a broken safetensors header: a: 8 bytes do not hold F32 [3]"),
    ({"a": entry(shape=(-2,))}, b"", "has a broken safetensors header: a: shape and offsets must be whole numbers"),
    ({"a": entry(dtype="F31")}, b"", "has a broken safetensors header: a: unknown dtype 'F31'"),
    (b'{"a": 1, "a": 2}', b"", "has a broken safetensors header: a name stands twice"),
]


@pytest.mark.parametrize(("header", "body", "text"), BROKEN)
def test_broken_files(path: Path, header: object, body: bytes, text: str) -> None:
    rewrite(path, header, body)
    with pytest.raises(DataError) as caught:
        read_header(path)
    assert str(caught.value) == f"{path}: {text}. dm05-prep model fetches it again"


@pytest.mark.parametrize("data", [b"", b"<html>", b"<!DOCTYPE html><html>", struct.pack("<Q", 2**40) + b"{}"])
def test_files_of_another_kind(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"is not a safetensors file|broken safetensors header"):
        read_header(path)


def test_every_cut_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            read_header(path)
