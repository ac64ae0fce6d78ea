"""Datasets by name, built in and the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dm05_schemas.errors import DataError
from dm05_schemas.registry import BUILT_IN, all_specs, lookup, read_specs
from dm05_schemas.workspace import Workspace

GOOD = {
    "folder": "data/my robot",
    "image_keys": ["images_1"],
    "image_prompts": ["Head"],
    "state_desc": ["joint", "eef", "gripper"],
    "action_dim": 3,
}
TOML = """
["my_robot"]
folder = "data/my robot"
image_keys = ["images_1"]
image_prompts = ["Head"]
state_desc = ["joint", "eef", "gripper"]
action_dim = 3
action_mode = "relative"
robot_type = "机器人"
"""


def test_the_six_libero_subsets(tmp_path: Path) -> None:
    specs = all_specs(Workspace(tmp_path))
    assert list(specs) == [
        "libero_pi0_all", "libero_goal", "libero_10", "libero_spatial", "libero_object", "libero_oft_all",
    ]  # fmt: skip
    spec = specs["libero_pi0_all"]
    assert (spec.image_keys, spec.image_prompts) == (("images_1", "images_2"), ("Head", "Left wrist"))
    assert (spec.robot_type, spec.state_dim, spec.action_dim, spec.gripper_dims) == ("Franka", 8, 7, (6, 7))
    assert (spec.action_mode, spec.state_in_prompt, spec.speed, spec.control_mode) == ("absolute", False, "0.5", None)
    assert spec.jsonl(Workspace(tmp_path)) == tmp_path / "data/libero/libero_pi0_all/jsonl"
    assert spec.images(Workspace(tmp_path)) == tmp_path / "data/libero/libero_pi0_all/image"
    assert specs["libero_goal"].images(Workspace(tmp_path)) == tmp_path / "data/libero/libero_goal/video"


def test_an_unknown_name_is_answered_with_near_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        lookup("libero_pi0_al", Workspace(tmp_path))
    text = "no dataset is called 'libero_pi0_al'. Did you mean libero_pi0_all or libero_spatial or libero_goal? "
    assert str(caught.value) == text + "dm05-prep datasets lists them all"
    with pytest.raises(DataError) as caught:
        lookup("zzz", Workspace(tmp_path))
    assert str(caught.value) == "no dataset is called 'zzz'. dm05-prep datasets lists them all"


def test_entries_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(tmp_path)
    (tmp_path / "datasets.toml").write_text(TOML, encoding="utf-8")
    spec = lookup("my_robot", workspace)
    assert (spec.folder, spec.jsonl_dir, spec.image_dir) == (Path("data/my robot"), "jsonl", "image")
    assert (spec.action_mode, spec.robot_type, spec.gripper_dims) == ("relative", "机器人", (2,))
    assert lookup("libero_10", workspace) in BUILT_IN
    other = tmp_path / "elsewhere.json"
    other.write_text(json.dumps({"libero_10": GOOD}))
    monkeypatch.setenv("DM05_DATASETS", str(other))
    assert lookup("libero_10", workspace).action_dim == 3
    assert "my_robot" not in all_specs(workspace)
    monkeypatch.setenv("DM05_DATASETS", str(tmp_path / "gone.toml"))
    with pytest.raises(DataError) as caught:
        all_specs(workspace)
    assert str(caught.value) == f"{tmp_path}/gone.toml: $DM05_DATASETS names no file. Correct or unset DM05_DATASETS"


def test_two_files_are_one_too_many(tmp_path: Path) -> None:
    for name in ("datasets.toml", "datasets.json"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError) as caught:
        all_specs(Workspace(tmp_path))
    assert str(caught.value) == f"{tmp_path}/datasets.toml: there is a datasets.json beside it. Keep one of the two"


BAD: list[tuple[dict[str, object], str]] = [
    ({"action_dims": 3}, "unknown key 'action_dims'. Did you mean action_dim?"),
    ({"action_dim": "3"}, "action_dim must be an integer, not '3'"),
    ({"action_dim": True}, "action_dim must be an integer, not True"),
    ({"action_dim": 33}, "action_dim must be 1 to 32, not 33"),
    ({"state_in_prompt": 1}, "state_in_prompt must be true or false, not 1"),
    ({"image_keys": "images_1"}, "image_keys must be a list of strings"),
    ({"image_keys": ["a", "a"]}, "image_keys must name at least one camera, each once"),
    ({"image_keys": ["state"]}, "image_keys must not name 'state', which is another part of a frame"),
    ({"image_prompts": []}, "1 image_keys need as many image_prompts, not 0"),
    ({"state_desc": ["hand"]}, "state_desc must name every state dimension with one of joint, eef, gripper"),
    ({"folder": "/data/x"}, "folder must be a relative path that stays inside, not '/data/x'"),
    ({"folder": "../x"}, "folder must be a relative path that stays inside, not '../x'"),
    ({"image_dir": ""}, "image_dir must be a relative path that stays inside, not ''"),
    ({"action_mode": "delta"}, "action_mode must be absolute or relative, not 'delta'"),
    (
        {"action_mode": "relative", "action_dim": 2},
        "relative mode needs as many action as state dimensions, not 2 and 3",
    ),
]


@pytest.mark.parametrize(("change", "text"), BAD)
def test_entries_that_are_wrong(tmp_path: Path, change: dict[str, object], text: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"x": GOOD | change}))
    with pytest.raises(DataError) as caught:
        read_specs(path)
    assert str(caught.value) == f"{path}: [x]: {text}"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[", "cannot be read: not JSON at column 2: Expecting value. Mend the file"),
        ('{"x": {}, "x": {}}', 'cannot be read: key "x" stands twice. Mend the file'),
        ("[]", "must hold one table a dataset"),
        ('{"x": 1}', "[x]: must be a table of keys and values"),
        ('{"x": {}}', "[x]: folder, image_keys, image_prompts, state_desc, action_dim must be given"),
        (json.dumps({"a/b": GOOD}), "[a/b]: a name holds letters, digits, '_', '-' and '.' only"),
    ],
)  # fmt: skip
def test_files_that_are_wrong(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_specs(path)
    assert str(caught.value) == f"{path}: {text}"
