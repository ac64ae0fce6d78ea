"""Checksums of parts: what is published is compared, all else gets a CRC-32, and nothing is read that is gone."""

from __future__ import annotations

import hashlib
import random
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from dm05_prep import checksums
from dm05_prep.checksums import Checksums, PartMismatchError, check_part
from dm05_prep.errors import PrepError
from dm05_prep.parts import PartSet
from tars import parts_of, split, write_parts

PIECES = split(random.Random(0).randbytes(3500), 1000)


def with_sums(parts: PartSet, algorithm: str, harm: int = -1) -> PartSet:
    """The parts as a source publishes them, the checksum of part ``harm`` being another one's."""
    named = []
    for index, part in enumerate(parts.parts):
        data = PIECES[index] if index != harm else b"something else"
        value = zlib.crc32(data) if algorithm == "crc32" else hashlib.new(algorithm, data).hexdigest()
        named.append(replace(part, file=replace(part.file, **{algorithm: value})))  # type: ignore[arg-type]
    return replace(parts, parts=tuple(named))


def path_of(folder: Path, parts: PartSet, index: int) -> Path:
    return folder / parts.parts[index].name


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "crc32"])
@pytest.mark.parametrize("harm", [-1, 0, 2, 3])
def test_published_ones_are_compared(tmp_path: Path, algorithm: str, harm: int) -> None:
    parts = with_sums(parts_of(write_parts(tmp_path, PIECES)), algorithm, harm)
    sums = Checksums(parts, verified=False)
    for index in range(4):
        sums.begin(index, path_of(tmp_path, parts, index))
        if harm == index:
            with pytest.raises(PartMismatchError, match=f"part-{harm:03d}: its {algorithm} is") as caught:
                sums.before(index + 1)
            assert caught.value.index == harm
            with pytest.raises(PartMismatchError):
                check_part(parts.parts[index].file, path_of(tmp_path, parts, index), index)
            break
        digests = sums.before(index + 1)
        assert len(digests) == index + 1 and {digest.algorithm for digest in digests} == {algorithm}
        check_part(parts.parts[index].file, path_of(tmp_path, parts, index), index)
    sums.close()


def test_without_any_the_crc_is_kept(tmp_path: Path) -> None:
    parts = parts_of(write_parts(tmp_path, PIECES))
    for verified in (False, True):
        sums = Checksums(parts, verified=verified, torn=1)
        for index in range(4):
            sums.begin(index, path_of(tmp_path, parts, index))
        assert [(digest.index, digest.digest) for digest in sums.before(3)] == [
            (index, f"{zlib.crc32(PIECES[index]):08x}") for index in (0, 2)
        ]
        assert sums.before(4)[-1].index == 3 and sums.position() == float("inf")
        sums.close()


def test_verified_ones_are_taken_over(tmp_path: Path) -> None:
    parts = with_sums(parts_of(write_parts(tmp_path, PIECES)), "sha256")
    sums = Checksums(parts, verified=True)
    for index in range(4):
        sums.begin(index, tmp_path / "nothing is read")
    assert [digest.digest for digest in sums.before(4)] == [hashlib.sha256(piece).hexdigest() for piece in PIECES]
    assert sums.position() == float("inf")
    sums.close()


def test_closing_stops_at_once(tmp_path: Path) -> None:
    path = tmp_path / "libero.tar"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    parts = parts_of(write_parts(tmp_path, []))
    sums = Checksums(parts, verified=False)
    sums.begin(0, path)
    while not sums.position():
        pass
    assert 0 < sums.position() < 1 << 40
    sums.close()


@pytest.mark.parametrize("algorithm", ["sha256", "md5", "crc32"])
def test_large_parts_are_summed_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.setattr(checksums, "_ALONE_BYTES", 500)
    for harm in (-1, 1):
        parts = with_sums(parts_of(write_parts(tmp_path / str(harm), PIECES)), algorithm, harm)
        sums = Checksums(parts, verified=False)
        for index in range(4):
            sums.begin(index, path_of(tmp_path / str(harm), parts, index))
        if harm < 0:
            assert [digest.algorithm for digest in sums.before(4)] == [algorithm] * 4
        else:
            with pytest.raises(PartMismatchError, match=f"part-001: its {algorithm} is"):
                sums.before(4)
        sums.close()


def test_a_process_that_was_killed_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_ALONE_BYTES", 500)
    parts = parts_of(write_parts(tmp_path, PIECES))
    sums = Checksums(parts, verified=False)
    sums.begin(0, path_of(tmp_path, parts, 0))
    assert len(sums.before(1)) == 1 and sums._helper
    sums._helper._process.kill()
    sums.begin(1, path_of(tmp_path, parts, 1))
    with pytest.raises(PrepError, match=r"computes checksums .* killed by signal 9"):
        sums.before(2)
    sums.close()
