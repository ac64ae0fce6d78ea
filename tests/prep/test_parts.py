"""Names and sizes of parts: every way of counting, and every way for a set to be wrong."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.parts import PartSet, order_parts
from dm05_prep.sources.base import RemoteFile
from hypothesis import given
from hypothesis import strategies as st


def order(*names: str, sizes: dict[str, int] | None = None) -> PartSet:
    files = [RemoteFile(name=name, size=(sizes or {}).get(name, 1000)) for name in names]
    return order_parts(files, place="PLACE")


def names(parts: PartSet) -> list[str]:
    return [part.name for part in parts.parts]


def refused(*given_names: str, sizes: dict[str, int] | None = None) -> str:
    with pytest.raises(PrepError) as caught:
        order(*given_names, sizes=sizes)
    return str(caught.value)


STYLES = {
    "padded": lambda i: f"libero.tar.part-{i:03d}",
    "unpadded": lambda i: f"libero.tar.part{i}",
    "from one": lambda i: f"libero.tar.part-{i + 1:02d}",
    "bare": lambda i: f"libero.tar.{i:02d}",
    "letters": lambda i: f"libero.tar.part-{chr(97 + i // 26)}{chr(97 + i % 26)}",
    "bare letters": lambda i: f"sub/libero.tar.gz.{chr(97 + i // 26)}{chr(97 + i % 26)}",
}


@given(st.sampled_from(sorted(STYLES)), st.integers(1, 300), st.randoms())
def test_any_style_in_any_order(style: str, count: int, rnd: random.Random) -> None:
    wanted = [STYLES[style](i) for i in range(count)]
    shuffled = [*wanted, "README.md", ".gitattributes", wanted[0] + ".sha256"]
    rnd.shuffle(shuffled)
    parts = order(*shuffled)
    assert names(parts) == wanted
    assert parts.size == 1000 * count
    assert parts.where(1000 * count - 1) == f"{wanted[-1]}: byte 999"


@given(st.sampled_from(sorted(STYLES)), st.integers(3, 40), st.data())
def test_a_gap_is_named(style: str, count: int, data: st.DataObject) -> None:
    wanted = [STYLES[style](i) for i in range(count)]
    gone = wanted.pop(data.draw(st.integers(1, count - 2)))
    assert f"missing: {gone} (" in refused(*wanted)


@pytest.mark.parametrize("flags", ["-a1", "", "-d", "-da1", "-da3"])
def test_names_as_split_writes_them(tmp_path: Path, flags: str) -> None:
    """Suffixes that grow when they run out (``yz zaaa``) come in the order that split gave them."""
    data = bytes(range(256)) * 2 + b"tail"
    options = [flags] if flags else []
    count = 24 if flags == "-a1" else 9 if flags == "-da1" else 700
    size = -(-len(data) * 2 // count)
    (tmp_path / "whole").write_bytes(data * 2)
    if "1" in flags:
        size = -(-len(data) * 2 // count)
    subprocess.run(["split", f"-b{size}", *options, "whole", "x.tar.part-"], cwd=tmp_path, check=True)
    files = [
        RemoteFile(name=path.name, size=path.stat().st_size) for path in tmp_path.iterdir() if path.name != "whole"
    ]
    parts = order_parts(files)
    assert b"".join((tmp_path / name).read_bytes() for name in names(parts)) == data * 2


def test_one_whole_archive() -> None:
    for name, kind in {"a.tar": "tar", "a.tgz": "tar.gz", "b/a.tar.zst": "tar.zst", "a.zip": "zip"}.items():
        parts = order(name, "README.md")
        assert (names(parts), parts.kind, parts.stem) == ([name], kind, "a")


def test_several_archives_need_a_choice() -> None:
    files = [RemoteFile(name=name, size=5) for name in ("libero.tar", "other.tar.part-0", "third.zip")]
    assert order_parts(files, prefer=("nothing", "libero")).archive == "libero.tar"
    with pytest.raises(PrepError, match=r"several archives here: libero.tar, other.tar, third.zip"):
        order_parts(files, prefer=("nothing",))


def test_nothing_to_order() -> None:
    assert "PLACE: no archive or parts here: the folder is empty" in refused()
    assert "none of its 2 files is one" in refused("README.md", "libero.tarball")


@pytest.mark.parametrize(
    "leftover",
    [
        "libero.tar.part-001.incomplete",
        "libero.tar.part-001 (1)",
        "libero.tar (1).part-001",
        "libero.tar.part-001.part",
        "libero.tar.part-001~",
        "libero.tar.part_002",
        "libero.tar.1",
        "libero.tar.incomplete",
        "libero.tar.part-aa",
    ],
)
def test_leftovers(leftover: str) -> None:
    text = refused("libero.tar.part-000", "libero.tar.part-001", "libero.tar.part-002", leftover)
    assert "left over" in text and leftover in text


def test_leftovers_beside_a_whole_archive() -> None:
    assert "libero.tar.1" in refused("libero.tar", "libero.tar.1")
    assert "both libero.tar and parts" in refused("libero.tar", "libero.tar.part-0", "libero.tar.part-1")
    assert "left over" in refused("libero.tar.incomplete")


def test_duplicates_and_odd_names() -> None:
    assert "the same part twice" in refused("a.tar.part-1", "a.tar.part-01", "a.tar.part-0")
    assert "does not fit" in refused("a.tar.part-aa", "a.tar.part-ab", "a.tar.part-abc")
    assert "missing: a.tar.part-1, a.tar.part-2, a.tar.part-3 and" in refused("a.tar.part-0", "a.tar.part-99999999999")
    assert "compression is not supported" in refused("a.tar.xz")


def test_sizes() -> None:
    trio = ("a.tar.0", "a.tar.1", "a.tar.2")
    assert order(*trio, sizes={"a.tar.2": 1}).size == 2001
    assert "a.tar.1: 999 bytes, where its neighbours have 1000" in refused(*trio, "a.tar.3", sizes={"a.tar.1": 999})
    assert "a.tar.2: 1001 bytes, more than" in refused(*trio, sizes={"a.tar.2": 1001})
    assert "a.tar.1: an empty file" in refused(*trio, sizes={"a.tar.1": 0})
