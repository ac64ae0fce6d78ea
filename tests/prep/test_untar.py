"""The tar reader: every form that honest tools write, and every damage told with its place."""

from __future__ import annotations

import io
import random
import subprocess
import tarfile
from pathlib import Path

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.stream import PartStream
from dm05_prep.untar import DamageError, Member, read_members
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import closed, header, honest, member, parts_of, some_files, split, write_parts


def read(folder: Path, archive: bytes, size: int | None = None) -> list[tuple[Member, bytes]]:
    """Members and their data."""
    source = write_parts(folder, split(archive, size or len(archive)))
    parts = parts_of(source)
    stream = PartStream(parts, lambda index: folder / parts.parts[index].name, block_bytes=4096)
    try:
        return [(found, b"".join(stream.pieces(found.size))) for found in read_members(stream)]
    finally:
        stream.close()


def damaged(folder: Path, archive: bytes, size: int | None = None) -> str:
    with pytest.raises(DamageError) as caught:
        read(folder, archive, size)
    return str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["ustar", "gnu", "pax"]), st.integers(0, 2**32), st.integers(1, 40))
def test_as_tarfile_reads_it(tmp_path_factory: pytest.TempPathFactory, form: str, seed: int, pieces: int) -> None:
    files = {name: data for name, data in some_files(random.Random(seed)).items() if form != "ustar" or len(name) < 90}
    archive = honest(files, form)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        due = [(info.name, info.size, info.isdir()) for info in tar]
    found = read(tmp_path_factory.mktemp("parts"), archive, max(1, -(-len(archive) // pieces)))
    assert [(m.name.decode().rstrip("/"), m.size, m.kind == "folder") for m, _ in found] == due
    assert {m.name.decode(): data for m, data in found if m.kind == "file"} == files


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_as_gnu_tar_writes_it(tmp_path: Path, form: str) -> None:
    source = tmp_path / "libero"
    (source / "deep" / ("d" * 70)).mkdir(parents=True)
    (source / "a").write_bytes(b"hello")
    (source / "deep" / ("d" * 70) / ("f" * (10 if form == "v7" else 60))).write_bytes(b"x" * 1000)
    (source / "hard").hardlink_to(source / "a")
    (source / "soft").symlink_to("a")
    subprocess.run(["tar", f"--format={form}", "-cf", "a.tar", "libero"], cwd=tmp_path, check=True)
    found = {
        m.name.decode().rstrip("/"): (m, data) for m, data in read(tmp_path / "p", (tmp_path / "a.tar").read_bytes())
    }
    assert sorted(found) == sorted(path.relative_to(tmp_path).as_posix() for path in [source, *source.rglob("*")])
    assert {found[name][0].kind for name in ("libero/a", "libero/hard")} == {"file", "hard link"}
    assert (found["libero/soft"][0].kind, found["libero/soft"][0].target) == ("symbolic link", b"a")
    assert b"x" * 1000 in [data for _, data in found.values()]


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_files_are_told_apart_and_passed_over(tmp_path: Path, form: str) -> None:
    source = tmp_path / "libero"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        for place in range(60):  # more pieces than fit into one old header
            file.seek(place * 100_000)
            file.write(b"data")
        file.truncate(10_000_000)
    (source / "z-after").write_bytes(b"still found")
    subprocess.run(["tar", f"--format={form}", "-Scf", "a.tar", "libero"], cwd=tmp_path, check=True)
    found = {m.name: m.kind for m, _ in read(tmp_path / "p", (tmp_path / "a.tar").read_bytes())}
    assert found[b"libero/sparse"] == "sparse file" and found[b"libero/z-after"] == "file"


def test_every_kind_has_its_words(tmp_path: Path) -> None:
    flags = {b"1": "hard link", b"2": "symbolic link", b"3": "character device", b"4": "block device", b"6": "FIFO"}
    archive = closed(*(member(b"x" + flag, flag=flag) for flag in flags), member("y", b"data", b"Q"))
    kinds = [m.kind for m, _ in read(tmp_path, archive)]
    assert kinds == [*flags.values(), "member of unknown type b'Q'"]


def test_sizes_in_base_256_and_prefixes(tmp_path: Path) -> None:
    raw = header(b"name", raw_size=b"\x80" + (5).to_bytes(11, "big"), prefix=b"some/prefix") + b"12345" + bytes(507)
    [(found, data)] = read(tmp_path, closed(raw))
    assert (found.name, data) == (b"some/prefix/name", b"12345")


@pytest.mark.parametrize(
    ("raw_size", "why"),
    [
        (b"\x80" + (1 << 60).to_bytes(11, "big"), f"claims {1 << 60} bytes"),
        (b"77777777777\0", "claims 8589934591 bytes"),
        (b"\xff" * 12, "no number"),
        (b"12345x\0\0\0\0\0\0", "no number"),
        (b"-0000000012\0", "no number"),
    ],
)
def test_absurd_sizes(tmp_path: Path, raw_size: bytes, why: str) -> None:
    text = damaged(tmp_path, closed(member("a", b"x" * 600), header(b"big", raw_size=raw_size)))
    assert why in text and "libero.tar.part-000: byte 1536: " in text


@pytest.mark.parametrize("data", [b"9999 path=x\n", b"x path=y\n", b"11 pathxxx\n", b"12 path=abc ", b"0 a=b\n"])
def test_damaged_pax_headers(tmp_path: Path, data: bytes) -> None:
    assert "PAX header is damaged" in damaged(tmp_path, closed(member("pax", data, b"x"), member("a", b"1")))


def test_extensions_that_ask_too_much(tmp_path: Path) -> None:
    text = damaged(tmp_path / "1", closed(header(b"L", 1 << 30, b"L")))
    assert "extension header of 1073741824 bytes" in text
    renamed = closed(member("g", b"14 path=other\n", b"g"), member("a", b"1"))
    assert "global header" in damaged(tmp_path / "2", renamed)
    harmless = closed(member("g", b"18 comment=abcdef\n", b"g"), member("a", b"1"))
    assert [m.name for m, _ in read(tmp_path / "3", harmless)] == [b"a"]
    sized = closed(member("pax", b"12 size=-5x\n", b"x"), member("a", b"1"))
    assert "no number" in damaged(tmp_path / "4", sized)


class TestEnd:
    """An archive ends with its end mark and nothing else."""

    body = member("a", b"x" * 3000)

    @pytest.mark.parametrize("blocks", [1, 2, 20, 64, 126, 2048])
    def test_records_of_any_usual_size(self, tmp_path: Path, blocks: int) -> None:
        assert len(read(tmp_path, closed(self.body, record=512 * blocks))) == 1

    def test_a_hole_at_the_end(self, tmp_path: Path) -> None:
        text = damaged(tmp_path, self.body + bytes(123 * 512))
        assert "zero bytes at the end" in text and "byte 3584" in text

    @pytest.mark.parametrize(
        ("cut", "why"), [(0, "without its end mark"), (512, "inside its end mark"), (700, "inside its")]
    )
    def test_cut_at_the_end(self, tmp_path: Path, cut: int, why: str) -> None:
        assert why in damaged(tmp_path, self.body + bytes(cut))

    @pytest.mark.parametrize("left", [1, 511, 512, 513, 3000, 3500, 3583])
    def test_cut_anywhere(self, tmp_path: Path, left: int) -> None:
        text = damaged(tmp_path, self.body[:left])
        assert "ends inside" in text or "are left in the archive" in text

    def test_zeros_in_the_middle(self, tmp_path: Path) -> None:
        text = damaged(tmp_path, closed(self.body, bytes(2048), self.body))
        assert "zeros where a member must start" in text and "goes on at libero.tar.part-000: byte" in text
        assert "zeros where a member must start" in damaged(tmp_path, closed(self.body, bytes(512), self.body))


class TestDamage:
    """Where it is and whose part it is."""

    def test_a_flipped_header(self, tmp_path: Path) -> None:
        archive = bytearray(closed(*(member(f"file{i}", bytes([i]) * 2000) for i in range(8))))
        archive[2560 * 3 + 20] ^= 4
        text = damaged(tmp_path, bytes(archive), 2560 * 2)
        assert text.startswith("libero.tar.part-001: byte 2560: no member starts where one must")

    def test_swapped_parts(self, tmp_path: Path) -> None:
        parts = split(closed(*(member(f"f{i}", random.Random(i).randbytes(700 * i)) for i in range(1, 9))), 3000)
        parts[2], parts[4] = parts[4], parts[2]
        text = damaged(tmp_path, b"".join(parts), 3000)
        assert "libero.tar.part-002" in text and "does not continue libero.tar.part-001" in text

    def test_something_else(self, tmp_path: Path) -> None:
        assert "no tar archive starts here" in damaged(tmp_path / "1", random.Random(0).randbytes(5000))
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n"
        assert "large-file pointer" in damaged(tmp_path / "2", pointer.ljust(512, b"\n"))

    def test_the_part_shrinks_while_it_is_read(self, tmp_path: Path) -> None:
        archive = closed(member("a", b"x" * 9000))
        source = write_parts(tmp_path, [archive])
        parts = parts_of(source)
        (tmp_path / parts.parts[0].name).write_bytes(archive[:100])
        stream = PartStream(parts, lambda index: tmp_path / parts.parts[index].name)
        with pytest.raises(PrepError, match=f"has 100 bytes instead of {len(archive)}"):
            list(read_members(stream))
        stream.close()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_no_damage_gives_a_traceback_or_a_wrong_file(
    tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject
) -> None:
    """Flips anywhere: either told, or the members are those of the archive but for bytes of data or of a name."""
    files = some_files(random.Random(seed), 6, 900)
    archive = bytearray(honest(files, "gnu"))
    for _ in range(data.draw(st.integers(1, 3))):
        archive[data.draw(st.integers(0, len(archive) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = read(tmp_path_factory.mktemp("parts"), bytes(archive), 2000)
    except DamageError as error:
        assert "libero.tar.part-" in str(error)
    else:
        assert [m.size for m, _ in found if m.kind == "file"] == [len(content) for content in files.values()]
