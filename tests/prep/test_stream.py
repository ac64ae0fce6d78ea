"""The stream over parts: the same bytes as the joined file for any way of reading, and checksums of every part."""

from __future__ import annotations

import hashlib
import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.parts import PartSet
from dm05_prep.stream import EndOfStreamError, PartMismatchError, PartStream
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import parts_of, split, write_parts


def opened(folder: Path, parts: PartSet, start: int = 0, **options: int) -> PartStream:
    return PartStream(parts, lambda index: folder / parts.parts[index].name, start=start, **options)  # type: ignore[arg-type]


STEP = st.tuples(st.sampled_from(["take", "pieces", "skip"]), st.integers(0, 400))


@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(min_size=1, max_size=2000),
    size=st.integers(1, 700),
    start=st.integers(0, 2000),
    block=st.integers(1, 300),
    seek=st.integers(1, 300),
    sums=st.booleans(),
    steps=st.lists(STEP, max_size=20),
)
def test_any_way_of_reading(
    tmp_path_factory: pytest.TempPathFactory,
    data: bytes,
    size: int,
    start: int,
    block: int,
    seek: int,
    sums: bool,
    steps: list[tuple[str, int]],
) -> None:
    folder = tmp_path_factory.mktemp("p")
    pieces = split(data, size)
    parts = parts_of(write_parts(folder, pieces, sums=sums))
    at = min(start, len(data))
    stream = opened(folder, parts, at, block_bytes=block, seek_bytes=seek)
    try:
        for way, count in steps:
            due = data[at : at + count]
            if way == "take":
                assert stream.take(count) == due
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
        stream.settle()
        for done in stream.finished:
            right = hashlib.sha256(pieces[done.index]).hexdigest() if sums else f"{zlib.crc32(pieces[done.index]):08x}"
            assert done.digest == right or (done.digest is None and not sums)
    finally:
        stream.close()


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "crc32"])
@pytest.mark.parametrize("start", [0, 1500])
def test_published_checksums_are_compared(tmp_path: Path, algorithm: str, start: int) -> None:
    pieces = split(random.Random(0).randbytes(3500), 1000)
    parts = parts_of(write_parts(tmp_path, pieces))

    def published(harm: int) -> PartSet:
        """The parts with checksums, that of part ``harm`` being another one's."""
        named = []
        for index, part in enumerate(parts.parts):
            data = pieces[index] if index != harm else b"something else"
            value = zlib.crc32(data) if algorithm == "crc32" else hashlib.new(algorithm, data).hexdigest()
            named.append(replace(part, file=replace(part.file, **{algorithm: value})))  # type: ignore[arg-type]
        return replace(parts, parts=tuple(named))

    for harm in range(-1, len(pieces)):
        stream = opened(tmp_path, published(harm), start, block_bytes=300, seek_bytes=100)
        if harm >= start // 1000:
            with pytest.raises(PartMismatchError, match=f"part-{harm:03d}: its {algorithm} is") as caught:
                stream.skip(parts.size - start)
                stream.settle()
            assert caught.value.index == harm
        else:
            stream.skip(parts.size - start)
            stream.settle()
            assert all(done.digest for done in stream.finished)
        stream.close()


def test_long_gaps_are_not_read(tmp_path: Path) -> None:
    """A part with a hole of a TiB is passed over at once."""
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
    stream.settle()
    assert stream.finished[0].digest is None
    stream.close()


def test_a_part_that_cannot_be_opened(tmp_path: Path) -> None:
    parts = parts_of(write_parts(tmp_path, [b"12345"]))
    (tmp_path / "libero.tar.part-000").write_bytes(b"123")
    stream = opened(tmp_path, parts)
    with pytest.raises(PrepError, match="has 3 bytes instead of 5"):
        stream.take(1)
    stream.close()
