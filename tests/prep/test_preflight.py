"""What is told before a byte is written."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.preflight import check_parts, check_room, measure
from dm05_prep.room import Room, full_error, is_full, room_at, shortage
from dm05_prep.sources.local import LocalSource
from tars import HOME, SUBSET, closed, header, honest, member, parts_of, split, write_parts


def paths(source: LocalSource) -> list[Path]:
    return [source.path / part.name for part in parts_of(source).parts]


def refused(source: LocalSource) -> str:
    with pytest.raises(PrepError) as caught:
        check_parts(parts_of(source), paths(source))
    return str(caught.value)


FILES = {f"{HOME}{index}": random.Random(index).randbytes(3000) for index in range(20)}
PARTS = split(honest(FILES), 16_000)


def test_sound_parts(tmp_path: Path) -> None:
    source = write_parts(tmp_path, PARTS)
    check_parts(parts_of(source), paths(source))


@pytest.mark.parametrize("cut", [1, 512, 5000, 10240, 12345])
def test_a_last_part_that_is_cut(tmp_path: Path, cut: int) -> None:
    source = write_parts(tmp_path, split(honest(FILES)[:-cut], 16_000))
    if cut < 8192 and cut % 512 == 0:  # the padding after the end mark is no loss
        check_parts(parts_of(source), paths(source))
    else:
        assert "the archive ends without its end mark" in refused(source)


def test_a_last_part_that_is_not_there(tmp_path: Path) -> None:
    assert "a part after it is missing" in refused(write_parts(tmp_path, PARTS[:-1]))


def test_a_first_part_that_is_not_there(tmp_path: Path) -> None:
    """The others may well be numbered from 1 on; what is told is not where the end mark would be."""
    source = write_parts(tmp_path, split(honest(FILES), 16_100))
    (tmp_path / "libero.tar.part-000").unlink()
    said = refused(source)
    assert said.startswith("libero.tar.part-001: byte 0: ") and "the first part is missing" in said


@pytest.mark.parametrize("index", [0, 2, len(PARTS) - 1])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n", "large-file pointer"),
        (b"\n<!DOCTYPE html>\n<html>", "web page"),
        (b'{"error": "not found"}', "error message"),
    ],
)
def test_something_in_place_of_a_part(tmp_path: Path, index: int, text: bytes, why: str) -> None:
    fakes = list(PARTS)
    fakes[index] = text.ljust(len(fakes[index]))
    refusal = refused(write_parts(tmp_path, fakes))
    assert why in refusal and f"libero.tar.part-{index:03d}" in refusal


def test_a_hole_in_a_part(tmp_path: Path) -> None:
    archive = honest({HOME + "big": random.Random(0).randbytes(4 << 20)})
    source = write_parts(tmp_path, split(archive, 3 << 20))
    path = tmp_path / "libero.tar.part-000"
    with path.open("r+b") as file:
        file.truncate(1 << 20)
        file.truncate(3 << 20)
    assert "2.0 MiB were never written" in refused(source) and "part-000: byte 1048576" in refused(source)
    write_parts(tmp_path, [path.read_bytes(), archive[3 << 20 :]], sums=True)
    with path.open("r+b") as file:
        file.truncate(1 << 20)
        file.truncate(3 << 20)
    check_parts(parts_of(source), paths(source))  # the published checksum will tell


def test_which_is_short() -> None:
    assert shortage(Room(bytes=5, inodes=5), Room(bytes=5, inodes=5)) is None
    assert shortage(Room(bytes=5, inodes=5), Room(bytes=5, inodes=None)) is None
    assert shortage(Room(bytes=2 << 30, inodes=1), Room(bytes=1 << 30, inodes=0)) == (
        "no space: 2.0 GiB are needed, 1.0 GiB are free"
    )
    assert shortage(Room(bytes=1, inodes=7), Room(bytes=9, inodes=6)) == (
        "no inodes: 7 files and folders are needed, 6 are free"
    )


def test_room_for_what_is_wanted_alone(tmp_path: Path) -> None:
    """An archive larger than any disk is no obstacle when the dataset in it is small."""
    huge = 1 << 43  # 8 TiB of another subset, as a file with a hole
    archive = tmp_path / "p" / "libero.tar"
    archive.parent.mkdir()
    size_field = b"\x80" + huge.to_bytes(11, "big")
    with archive.open("wb") as file:
        file.write(member(HOME + "a", b"1" * 5000) + header(b"libero/other/huge", raw_size=size_field))
        file.seek(huge, 1)
        file.write(closed(member(HOME + "b", b"2")))
    source = LocalSource(archive.parent)
    parts = parts_of(source)
    counted = measure(parts, [archive], SUBSET)
    assert counted == Room(bytes=8192 + 4096, inodes=2)
    check_room(
        parts,
        folder=tmp_path / "w/data",
        parts_folder=tmp_path / "w/parts",
        copied_bytes=0,
        remaining_bytes=parts.size,
        measure=lambda: counted,
    )
    with pytest.raises(PrepError, match=r"no space: 8\.0 TiB are needed, .* are free\. Free some"):
        check_room(
            parts,
            folder=tmp_path / "w/data",
            parts_folder=tmp_path / "w/parts",
            copied_bytes=0,
            remaining_bytes=parts.size,
            measure=lambda: measure(parts, [archive], ("libero", "other")),
        )
    with pytest.raises(PrepError, match="no space"):
        check_room(
            parts,
            folder=tmp_path / "w/data",
            parts_folder=tmp_path / "w/parts",
            copied_bytes=huge,
            remaining_bytes=parts.size,
            measure=None,
        )
    assert not (tmp_path / "w").exists()


def test_a_full_disk_is_told_apart(tmp_path: Path) -> None:
    assert is_full(OSError(28, "No space left on device")) and not is_full(OSError(13, "Permission denied"))
    text = str(full_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path))
    assert text.startswith(f"{tmp_path}: no space left") and "goes on from where it stopped" in text
    named = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "other" / "file"))
    assert str(full_error(named, Path("/"))).startswith(f"{tmp_path}: this user's share of the disk (quota) is used up")
    assert room_at(tmp_path / "not" / "there") is not None
