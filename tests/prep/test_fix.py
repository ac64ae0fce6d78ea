"""Mending without loss."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from dm05_prep.fix import fix_dataset, mend
from dm05_prep.index import build_index
from dm05_schemas.episode import read_episode, scan_episode
from dm05_schemas.errors import DataError
from dm05_schemas.workspace import Workspace
from hypothesis import example, given
from hypothesis import strategies as st
from workspaces import make_frame, make_spec, random_episodes, write_vectors

SPEC = make_spec()
FRAMES = [make_frame("e", n, [n, 0, 0, 0], [n, 0, 0], prompt="第一 a\u2028b") for n in range(3)]
LINES = [json.dumps(frame, ensure_ascii=False) for frame in FRAMES]
GOOD = "".join(f"{line}\n" for line in LINES)

CASES: dict[str, tuple[bytes, dict[str, int]]] = {
    "nothing to do": (GOOD.encode(), {}),
    "blank lines": (GOOD.replace("\n", "\n\n \n").encode(), {"blank lines removed": 6}),
    "no-break space": (f"\u00a0\n{GOOD}".encode(), {"blank lines removed": 1}),
    "CR LF": (GOOD.replace("\n", "\r\n").encode(), {"CR LF made LF": 3}),
    "CR CR LF": (GOOD.replace("\n", "\r\r\n").encode(), {"CR LF made LF": 3}),
    "lone CR": (GOOD.replace("\n", "\r").encode(), {"last newline added": 1, "lone CR made LF": 3}),
    "mixed": (
        GOOD.replace("\n", "\r\n", 2).replace("\r\n", "\r", 1).encode(),
        {"CR LF made LF": 1, "lone CR made LF": 1},
    ),
    "BOM": (b"\xef\xbb\xbf" + GOOD.encode(), {"byte order mark removed": 1}),
    "BOMs of files that were joined": (
        "".join(f"\ufeff{line}\n" for line in LINES).encode() + b"\xef\xbb\xbf",
        {"byte order mark removed": 4},
    ),
    "UTF-16": (GOOD.encode("utf-16"), {"UTF-16 made UTF-8": 1}),
    "UTF-16 LE without mark": (GOOD.encode("utf-16-le"), {"UTF-16 made UTF-8": 1}),
    "UTF-16 BE without mark": (GOOD.encode("utf-16-be"), {"UTF-16 made UTF-8": 1}),
    "UTF-32": (GOOD.encode("utf-32"), {"UTF-32 made UTF-8": 1}),
    "no last newline": (GOOD[:-1].encode(), {"last newline added": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_mended(name: str) -> None:
    data, done = CASES[name]
    mended, what = mend(data)
    assert (mended, what) == (GOOD.encode(), done)
    assert mend(mended) == (mended, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        GOOD.encode()[:-20],
        b"\xef\xbb\xbf\n",
        LINES[0].encode() + b"\n" + b"\xff\xff\n",
        GOOD.replace(', "state"', ',\r"state"').encode(),
    ],
)
def test_what_is_left_alone(data: bytes) -> None:
    assert mend(data) == (data, {})


@example(b"\x01\r\r\n")
@given(st.binary(max_size=60) | st.text('{}[]":,01 \r\n\u00a0\ufeff', max_size=60).map(str.encode))
def test_frames_are_never_lost_or_changed(data: bytes) -> None:
    mended, done = mend(data)
    assert (mended == data) == (not done) or done
    if done and b"\0" not in data:
        squeezed = [line.strip() for line in data.replace(b"\r", b"\n").split(b"\n")]
        assert mended.replace(b"\r", b"\n").count(b"{") == b"".join(squeezed).count(b"{")
    assert mend(mended)[1] == {}


def test_a_dataset_is_mended_through_new_files(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_vectors(workspace, SPEC, random_episodes(0, [3, 4], SPEC))
    build_index(workspace, SPEC)
    path, other = sorted(SPEC.jsonl(workspace).iterdir())
    before = read_episode(path, SPEC)
    untouched = other.stat()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    path.chmod(0o640)
    with pytest.raises(DataError):
        read_episode(path, SPEC)
    assert fix_dataset(workspace, SPEC) == [
        f"{path}: CR LF made LF (6), byte order mark removed (1), blank lines removed (3)",
        f"{SPEC.root(workspace)}/index_cache.json: index written (1 episode file modified since (episode_000.jsonl))",
    ]
    episode, findings = scan_episode(path, SPEC)
    assert findings == [] and episode is not None and (episode.state == before.state).all()
    assert path.stat().st_mode & 0o777 == 0o640
    assert (other.stat().st_mtime_ns, other.stat().st_ino) == (untouched.st_mtime_ns, untouched.st_ino)
    assert fix_dataset(workspace, SPEC) == []
    assert sorted(item.name for item in SPEC.jsonl(workspace).iterdir()) == [path.name, other.name]


def test_a_symlinked_episode_is_mended_where_it_lies(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "w")
    write_vectors(workspace, SPEC, random_episodes(0, [3], SPEC))
    [path] = SPEC.jsonl(workspace).iterdir()
    real = tmp_path / "real.jsonl"
    real.write_bytes(path.read_bytes() + b"\n")
    path.unlink()
    path.symlink_to(real)
    fix_dataset(workspace, SPEC)
    assert path.is_symlink() and os.path.realpath(path) == str(real)
    assert not real.read_bytes().endswith(b"\n\n")
