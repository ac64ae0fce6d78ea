"""Reading indexes, those of other code too."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from dm05_schemas.errors import DataError
from dm05_schemas.index import (
    EpisodeEntry,
    check_fresh,
    fingerprint_of,
    index_path,
    list_episodes,
    read_index,
    require_fresh,
)
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace

SPEC = lookup("libero_goal", Workspace(Path(".")))
AGAIN = "Run dm05-prep index --dataset-name libero_goal --workspace"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path)
    SPEC.jsonl(workspace).mkdir(parents=True)
    for name in ("a", "b"):
        (SPEC.jsonl(workspace) / f"{name}.jsonl").write_text("{}\n{}\n")
    return workspace


def write(workspace: Workspace, document: object) -> Path:
    path = index_path(workspace, SPEC)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    "prefix",
    [
        "data/libero/libero_goal/jsonl/",
        "./data/libero/libero_goal/jsonl/",
        "data/libero//libero_goal/./jsonl/",
        "jsonl/",
        "./jsonl/",
        "{root}/data/libero/libero_goal/jsonl/",
    ],
)
def test_every_form_of_a_key(workspace: Workspace, prefix: str) -> None:
    start = prefix.format(root=workspace.root)
    path = write(
        workspace, {"meta_data": {"total_jsonl_files": 2}, "data": {f"{start}a.jsonl": 2, f"{start}b.jsonl": 2}}
    )
    index = read_index(path, workspace, SPEC)
    assert check_fresh(index) == []
    assert index.episodes == {SPEC.jsonl(workspace) / "a.jsonl": 2, SPEC.jsonl(workspace) / "b.jsonl": 2}
    assert index.fingerprint is None and index.frames == 4


def test_absolute_keys_through_a_symlink(workspace: Workspace, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(workspace.root / "data/libero")
    start = f"{workspace.root}/data/libero/libero_goal/jsonl"
    write(workspace, {"data": {f"{start}/a.jsonl": 2, f"{start}/b.jsonl": 2}})
    other = Workspace(tmp_path, tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "libero").symlink_to(workspace.root / "data/libero")
    index = read_index(index_path(other, SPEC), other, SPEC)
    assert len(index.episodes) == 2 and not index.outside


def test_an_index_of_other_code_is_stale_when_a_file_is_younger(workspace: Workspace) -> None:
    path = write(workspace, {"data": {"jsonl/a.jsonl": 2, "jsonl/b.jsonl": 2}})
    assert check_fresh(read_index(path, workspace, SPEC)) == []
    later = path.stat().st_mtime_ns + 10**9
    os.utime(SPEC.jsonl(workspace) / "b.jsonl", ns=(later, later))
    assert check_fresh(read_index(path, workspace, SPEC)) == ["1 episode file modified since (b.jsonl)"]


def test_an_index_of_other_code_is_not_relied_on(workspace: Workspace) -> None:
    path = write(workspace, {"data": {"jsonl/a.jsonl": 2, "jsonl/b.jsonl": 2}})
    with pytest.raises(DataError) as caught:
        require_fresh(workspace, SPEC)
    what = "was not written by this program and lacks what shows that a file has changed"
    assert str(caught.value) == f"{path}: {what}. {AGAIN} {workspace.root}"


@pytest.mark.parametrize("key", ["data", "files", "meta_data"])
def test_an_index_that_was_edited(workspace: Workspace, key: str) -> None:
    entries = {name: EpisodeEntry(2, 6, 1, 2) for name in ("a.jsonl", "b.jsonl")}
    document: dict[str, dict[str, object]] = {
        "meta_data": {"fingerprint": fingerprint_of("jsonl", entries)},
        "data": {f"jsonl/{name}": entry.frames for name, entry in entries.items()},
        "files": {f"jsonl/{name}": entry[1:] for name, entry in entries.items()},
    }
    path = write(workspace, document)
    assert read_index(path, workspace, SPEC).entries == entries
    edits = {"data": ("jsonl/a.jsonl", 3), "files": ("jsonl/a.jsonl", [6, 1, 3]), "meta_data": ("fingerprint", "00")}
    name, value = edits[key]
    document[key][name] = value
    write(workspace, document)
    with pytest.raises(DataError) as caught:
        read_index(path, workspace, SPEC)
    assert str(caught.value) == (
        f"{path}: its numbers do not fit its fingerprint (edited by hand?). {AGAIN} {workspace.root}"
    )


def test_entries_that_are_no_files(workspace: Workspace) -> None:
    folder = SPEC.jsonl(workspace)
    (folder / "circle.jsonl").symlink_to("circle.jsonl")
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "folder.jsonl").mkdir()
    found = list_episodes(folder)
    assert list(found) == ["a.jsonl", "b.jsonl", "circle.jsonl", "pipe.jsonl"]
    assert found["circle.jsonl"] == found["pipe.jsonl"] == (-1, -1)


def test_keys_that_lie_elsewhere(workspace: Workspace) -> None:
    elsewhere = "/other/machine/libero_goal/jsonl/a.jsonl"
    write(workspace, {"data": {elsewhere: 2, "jsonl/b.jsonl": 2}})
    with pytest.raises(DataError) as caught:
        require_fresh(workspace, SPEC)
    assert str(caught.value) == (
        f"{index_path(workspace, SPEC)}: the index is stale: 1 episode file not in the index (a.jsonl); "
        f"1 episode file in the index but gone ({elsewhere}). {AGAIN} {workspace.root}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON at column 1: Expecting value"),
        ("[]", "must hold a JSON object"),
        ('{"meta_data": {}}', 'is not an index: no "data"'),
        ('{"data": {"jsonl/a.jsonl": "2"}}', "number of frames of 'jsonl/a.jsonl' is '2'"),
        ('{"data": {"jsonl/a.jsonl": -1}}', "number of frames of 'jsonl/a.jsonl' is -1"),
        ('{"data": {"jsonl/a.jsonl": 1.0}}', "number of frames of 'jsonl/a.jsonl' is 1.0"),
        ('{"data": {"a": 1, "a": 1}}', 'key "a" stands twice'),
        ('{"data": {"jsonl/a.jsonl": 1, "./jsonl/a.jsonl": 1}}', "a.jsonl stands twice, under two forms of its path"),
    ],
)
def test_what_is_no_index(workspace: Workspace, text: str, message: str) -> None:
    path = index_path(workspace, SPEC)
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_index(path, workspace, SPEC)
    assert str(caught.value) == f"{path}: {message}. {AGAIN} {workspace.root}"


def test_no_index(workspace: Workspace) -> None:
    with pytest.raises(DataError) as caught:
        require_fresh(workspace, SPEC)
    assert str(caught.value) == f"{index_path(workspace, SPEC)}: there is no index. {AGAIN} {workspace.root}"


def test_a_name_that_is_not_utf8(workspace: Workspace) -> None:
    folder = SPEC.jsonl(workspace)
    try:
        (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.jsonl"))).write_text("")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(DataError) as caught:
        list_episodes(folder)
    assert str(caught.value) == f"{folder}: the file name '\\udcff.jsonl' is not UTF-8. Rename the file"


def test_a_dataset_that_is_gone_is_fetched_by_the_command_that_is_named(workspace: Workspace) -> None:
    write(workspace, {"data": {}})
    shutil.rmtree(SPEC.jsonl(workspace))
    with pytest.raises(DataError) as caught:
        require_fresh(workspace, SPEC)
    command = f"dm05-prep dataset --subset libero_goal {workspace.flag}"
    assert str(caught.value) == f"{SPEC.jsonl(workspace)}: there is no such folder. {command} lays a dataset out"
