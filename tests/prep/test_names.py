"""Member names: what is refused, what is the same name in another spelling."""

from __future__ import annotations

import posixpath
import unicodedata

import pytest
from dm05_prep.names import BadName, Names, clean, is_sidecar, link_target
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"/etc/passwd", "absolute"),
        (b"a/../../b", "climbs"),
        (b"..", "climbs"),
        (b"a\nb", "U\\+000A"),
        (b"a/\x1b[2Jb", "U\\+001B"),
        ("a\u202egpj".encode(), "U\\+202E"),
        (b"a\\..\\b", "backslash"),
        (b"\xc4\xe3", "UTF-8"),
        (b"x" * 256, "more than 255"),
        ("图".encode() * 86, "more than 255"),
        (b"a/" * 600, "more than 1024"),
    ],
)
def test_refused(raw: bytes, why: str) -> None:
    with pytest.raises(BadName, match=why):
        clean(raw)


@given(st.binary(max_size=40) | st.text(alphabet="./ab~\\ \n", max_size=12).map(str.encode))
def test_whatever_is_accepted_stays_inside(raw: bytes) -> None:
    try:
        parts = clean(raw)
    except BadName:
        return
    path = "/".join(parts)
    plain = posixpath.normpath(path or "x")
    assert plain != ".." and not plain.startswith(("../", "/")) and ".." not in parts and "\0" not in path


def test_cleaned() -> None:
    assert clean(b"./libero//a/./b/") == ("libero", "a", "b")
    assert clean("任务 一/..x".encode()) == ("任务 一", "..x")
    assert clean(b"./") == ()


def test_sidecars() -> None:
    for name in ("._b.jpg", "._", ".DS_Store", "Thumbs.db", "__MACOSX"):
        assert all(is_sidecar(path) for path in (name, f"a/{name}", f"{name}/b.jpg", f"a/b/{name}/c/d.jpg"))
    for name in ("_b.jpg", ".hidden", "a._b", "MACOSX", "x__MACOSX", "__MACOSX2", ".DS_Store.jpg", "my.DS_Store"):
        assert not any(is_sidecar(path) for path in (name, f"a/{name}", f"{name}/b.jpg", ""))


def test_spellings_of_the_same_name() -> None:
    names = Names()
    names.add_file("a/Bild-\u00e9.jpg")
    for again in ("a/Bild-\u00e9.jpg", "a/Bild-e\u0301.jpg", "a/bild-\u00e9.jpg", "a/BILD-E\u0301.JPG"):
        with pytest.raises(BadName, match="came before"):
            names.add_file(again)
    with pytest.raises(BadName, match="its folder differs from 'a'"):
        names.add_file("A/other.jpg")
    with pytest.raises(BadName, match="a file called"):
        names.add_file("a/Bild-\u00e9.jpg/inner")
    with pytest.raises(BadName, match="a folder of this name"):
        names.add_file("A")
    with pytest.raises(BadName, match="reserved"):
        names.add_file(".dm05-extracted.json")
    names.add_folder("a")
    names.add_file("a/other.jpg")


@given(st.text(min_size=1, max_size=8).filter(lambda text: "/" not in text))
def test_any_case_and_form_is_found(name: str) -> None:
    names = Names()
    names.add_file(name)
    for form in ("NFC", "NFD"):
        with pytest.raises(BadName):
            names.add_file(unicodedata.normalize(form, name))


def test_nothing_goes_through_a_link() -> None:
    names = Names()
    names.add_link("a/link")
    with pytest.raises(BadName, match="behind the symbolic link 'a/link'"):
        names.add_file("a/link/x")
    with pytest.raises(BadName):
        names.add_folder("a/LINK")
    assert names.is_link("a/link") and names.is_link("a/link/x") and not names.is_link("a")
    assert names.has_file("a/link") and not names.has_file("a/x")


def test_link_targets() -> None:
    assert link_target("a/b/l", b"../c/x.jpg") == "a/c/x.jpg"
    assert link_target("l", b"c/./x") == "c/x"
    assert link_target("a/l", b"..") == ""
    for target in (b"/etc", b"..", b"../x", b"c/../../x", b"", b"c/..", b"\xff", b"a\0b"):
        with pytest.raises(BadName):
            link_target("l", target)
