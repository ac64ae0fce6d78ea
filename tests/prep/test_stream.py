"""The stream over parts: the same bytes as the joined file for any way of reading."""

from __future__ import annotations

from pathlib import Path

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.parts import PartSet
from dm05_prep.stream import EndOfStreamError, PartStream
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import parts_of, split, write_parts


def opened(folder: Path, parts: PartSet, start: int = 0, block_bytes: int = 1 << 20) -> PartStream:
    return PartStream(parts, lambda index: folder / parts.parts[index].name, start=start, block_bytes=block_bytes)


STEP = st.tuples(st.sampled_from(["take", "pieces", "skip", "place"]), st.integers(0, 9000))


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 255),
    length=st.integers(1, 30_000),
    size=st.integers(100, 12_000),
    start=st.integers(0, 30_000),
    block=st.integers(1, 6000),
    steps=st.lists(STEP, max_size=20),
)
def test_any_way_of_reading(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    length: int,
    size: int,
    start: int,
    block: int,
    steps: list[tuple[str, int]],
) -> None:
    data = bytes((seed + index * 7 + index // 256) % 256 for index in range(length))
    folder = tmp_path_factory.mktemp("p")
    parts = parts_of(write_parts(folder, split(data, size)))
    at = min(start, len(data))
    stream = opened(folder, parts, at, block)
    try:
        for way, count in steps:
            due = data[at : at + count]
            if way == "take":
                assert stream.take(count) == due
            elif way == "place":
                found = stream.place(count)
                if found:
                    path, offset = found
                    assert path.read_bytes()[offset : offset + count] == due and len(due) == count
                due = b""
            elif len(due) < count:
                with pytest.raises(EndOfStreamError):
                    list(stream.pieces(count)) if way == "pieces" else stream.skip(count)
                break
            elif way == "pieces":
                assert b"".join(stream.pieces(count)) == due
            else:
                stream.skip(count)
            at += len(due)
            assert stream.offset == at
    finally:
        stream.close()


def test_gaps_are_not_read(tmp_path: Path) -> None:
    """A part with a hole of a TiB is passed over at once; every part is asked for, in order."""
    path = tmp_path / "libero.tar"
    with path.open("wb") as file:
        file.write(b"start")
        file.seek(1 << 40)
        file.write(b"end")
    parts = parts_of(write_parts(tmp_path, []))
    stream = opened(tmp_path, parts)
    assert stream.take(5) == b"start"
    stream.skip((1 << 40) - 5)
    assert stream.take(10) == b"end"
    stream.close()


def test_every_part_is_asked_for_in_order(tmp_path: Path) -> None:
    parts = parts_of(write_parts(tmp_path, split(bytes(100), 10)))
    asked = []

    def open_part(index: int) -> Path:
        asked.append(index)
        return tmp_path / parts.parts[index].name

    stream = PartStream(parts, open_part, start=15)
    stream.take(1)
    stream.skip(50)
    stream.skip(34)
    assert stream.take(1) == b"" and asked == list(range(1, 10))
    stream.close()


def test_a_part_that_cannot_be_opened(tmp_path: Path) -> None:
    parts = parts_of(write_parts(tmp_path, [b"12345"]))
    (tmp_path / "libero.tar.part-000").write_bytes(b"123")
    stream = opened(tmp_path, parts)
    with pytest.raises(PrepError, match="has 3 bytes instead of 5"):
        stream.take(1)
    stream.close()
