"""Published sums against the sums of bytes."""

from __future__ import annotations

import hashlib
import threading
import zlib
from pathlib import Path

import crc32c
import pytest
from dm05_prep.sources.checks import Checks, Sums, file_differences
from hypothesis import given
from hypothesis import strategies as st


def all_sums(data: bytes) -> dict[str, str | int]:
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "md5": hashlib.md5(data).hexdigest(),
        "git_sha1": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
        "crc32": zlib.crc32(data),
        "crc32c": crc32c.crc32c(data),
    }


@given(pieces=st.lists(st.binary(max_size=100), max_size=8))
def test_any_cut_into_pieces_has_the_same_sums(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    checks = Checks(**all_sums(data))  # type: ignore[arg-type]
    sums = Sums(checks, len(data))
    for piece in pieces:
        sums.update(memoryview(piece))
    assert sums.differences() == [] and sums.position == len(data)


@pytest.mark.parametrize("name", ["sha256", "md5", "git_sha1", "crc32", "crc32c"])
def test_each_sum_notices_a_flipped_bit(tmp_path: Path, name: str) -> None:
    data = bytes(range(256)) * 100
    checks = Checks(**{name: all_sums(data)[name]})  # type: ignore[arg-type]
    path = tmp_path / "f"
    path.write_bytes(data)
    assert file_differences(path, len(data), checks, threading.Event()) == []
    path.write_bytes(data[:-1] + b"\0")
    (text,) = file_differences(path, len(data), checks, threading.Event()) or []
    assert name in text and str(all_sums(data)[name]) in text
    path.write_bytes(data + b"x")
    assert file_differences(path, len(data), checks, threading.Event()) == ["size is 25601, published is 25600"]


def test_a_check_can_be_stopped(tmp_path: Path) -> None:
    path, stop = tmp_path / "f", threading.Event()
    path.write_bytes(b"x")
    stop.set()
    assert file_differences(path, 1, Checks(crc32=1), stop) is None


def test_a_check_says_how_far_it_is(tmp_path: Path) -> None:
    path, told = tmp_path / "f", list[int]()
    with path.open("wb") as file:
        file.truncate(20 << 20)
    assert file_differences(path, 20 << 20, Checks(crc32=1), threading.Event(), progress=told.append)
    assert told == [8 << 20, 8 << 20, 4 << 20]


def test_the_name_that_git_gives() -> None:
    sums = Sums(Checks(git_sha1="ce013625030ba8dba906f756967f9e9ca394464a"), 6)
    sums.update(memoryview(b"hello\n"))
    assert sums.differences() == []
