"""What is acceptable in an episode file: every kind of finding with its exact text, and two ways that must agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dm05_schemas import episode as module
from dm05_schemas.episode import Episode, read_episode, scan_episode
from dm05_schemas.errors import DataError
from dm05_schemas.findings import KINDS
from dm05_schemas.registry import DatasetSpec
from hypothesis import given, settings
from hypothesis import strategies as st

SPEC = DatasetSpec(
    name="toy",
    folder=Path("data/toy"),
    image_keys=("images_1", "images_2"),
    image_prompts=("Head", "Wrist"),
    state_desc=("joint", "joint", "gripper"),
    action_dim=2,
)
SQUARE = DatasetSpec(
    name="square",
    folder=Path("data/square"),
    image_keys=("images_1",),
    image_prompts=("Head",),
    state_desc=("joint", "gripper"),
    action_dim=2,
)
PATH = Path("jsonl/e.jsonl")


def frame(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A frame that is acceptable but for ``changes``; a change to None removes the key."""
    whole = {
        "images_1": {"type": "image", "url": f"./e/camera_0/{number:06d}.jpg"},
        "images_2": {"type": "image", "url": f"e/camera_1/{number:06d}.jpg"},
        "state": [0.1 * number, -1, 2.5],
        "action": [0.5, number],
        "prompt": "pick: the bowl",
        "is_robot": True,
    } | changes
    return {key: value for key, value in whole.items() if value is not None}


def text(*frames: object) -> bytes:
    """Lines of these frames; bytes stand for themselves."""
    return b"".join(item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n" for item in frames)


def found(data: bytes, spec: DatasetSpec = SPEC) -> list[tuple[str, int | None, str]]:
    """Kind, line and detail of everything found in ``data``."""
    episode, findings = scan_episode(PATH, spec, data=data)
    assert (episode is None) == any(item.severity == "error" for item in findings)
    return [(item.kind, item.line, item.detail) for item in findings]


def test_a_good_episode() -> None:
    data = text(frame(0), frame(1, prompt="开门", is_robot=False), frame(2))
    episode, findings = scan_episode(PATH, SPEC, data=data)
    assert findings == [] and episode is not None
    assert episode.state.dtype == np.float32 and episode.action is not None
    np.testing.assert_array_equal(episode.state, np.float32([[0, -1, 2.5], [0.1, -1, 2.5], [0.2, -1, 2.5]]))
    np.testing.assert_array_equal(episode.action, np.float32([[0.5, 0], [0.5, 1], [0.5, 2]]))
    assert episode.prompts == ["pick: the bowl", "开门"]
    assert episode.prompt_ids.tolist() == [0, 1, 0] and episode.prompt_ids.dtype == np.int32
    assert episode.urls[1] == ["e/camera_0/000001.jpg", "e/camera_1/000001.jpg"]
    assert episode.frame_idx.tolist() == [[-1, -1]] * 3
    assert episode.is_robot.tolist() == [True, False, True]
    assert len(episode) == 3 and episode.targets is episode.action


def test_unknown_keys_and_absent_is_robot_are_fine() -> None:
    extra = {"time": "12:30:00", "nested": {"a:b": [{"c": ":"}, 1, None]}, "images_9": "anything"}
    view = {"type": "image", "url": "a.jpg", "note": "x:y", "frame_idx": None}
    assert found(text(frame(0, is_robot=None, **extra), frame(1, images_1=view))) == []


@pytest.mark.parametrize("depth", [100, 450, 600])
def test_unknown_keys_may_be_deep(depth: int) -> None:
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    line = OTHER.replace(b'"is_robot": true', b'"is_robot": true, "x": ' + deep)
    assert found(LINE + line) == []
    assert found(LINE + line.replace(b'"a":1', b'"a":1,"a":2')) == [("duplicate-key", 2, 'key "a" stands twice')]


def test_without_actions_the_states_are_the_targets() -> None:
    frames = [frame(n, state=[n, 0.5], action=None, images_2=None) for n in range(2)]
    episode = scan_episode(PATH, SQUARE, data=text(*frames))[0]
    assert episode is not None and episode.action is None and episode.targets is episode.state


def test_video_entries() -> None:
    view = {"type": "video", "url": "e.mp4", "frame_idx": 7}
    episode = scan_episode(PATH, SPEC, data=text(frame(0, images_2=view), frame(1)))[0]
    assert episode is not None and episode.frame_idx.tolist() == [[-1, 7], [-1, -1]]


GOOD = text(frame(0), frame(1))
LINE = text(frame(0))
OTHER = text(frame(1))

FILES: dict[str, tuple[bytes, list[tuple[str, int | None, str]]]] = {
    "empty": (b"", [("empty-episode", None, "has no frames")]),
    "one frame": (LINE, [("one-frame", None, "has 1 frame where at least 2 are due")]),
    "only blank": (
        b"\n \n",
        [
            ("empty-episode", None, "has no frames"),
            ("blank-line", 1, "blank line"),
            ("blank-line", 2, "line of white space only"),
        ],
    ),
    "blank line": (LINE + b"\n" + OTHER, [("blank-line", 2, "blank line")]),
    "blank at the end": (GOOD + b"\n", [("blank-line", 3, "blank line")]),
    "white space": (LINE + b" \t \n" + OTHER, [("blank-line", 2, "line of white space only")]),
    "no-break space": (LINE + "\u00a0\u3000\n".encode() + OTHER, [("blank-line", 2, "line of white space only")]),
    "zero width": (LINE + "\u200b\ufeff\n".encode() + OTHER, [("blank-line", 2, "line of white space only")]),
    "white space without newline": (GOOD + b"  ", [("blank-line", 3, "line of white space only")]),
    "CR LF blank": (
        LINE + b"\r\n" + OTHER,
        [("crlf", 2, "1 of 3 lines end in CR LF"), ("blank-line", 2, "blank line")],
    ),
    "CR LF": (GOOD.replace(b"\n", b"\r\n"), [("crlf", 1, "2 of 2 lines end in CR LF")]),
    "lone CR": (GOOD.replace(b"\n", b"\r"), [
        ("no-final-newline", 1, "no newline at the end of the file"),
        ("lone-cr", 1, "carriage return without line feed"),
    ]),
    "CR between keys": (GOOD.replace(b', "state"', b',\r"state"', 1), [
        ("lone-cr", 1, "carriage return without line feed"),
    ]),
    "BOM": (b"\xef\xbb\xbf" + GOOD, [("bom", 1, "starts with a byte order mark")]),
    "BOM alone": (b"\xef\xbb\xbf", [
        ("empty-episode", None, "has no frames"), ("blank-line", 1, "line of white space only"),
    ]),
    "BOM inside": (LINE + b"\xef\xbb\xbf" + OTHER, [("bom", 2, "starts with a byte order mark")]),
    "two BOMs": (b"\xef\xbb\xbf" * 2 + GOOD, [("bom", 1, "starts with a byte order mark")]),
    "UTF-16": (GOOD.decode().encode("utf-16"), [("utf16", None, "is UTF-16, not UTF-8")]),
    "UTF-16 BE": (GOOD.decode().encode("utf-16-be"), [("utf16", None, "is UTF-16, not UTF-8")]),
    "UTF-32": (GOOD.decode().encode("utf-32"), [("utf16", None, "is UTF-32, not UTF-8")]),
    "bad UTF-8": (LINE + OTHER.replace(b"bowl", b"b\xffwl"), [("bad-utf8", 2, "byte 197 is not UTF-8 (0xff)")]),
    "surrogate bytes": (LINE + OTHER.replace(b"bowl", b"\xed\xa0\x80"), [
        ("bad-utf8", 2, "byte 196 is not UTF-8 (0xed)"),
    ]),
    "no newline at the end": (GOOD[:-1], [("no-final-newline", 2, "no newline at the end of the file")]),
    "cut off": (GOOD[:-40], [
        ("no-final-newline", 2, "no newline at the end of the file"),
        ("bad-json", 2, "not JSON at column 175: Unterminated string starting at"),
    ]),
    "two on a line": (LINE[:-1] + b" " + OTHER + LINE, [("bad-json", 1, "not JSON at column 221: Extra data")]),
    "over two lines": (GOOD.replace(b', "state"', b',\n"state"', 1), [
        ("bad-json", 1, "not JSON at column 129: Expecting property name enclosed in double quotes"),
        ("bad-json", 2, "not JSON at column 8: Extra data"),
    ]),
    "half a surrogate pair": (LINE + OTHER.replace(b"bowl", b"\\ud800"), [
        ("bad-json", 2, "not JSON: half a surrogate pair"),
    ]),
    "too deep": (LINE + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"\n" + OTHER, [
        ("bad-json", 2, "not JSON: nested too deep"),
    ]),
    "not an object": (LINE + b"[1]\n3\nnull\n", [
        ("not-an-object", 2, "a frame must be an object, not a list"),
        ("not-an-object", 3, "a frame must be an object, not a number"),
        ("not-an-object", 4, "a frame must be an object, not null"),
    ]),
    "key twice": (LINE + OTHER.replace(b'"prompt"', b'"state": [0, 0, 0], "prompt"'), [
        ("duplicate-key", 2, 'key "state" stands twice'),
    ]),
    "key twice in an image": (LINE + OTHER.replace(b'"type"', b'"url": "x:y", "type"', 1), [
        ("duplicate-key", 2, 'key "url" stands twice'),
    ]),
    "key twice in an unknown key": (LINE + OTHER.replace(b'"is_robot"', b'"x": {"a": 1, "a" : 1}, "is_robot"'), [
        ("duplicate-key", 2, 'key "a" stands twice'),
    ]),
    "key twice, once escaped": (LINE + OTHER.replace(b'"prompt"', b'"st\\u0061te": [0, 0, 0], "prompt"'), [
        ("duplicate-key", 2, 'key "state" stands twice'),
    ]),
    "key twice, hidden by a colon": (
        text(frame(0, prompt="x")) + OTHER.replace(b"pick: the", b"pick\\u003a the").replace(
            b'"is_robot": true', b'"is_robot": true, "is_robot": true'
        ),
        [("duplicate-key", 2, 'key "is_robot" stands twice')],
    ),
    "NaN": (LINE + OTHER.replace(b"2.5", b"NaN"), [("not-finite", 2, "NaN is not a JSON number")]),
    "Infinity": (LINE + OTHER.replace(b"2.5", b"-Infinity"), [("not-finite", 2, "-Infinity is not a JSON number")]),
    "1e999": (LINE + OTHER.replace(b"2.5", b"1e999"), [("not-finite", 2, "1e999 is not finite in float64")]),
    "huge integer": (LINE + OTHER.replace(b"2.5", b"9" * 5000), [
        ("not-finite", 2, "9" * 40 + " is not finite in float64"),
    ]),
    "beyond float32": (LINE + OTHER.replace(b"2.5", b"-1e39"), [
        ("not-finite", 2, "state[2] is -1e+39, beyond what float32 can calculate with"),
    ]),
    "differences beyond float32": (LINE + OTHER.replace(b"2.5", b"3e38"), [
        ("not-finite", 2, "state[2] is 3e+38, beyond what float32 can calculate with"),
    ]),
    "huge line": (LINE + text(frame(1, blob="x" * (1 << 20))), [("huge-line", 2, "line of 1.0 MiB")]),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_text_of_a_file(name: str) -> None:
    data, expected = FILES[name]
    assert found(data) == expected


FRAMES: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "null in a vector": ({"state": [0, None, 1]}, [("bad-vector", "state[1] is null, not a number")]),
    "true in a vector": ({"state": [0, True, 1]}, [("bad-vector", "state[1] is true, not a number")]),
    "string in a vector": ({"action": ["1.0", 2]}, [("bad-vector", "action[0] is a string, not a number")]),
    "nested vector": ({"action": [[1], 2]}, [("bad-vector", "action[0] is a list, not a number")]),
    "vector is a string": ({"state": "1,2,3"}, [("bad-vector", "state must be a list of 3 numbers, not a string")]),
    "vector is null": ({"action": "null"}, [("bad-vector", "action must be a list of 2 numbers, not null")]),
    "too few dims": ({"state": [0, 1]}, [("wrong-dims", "state has 2 numbers where 3 are due")]),
    "too many dims": ({"action": [0, 1, 2]}, [("wrong-dims", "action has 3 numbers where 2 are due")]),
    "no dims": ({"state": []}, [("wrong-dims", "state has 0 numbers where 3 are due")]),
    "no state": ({"state": None}, [("missing-key", 'no "state"')]),
    "no prompt": ({"prompt": None}, [("missing-key", 'no "prompt"')]),
    "no image": ({"images_2": None}, [("missing-key", 'no "images_2"')]),
    "prompt is a list": ({"prompt": ["a"]}, [("bad-prompt", "prompt must be a string, not a list")]),
    "empty prompt": ({"prompt": " \n"}, [("empty-prompt", "prompt is empty"), ("odd-prompt", "prompt holds U+000A")]),
    "over-long prompt": ({"prompt": "a" * 1001}, [
        ("long-prompt", "prompt has 1001 characters and may not fit the model's input"),
    ]),
    "U+2028 in a prompt": ({"prompt": "a\u2028b\u200bc"}, [("odd-prompt", "prompt holds U+200B, U+2028")]),
    "is_robot is a number": ({"is_robot": 1}, [("bad-is-robot", "is_robot must be true or false, not a number")]),
    "image is a string": ({"images_1": "a.jpg"}, [
        ("bad-image-entry", "images_1 must be an object with type and url, not a string"),
    ]),
    "no type": ({"images_1": {"url": "a.jpg"}}, [
        ("bad-image-entry", "type of images_1 must be image or video, it is missing"),
    ]),
    "other type": ({"images_1": {"type": "depth", "url": "a.jpg"}}, [
        ("bad-image-entry", 'type of images_1 must be image or video, it is "depth"'),
    ]),
    "type is a list": ({"images_1": {"type": ["image"], "url": "a.jpg"}}, [
        ("bad-image-entry", "type of images_1 must be image or video, it is a list"),
    ]),
    "no url": ({"images_1": {"type": "image"}}, [
        ("bad-image-entry", "url of images_1 must be a string, it is missing"),
    ]),
    "url is a number": ({"images_1": {"type": "image", "url": 3}}, [
        ("bad-image-entry", "url of images_1 must be a string, it is a number"),
    ]),
    "absolute": ({"images_1": {"type": "image", "url": "/a/b.jpg"}}, [
        ("url-absolute", 'images_1: url "/a/b.jpg" is absolute'),
    ]),
    "drive letter": ({"images_1": {"type": "image", "url": "C:\\a.jpg"}}, [
        ("url-absolute", 'images_1: url "C:\\\\a.jpg" is absolute'),
    ]),
    "web address": ({"images_1": {"type": "image", "url": "https://a/b.jpg"}}, [
        ("url-absolute", 'images_1: url "https://a/b.jpg" is absolute'),
    ]),
    "outside": ({"images_1": {"type": "image", "url": "./a/../../b.jpg"}}, [
        ("url-outside", 'images_1: url "./a/../../b.jpg" leaves the image folder'),
    ]),
    "empty url": ({"images_1": {"type": "image", "url": ""}}, [("bad-url", 'images_1: url "" names no file')]),
    "folder": ({"images_1": {"type": "image", "url": "a/"}}, [("bad-url", 'images_1: url "a/" names no file')]),
    "dot": ({"images_1": {"type": "image", "url": "./."}}, [("bad-url", 'images_1: url "./." names no file')]),
    "NUL": ({"images_1": {"type": "image", "url": "a\0b"}}, [("bad-url", 'images_1: url "a\\u0000b" names no file')]),
    "video without frame_idx": ({"images_1": {"type": "video", "url": "a.mp4"}}, [
        ("bad-frame-idx", "frame_idx of images_1 must be a whole number from 0, it is missing"),
    ]),
    "negative frame_idx": ({"images_1": {"type": "video", "url": "a.mp4", "frame_idx": -1}}, [
        ("bad-frame-idx", "frame_idx of images_1 must be a whole number from 0, it is -1"),
    ]),
    "frame_idx is 1.0": ({"images_1": {"type": "video", "url": "a.mp4", "frame_idx": 1.0}}, [
        ("bad-frame-idx", "frame_idx of images_1 must be a whole number from 0, it is a number"),
    ]),
    "frame_idx is true": ({"images_1": {"type": "video", "url": "a.mp4", "frame_idx": True}}, [
        ("bad-frame-idx", "frame_idx of images_1 must be a whole number from 0, it is true"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame(name: str) -> None:
    changes, expected = FRAMES[name]
    data = text(frame(0), frame(1, **changes), frame(2)).replace(b'"null"', b"null")
    assert found(data) == [(kind, 2, detail) for kind, detail in expected]


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("./a/b.jpg", "a/b.jpg"),
        ("././a//b.jpg", "a/b.jpg"),
        ("a/../b.jpg", "b.jpg"),
        ("a/./b.jpg", "a/b.jpg"),
        (".hidden/..b.jpg", ".hidden/..b.jpg"),
        ("机器 人/图 1.jpg", "机器 人/图 1.jpg"),
        ("a:b.jpg", "a:b.jpg"),
        ("a\\b.jpg", "a\\b.jpg"),
    ],
)
def test_urls_that_stay_inside(url: str, clean: str) -> None:
    view = {"type": "image", "url": url}
    episode, findings = scan_episode(PATH, SPEC, data=text(frame(0), frame(1, images_1=view)))
    assert findings == [] and episode is not None and episode.urls[1][0] == clean


def test_action_in_some_frames_only() -> None:
    data = text(frame(0), frame(1, action=None), frame(2), frame(3, action=None))
    assert found(data) == [("mixed-action", 2, "action in 2 of 4 frames, not in this one")]


def test_no_action_where_states_cannot_stand_in() -> None:
    detail = "no action, and states of 3 dims cannot stand in for 2"
    assert found(text(frame(0, action=None), frame(1, action=None))) == [("no-action", 1, detail)]


def test_every_problem_of_a_file_is_found_with_its_line() -> None:
    data = text(frame(0, state=[1]), b"\n", frame(1, prompt=3, action=[None, 1]), b"{]\n", frame(2))
    assert [(kind, line) for kind, line, _ in found(data)] == [
        ("wrong-dims", 1),
        ("blank-line", 2),
        ("bad-vector", 3),
        ("bad-prompt", 3),
        ("bad-json", 4),
    ]


def test_read_episode_raises_the_first_error(tmp_path: Path) -> None:
    path = tmp_path / "a b" / "é.jsonl"
    path.parent.mkdir()
    path.write_bytes(text(frame(0, prompt=""), frame(1, state=[1, 2]), b"\n"))
    with pytest.raises(DataError) as caught:
        read_episode(path, SPEC)
    assert str(caught.value) == (
        f"{path}:2: state has 2 numbers where 3 are due. "
        "Correct the frame or remove the episode, then run dm05-prep index"
    )
    path.write_bytes(text(frame(0, prompt=""), frame(1)))
    assert read_episode(path, SPEC).prompts == ["", "pick: the bowl"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    cases = {"gone.jsonl": "No such file or directory", "loop.jsonl": "Too many levels of symbolic links"}
    for name, reason in cases.items():
        episode, findings = scan_episode(tmp_path / name, SPEC)
        assert episode is None
        assert [(item.kind, item.detail) for item in findings] == [("unreadable", f"cannot be read: {reason}")]


def test_every_kind_of_this_module_is_in_the_table() -> None:
    for _, expected in FILES.values():
        assert {kind for kind, *_ in expected} <= set(KINDS)


def same(one: Episode, other: Episode) -> bool:
    """Equal in every field."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("state", "action", "prompt_ids")
    ) and (one.prompts, one.urls, one.frame_idx.tolist(), one.is_robot.tolist()) == (
        other.prompts,
        other.urls,
        other.frame_idx.tolist(),
        other.is_robot.tolist(),
    )


SCRAPS = rb"""| |"|:|,|{|}|[|]|0|e9|1e999|NaN|true|null|\u003a|\|"state":|"a":1,|/|..|-|.|"type":"video",""".split(b"|")
SCRAPS += [b"\n", b"\r", b"\xff", b"\0"]


@settings(max_examples=400, deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 12), st.sampled_from(SCRAPS)), min_size=1, max_size=3)
)
def test_the_fast_and_the_careful_way_agree(cuts: list[tuple[int, int, bytes]]) -> None:
    """Whatever is done to a file: when the fast way takes it, the careful way finds nothing and reads the same."""
    odd = frame(2, prompt="\u200b")
    data = text(frame(0, x={"y": "z"}), frame(1, images_1={"type": "video", "url": "a.mp4", "frame_idx": 3}), odd)
    for place, length, scrap in cuts:
        data = data[:place] + scrap + data[place + length :]
    try:
        fast, said = module._fast(PATH, data, SPEC)
    except module._Odd:
        fast, said = None, []
    frames, findings = module._careful(PATH, data, SPEC)
    if fast is not None:
        assert findings == said
        assert same(fast, module._assemble(PATH, frames, SPEC))
    elif not any(item.severity == "error" for item in findings):
        module._assemble(PATH, frames, SPEC)
