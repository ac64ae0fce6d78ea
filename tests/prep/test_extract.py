"""The engine on real files: what is written, what is refused, where damage is, and that work goes on after it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import stat
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from dm05_prep.errors import PrepError
from dm05_prep.extract import ExtractOptions
from dm05_prep.journal import Record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tars import HOME, closed, honest, member, memory_folder, run, some_files, split, tree, wanted, write_parts

SMALL = ExtractOptions(batch_bytes=2000, block_bytes=1500)


def refused(tmp_path: Path, *members: bytes) -> str:
    """What the engine says of members; nothing may be left behind, inside or outside."""
    before = set(tmp_path.rglob("*"))
    source = write_parts(tmp_path / "parts", [closed(*members)])
    with pytest.raises(PrepError) as caught:
        run(source, tmp_path / "data" / "libero_pi0_all")
    left = set(tmp_path.rglob("*")) - before
    assert {path.name for path in left} == {"parts", "libero.tar.part-000"}
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestWriting:
    """What comes out of an honest archive."""

    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        form=st.sampled_from(["gnu", "pax"]),
        size=st.integers(300, 40_000),
        sums=st.booleans(),
        folders=st.booleans(),
        batch=st.sampled_from([0, 2000, 1 << 28]),
    )
    def test_any_archive_cut_anywhere(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        seed: int,
        form: str,
        size: int,
        sums: bool,
        folders: bool,
        batch: int,
    ) -> None:
        tmp_path = memory_folder(tmp_path_factory.mktemp("w"))
        files = some_files(random.Random(seed))
        source = write_parts(tmp_path / "p", split(honest(files, form, folders), size), sums=sums)
        result = run(source, tmp_path / "set", ExtractOptions(batch_bytes=batch, block_bytes=1 + seed % 9000))
        due = wanted(files)
        assert tree(tmp_path / "set") == due
        assert (result.record.files, result.record.bytes) == (len(due), sum(map(len, due.values())))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "set"]
        record = json.loads((tmp_path / "set" / ".dm05-extracted.json").read_text())
        kinds = {digest.partition(":")[0] for *_, digest in record["parts"] if digest}
        assert kinds == {"sha256" if sums else "crc32"}

    def test_modes_owners_and_times_are_not_applied(self, tmp_path: Path) -> None:
        run(write_parts(tmp_path / "p", [honest({HOME + "a": b"x"})]), tmp_path / "set")
        status = (tmp_path / "set" / "a").stat()
        assert not status.st_mode & (stat.S_ISUID | stat.S_IXUSR)
        assert status.st_uid == os.getuid() and status.st_mtime > 1_750_000_000

    def test_large_members_and_long_gaps(self, tmp_path: Path) -> None:
        rnd = random.Random(3)
        files = {"libero/other/v.mp4": rnd.randbytes(9 << 20), HOME + "big": rnd.randbytes(17 << 20), HOME + "s": b"s"}
        run(write_parts(tmp_path / "p", split(honest(files), 8 << 20)), tmp_path / "set")
        assert tree(tmp_path / "set") == wanted(files)

    def test_an_archive_of_the_subset_alone(self, tmp_path: Path) -> None:
        run(write_parts(tmp_path / "p", [closed(member("./libero_pi0_all/jsonl/a", b"1"))]), tmp_path / "set")
        assert tree(tmp_path / "set") == {"jsonl/a": b"1"}

    def test_what_was_there_is_replaced_when_the_new_one_is_complete(self, tmp_path: Path) -> None:
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "old").write_bytes(b"old")
        broken = write_parts(tmp_path / "p", [honest({HOME + "new": b"new"})[:512]])
        with pytest.raises(PrepError):
            run(broken, tmp_path / "set")
        assert tree(tmp_path / "set") == {"old": b"old"}
        run(write_parts(tmp_path / "p", [honest({HOME + "new": b"new"})]), tmp_path / "set")
        assert tree(tmp_path / "set") == {"new": b"new"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "set"]

    def test_sidecars_are_left_out_and_counted(self, tmp_path: Path) -> None:
        folders = ["__MACOSX/", "image/._d/", "image/._d/deep/"]
        names = ["._a.jpg", "image/.DS_Store", "image/._x", "__MACOSX/a", "image/._d/b.jpg", "image/._d/deep/c.jpg"]
        archive = closed(
            member(HOME + "a.jpg", b"1"),
            *(member(HOME + name, flag=b"5") for name in folders),
            *(member(HOME + name, b"mac") for name in names),
            member(HOME + "image/._l", flag=b"2", target=b"/etc/passwd"),
        )
        result = run(write_parts(tmp_path / "p", [archive]), tmp_path / "set")
        assert tree(tmp_path / "set") == {"a.jpg": b"1"}
        assert not any(path.is_dir() for path in (tmp_path / "set").iterdir())
        assert result.record.left_out == len(names) + 1  # no folder is a file that was left out
        assert result.left_out_first == f"'{HOME}._a.jpg' (libero.tar.part-000: byte 2560)"


class TestLinks:
    """Links inside the dataset are made, all others refused."""

    def test_hard_links_and_links_inside(self, tmp_path: Path) -> None:
        archive = closed(
            member(HOME + "a/x", b"content"),
            member(HOME + "b/y", flag=b"1", target=HOME.encode() + b"a/x"),
            member(HOME + "b/z", flag=b"2", target=b"../a/x"),
        )
        result = run(write_parts(tmp_path / "p", [archive]), tmp_path / "set")
        assert tree(tmp_path / "set") == {"a/x": b"content", "b/y": b"content", "b/z": b"content"}
        assert os.readlink(tmp_path / "set/b/z") == "../a/x" and result.record.files == 3

    @pytest.mark.parametrize("target", [b"/etc/passwd", b"../../../../etc", b"../../x", b"a/../../../x", b""])
    def test_links_out(self, tmp_path: Path, target: bytes) -> None:
        text = refused(tmp_path, member(HOME + "d/l", flag=b"2", target=target))
        assert "symbolic link" in text and "libero.tar.part-000: byte 0: " in text

    def test_nothing_is_written_through_a_link(self, tmp_path: Path) -> None:
        link = member(HOME + "l", flag=b"2", target=b"sub")
        assert "behind the symbolic link 'l'" in refused(tmp_path, link, member(HOME + "l/x", b"1"))

    @pytest.mark.parametrize(
        "target", [b"/etc/passwd", b"../x", b"libero/other/x", HOME.encode() + b"absent", HOME.encode() + b"soft", b""]
    )
    def test_hard_links_to_anything_else(self, tmp_path: Path, target: bytes) -> None:
        soft = member(HOME + "soft", flag=b"2", target=b"real")
        other = member("libero/other/x", b"1")
        text = refused(tmp_path, other, soft, member(HOME + "h", flag=b"1", target=target))
        assert "byte 1536: " in text and f"a hard link to {target.decode()!r}, which is no file" in text


class TestRefused:
    """Members that are never written, told with their place."""

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("/abs/olute", "absolute"),
            ("../outside", "climbs"),
            (HOME + "../../../outside", "climbs"),
            (HOME + "a\\b", "backslash"),
            (HOME + "a\nb", "U+000A"),
            (HOME + ".dm05-extracted.json", "reserved"),
            ("Libero/libero_pi0_all/x", "only by case"),
            (HOME.encode() + b"\xff\xfe", "not UTF-8"),
        ],
    )
    def test_names(self, tmp_path: Path, name: str | bytes, why: str) -> None:
        text = refused(tmp_path, member(HOME + "fine", b"1"), member(name, b"evil"))
        assert why in text and "libero.tar.part-000: byte 1024: " in text

    @pytest.mark.parametrize("flag", [b"3", b"4", b"6", b"S", b"Q"])
    def test_kinds(self, tmp_path: Path, flag: bytes) -> None:
        assert "is never written" in refused(tmp_path, member(HOME + "odd", flag=flag))

    @pytest.mark.parametrize(
        ("first", "second"),
        [("a", "a"), ("a", "A"), ("d/a", "D/b"), ("a", "a/b"), ("a/b", "a"), ("caf\u00e9", "cafe\u0301")],
    )
    def test_names_that_collide(self, tmp_path: Path, first: str, second: str) -> None:
        text = refused(tmp_path, member(HOME + first, b"1"), member(HOME + second, b"2"))
        assert "byte 1024: " in text

    def test_the_subset_is_not_there(self, tmp_path: Path) -> None:
        text = refused(tmp_path, member("libero/libero_goal/a", b"1"), member("README", b"2"))
        assert "nothing of libero_pi0_all, but: libero/libero_goal, README" in text

    def test_odd_members_of_other_subsets_do_not_matter(self, tmp_path: Path) -> None:
        odd = [member("libero/x/fifo", flag=b"6"), member(b"libero/x/\xff", b"1"), member("libero/x/l", flag=b"2")]
        run(write_parts(tmp_path / "p", [closed(*odd, member(HOME + "a", b"1"))]), tmp_path / "set")
        assert tree(tmp_path / "set") == {"a": b"1"}


Fault = Callable[[list[bytes], random.Random], list[bytes]]


def swapped(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    a, b = rnd.sample(range(len(parts) - 1), 2)
    parts[a], parts[b] = parts[b], parts[a]
    return parts


def duplicated(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    # A copy of the padding at the end over the last member is an archive that just ends sooner: only a checksum tells.
    b = rnd.choice([index for index, part in enumerate(parts[:-1]) if part.strip(b"\0")])
    a = rnd.choice([index for index in range(len(parts) - 1) if index != b])
    parts[a] = parts[b]
    return parts


def truncated(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    victim = rnd.randrange(len(parts))
    parts[victim] = parts[victim][: rnd.randrange(len(parts[victim]))]
    return parts


def cut_at_a_block(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    blocks = len(parts[-1]) // 512
    parts[-1] = parts[-1][: 512 * rnd.randrange(max(1, blocks - 20))]
    return parts


def flipped(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    victim = rnd.randrange(len(parts))
    at = rnd.randrange(len(parts[victim]))
    parts[victim] = parts[victim][:at] + bytes([parts[victim][at] ^ 1]) + parts[victim][at + 1 :]
    return parts


def longer(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    parts[rnd.randrange(1, len(parts) - 1)] += b"more"
    return parts


def pointer(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    parts[rnd.randrange(len(parts))] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    return parts


def page(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    parts[rnd.randrange(len(parts))] = b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>"
    return parts


def zeroed(parts: list[bytes], rnd: random.Random) -> list[bytes]:
    last = max(index for index, part in enumerate(parts) if part.strip(b"\0"))
    victim = rnd.randrange(last)  # after it something else than the padding at the end must follow
    parts[victim] = bytes(len(parts[victim]))
    return parts


FAULTS: list[Fault] = [
    swapped, duplicated, truncated, cut_at_a_block, flipped, longer, pointer, page, zeroed,
]  # fmt: skip


class TestDamage:
    """Every damage is found, nothing is published, and mending the part is enough to go on."""

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        fault=st.sampled_from(FAULTS),
        seed=st.integers(0, 2**32),
        sums=st.booleans(),
        batch=st.sampled_from([0, 3000, 1 << 28]),
    )
    def test_found_and_mended(
        self, tmp_path_factory: pytest.TempPathFactory, fault: Fault, seed: int, sums: bool, batch: int
    ) -> None:
        tmp_path, rnd = memory_folder(tmp_path_factory.mktemp("w")), random.Random(seed)
        files = some_files(rnd, 14, 4000)
        whole = split(honest(files, "pax"), rnd.randrange(2500, 6000))
        bad = fault(list(whole), rnd)
        options = ExtractOptions(batch_bytes=batch, block_bytes=1 + seed % 5000)
        source = write_parts(tmp_path / "p", whole, sums=sums)
        for index, data in enumerate(bad):
            (tmp_path / "p" / f"libero.tar.part-{index:03d}").write_bytes(data)
        target = tmp_path / "set"
        try:
            run(source, target, options)
        except PrepError as error:
            assert "libero.tar" in str(error) and "\n" not in str(error)
            assert not target.exists()
        else:  # without checksums only a flip inside data, or parts cut between equal files, can go unseen
            assert not sums or bad == whole
            assert set(tree(target)) == set(wanted(files)) or fault is flipped
            return
        write_parts(tmp_path / "p", whole)
        run(source, target, options)
        assert tree(target) == wanted(files)

    @pytest.mark.parametrize("at", [0, 1000, 2900])
    def test_the_checksum_names_the_part(self, tmp_path: Path, at: int) -> None:
        """Also when the damage shows before the end of the part, or in the next one."""
        files = {f"{HOME}{index:03d}": random.Random(index).randbytes(3000) for index in range(30)}
        parts = split(honest(files), 3584)
        source = write_parts(tmp_path / "p", parts, sums=True)
        bad = bytearray(parts[4])
        bad[at] ^= 1
        (tmp_path / "p/libero.tar.part-004").write_bytes(bad)
        with pytest.raises(PrepError, match=r"^libero.tar.part-004: its sha256 is"):
            run(source, tmp_path / "set", SMALL)

    def test_a_part_under_another_name_is_recognised(self, tmp_path: Path) -> None:
        parts = split(honest(some_files(random.Random(5), 30, 3000), "pax"), 4000)
        source = write_parts(tmp_path / "p", parts, sums=True)
        write_parts(tmp_path / "p", [*parts[:2], parts[5], *parts[3:]])
        with pytest.raises(PrepError, match=r"^libero.tar.part-002: has the content of libero.tar.part-005"):
            run(source, tmp_path / "set", SMALL)

    def test_other_parts_than_begun_with(self, tmp_path: Path) -> None:
        files = some_files(random.Random(6), 40, 3000)
        parts = split(honest(files, "pax"), 5000)
        source = write_parts(tmp_path / "p", [*parts[:-2], parts[-2][:-1] + b"?", parts[-1]], sums=False)
        (tmp_path / "p/SHA256SUMS").write_text(f"{'0' * 64}  libero.tar.part-{len(parts) - 2:03d}\n")
        with pytest.raises(PrepError):
            run(source, tmp_path / "set", ExtractOptions(batch_bytes=0))
        assert (tmp_path / "set.partial/journal.json").exists()
        for index, data in enumerate(parts):
            (tmp_path / f"p/libero.tar.part-{index:03d}").write_bytes(data + bytes(512))
        with pytest.raises(PrepError, match="unfinished extraction here is of another archive"):
            run(source, tmp_path / "set")

    def test_files_that_are_gone_from_the_partial_folder(self, tmp_path: Path) -> None:
        files = {f"{HOME}{index}": random.Random(index).randbytes(3000) for index in range(20)}
        parts = split(honest(files), 5000)
        source = write_parts(tmp_path / "p", parts)
        (tmp_path / "p" / "libero.tar.part-009").write_bytes(bytes(5000))
        with pytest.raises(PrepError):
            run(source, tmp_path / "set", ExtractOptions(batch_bytes=0))
        next((tmp_path / "set.partial/tree").iterdir()).unlink()
        with pytest.raises(PrepError, match=r"of the .* files of its log"):
            run(source, tmp_path / "set")


class TestOtherArchives:
    """tar.gz, tar.zst and zip through the same engine, whole or in parts."""

    def packed(self, kind: str, files: dict[str, bytes]) -> bytes:
        if kind == "tar.gz":
            return gzip.compress(honest(files, "pax"))
        if kind == "tar.zst":
            return zstandard.ZstdCompressor(write_checksum=True).compress(honest(files, "pax"))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return buffer.getvalue()

    @pytest.mark.parametrize("kind", ["tar.gz", "tar.zst", "zip"])
    @pytest.mark.parametrize("pieces", [1, 7])
    def test_extracted_and_continued(self, tmp_path: Path, kind: str, pieces: int) -> None:
        files = some_files(random.Random(8), 40, 5000)
        archive = self.packed(kind, files)
        name = f"libero.{kind}" if pieces == 1 else f"libero.{kind}.part-{{:02d}}"
        parts = split(archive, -(-len(archive) // pieces))
        for sums in (False, True):
            source = write_parts(tmp_path / f"p{sums}", parts, name=name, sums=sums)
            result = run(source, tmp_path / f"set{sums}", SMALL)
            assert tree(tmp_path / f"set{sums}") == wanted(files)
            assert result.record.files == len(wanted(files))

    @pytest.mark.parametrize("kind", ["tar.gz", "tar.zst", "zip"])
    @pytest.mark.parametrize("harm", ["cut", "flip", "sums"])
    def test_damaged(self, tmp_path: Path, kind: str, harm: str) -> None:
        files = some_files(random.Random(9), 40, 5000)
        archive = bytearray(self.packed(kind, files))
        source = write_parts(tmp_path / "p", [bytes(archive)], name=f"libero.{kind}", sums=harm == "sums")
        if harm == "cut":
            archive = archive[: len(archive) // 2]
        else:
            archive[len(archive) // 3] ^= 16
        (tmp_path / f"p/libero.{kind}").write_bytes(archive)
        with pytest.raises(PrepError, match=rf"libero\.{kind}"):
            run(source, tmp_path / "set", SMALL)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["p"]

    def test_hostile_zips(self, tmp_path: Path) -> None:
        def zipped(name: str, mode: int, data: bytes = b"x") -> bytes:
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                info = zipfile.ZipInfo(name)
                info.create_system, info.external_attr = 3, mode << 16
                archive.writestr(info, data)
            return buffer.getvalue()

        for name, mode, data, why in [
            ("../out", 0o100644, b"x", "climbs"),
            (HOME + "l", 0o120777, b"../../x", "symbolic link"),
            (HOME + "f", 0o010644, b"", "special file"),
            (HOME + "l", 0o120777, b"x" * 5000, "a link of 5000 bytes"),
        ]:
            source = write_parts(tmp_path / "p", [zipped(name, mode, data)], name="libero.zip")
            with pytest.raises(PrepError, match=why):
                run(source, tmp_path / "set")
        run(write_parts(tmp_path / "p", [zipped(HOME + "l", 0o120777, b"y")], name="libero.zip"), tmp_path / "set")
        assert os.readlink(tmp_path / "set/l") == "y"

    def test_the_wrong_ending(self, tmp_path: Path) -> None:
        for kind, name in [("tar.gz", "libero.tar"), ("zip", "libero.tar.gz"), ("zip", "libero.tar")]:
            source = write_parts(tmp_path / name, [self.packed(kind, {HOME + "a": b"1"})], name=name)
            with pytest.raises(PrepError, match="this is"):
                run(source, tmp_path / "set")


@pytest.mark.parametrize("form", ["gnu", "posix", "ustar"])
def test_the_tree_is_what_tar_makes(tmp_path: Path, form: str) -> None:
    files = {name: data for name, data in some_files(random.Random(11), 60).items() if len(name) < 100}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "p").mkdir()
    subprocess.run(
        f"tar --format={form} -C .. -c libero | split -b 7000 -d -a 3 - libero.tar.part-",
        shell=True,
        cwd=tmp_path / "p",
        check=True,
    )
    run(write_parts(tmp_path / "p", []), tmp_path / "set")
    assert tree(tmp_path / "set") == tree(tmp_path / HOME)
    assert Record.load(tmp_path / "set")


@pytest.mark.parametrize("fault", ["sum", "end"])
def test_a_compressed_archive_does_not_show_damage_where_it_is(tmp_path: Path, fault: str) -> None:
    """The sum at its end says nothing about where; an end that comes too early does."""
    packed = gzip.compress(honest({f"{HOME}{index}": random.Random(index).randbytes(3000) for index in range(9)}))
    packed = packed[:-8] + bytes(8) if fault == "sum" else packed[:-2000]
    source = write_parts(tmp_path / "p", split(packed, 8000), name="libero.tar.gz.part-{:03d}")
    with pytest.raises(PrepError) as caught:
        run(source, tmp_path / "set")
    text = str(caught.value)
    assert text.startswith("libero.tar.gz.part-003: byte ")
    if fault == "sum":
        assert "at or before this byte" in text and "Compare the checksums of the parts up to this one" in text
    else:
        assert "ends too early" in text and "Download that part" in text
    assert not (tmp_path / "set").exists()


def test_a_zip_without_its_last_part(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(HOME + "a", random.Random(1).randbytes(9000))
    source = write_parts(tmp_path / "p", split(buffer.getvalue(), 4000)[:-1], name="libero.zip.part-{:03d}")
    with pytest.raises(PrepError, match=r"part-001: byte 4000: .* cut short or not the last\. Download that part"):
        run(source, tmp_path / "set")
