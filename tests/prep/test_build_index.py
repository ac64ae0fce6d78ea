"""Writing the index: counts, copies, what is read again and what is not, and files that are no episodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from dm05_prep import index as module
from dm05_prep.index import build_index
from dm05_prep.index_scan import count_bytes
from dm05_prep.reassemble import plan_of, reassemble
from dm05_schemas.errors import DataError
from dm05_schemas.index import check_fresh, index_path, read_index, require_fresh
from dm05_schemas.json_schemas import load_schema
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace
from hypothesis import given
from hypothesis import strategies as st
from tars import HOME, honest, split, write_parts
from workspaces import make_spec, random_episodes, write_vectors

SPEC = make_spec()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path / "work space 图")
    write_vectors(workspace, SPEC, random_episodes(0, [3, 5, 4], SPEC))
    return workspace


def test_the_file_and_its_copy(workspace: Workspace) -> None:
    result = build_index(workspace, SPEC)
    assert (result.episodes, result.frames, result.computed) == (3, 12, True)
    assert result.path == SPEC.root(workspace) / "index_cache.json"
    assert workspace.index_cache.read_bytes() == result.path.read_bytes()
    document = json.loads(result.path.read_bytes())
    jsonschema.validate(document, load_schema("index_cache"))
    assert document["data"] == {
        "data/toy/jsonl/episode_000.jsonl": 3,
        "data/toy/jsonl/episode_001.jsonl": 5,
        "data/toy/jsonl/episode_002.jsonl": 4,
    }
    assert list(document["data"]) == sorted(document["data"])
    assert document["meta_data"]["total_samples"] == 12 and document["meta_data"]["total_jsonl_files"] == 3
    index = require_fresh(workspace, SPEC)
    assert index.fingerprint == result.fingerprint and index.frames == 12
    assert index.episodes[SPEC.jsonl(workspace) / "episode_001.jsonl"] == 5


def test_nothing_is_done_when_it_is_current(workspace: Workspace) -> None:
    build_index(workspace, SPEC)
    before = index_path(workspace, SPEC).stat().st_mtime_ns
    assert not build_index(workspace, SPEC).computed
    assert index_path(workspace, SPEC).stat().st_mtime_ns == before
    workspace.index_cache.unlink()
    assert build_index(workspace, SPEC).computed and workspace.index_cache.is_file()


def test_only_changed_files_are_read_again(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_index(workspace, SPEC)
    read: list[str] = []
    real = module.count_files

    def spy(paths):
        read.extend(Path(path).name for path in paths)
        return real(paths)

    monkeypatch.setattr(module, "count_files", spy)
    path = SPEC.jsonl(workspace) / "episode_001.jsonl"
    path.write_bytes(path.read_bytes() * 2)
    second = build_index(workspace, SPEC)
    assert read == ["episode_001.jsonl"] and second.frames == 17 and second.fingerprint != first.fingerprint
    os.utime(path)
    third = build_index(workspace, SPEC)
    assert read == ["episode_001.jsonl"] * 2 and third.fingerprint == second.fingerprint and third.computed
    build_index(workspace, SPEC, force=True)
    assert len(read) == 5


def test_counts_known_from_the_archive_are_taken(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build_index(workspace, SPEC)
    document = index_path(workspace, SPEC).read_bytes()
    index_path(workspace, SPEC).unlink()
    known = {path: count_bytes(path.read_bytes(), path) for path in SPEC.jsonl(workspace).iterdir()}
    monkeypatch.setattr(module, "count_files", lambda paths: pytest.fail("nothing has to be read"))
    assert build_index(workspace, SPEC, known=known).fingerprint == plain.fingerprint
    assert index_path(workspace, SPEC).read_bytes() == document


def test_episodes_are_counted_while_they_are_extracted(tmp_path: Path) -> None:
    lines = [b'{"a": %d}\n' % number * (number + 2) for number in range(3)]
    files = {f"{HOME}jsonl/e_{number}.jsonl": text for number, text in enumerate(lines)}
    files[f"{HOME}jsonl/more/empty.jsonl"] = b""
    source = write_parts(tmp_path / "parts", split(honest(files), 700))
    workspace = Workspace(tmp_path / "work")
    spec = lookup("libero_pi0_all", workspace)
    plan = plan_of(source, workspace, spec, None)
    counted = reassemble(plan, keep_parts=True, images=None, quiet=True).counted
    folder = spec.jsonl(workspace)
    assert {name: (found.frames, found.size) for name, found in counted.items()} == {
        f"jsonl/e_{number}.jsonl": (number + 2, len(text)) for number, text in enumerate(lines)
    }
    (folder / "more/empty.jsonl").unlink()
    known = {folder.parent / name: found for name, found in counted.items()}
    path = build_index(workspace, spec, known=known).path
    written = path.read_bytes()
    build_index(workspace, spec, force=True)
    assert path.read_bytes() == written


def test_known_counts_of_another_size_are_not_taken(workspace: Workspace) -> None:
    path = SPEC.jsonl(workspace) / "episode_000.jsonl"
    known = {path: count_bytes(path.read_bytes() * 2, path)}
    assert build_index(workspace, SPEC, known=known).frames == 12


def test_an_edited_index_is_made_anew(workspace: Workspace) -> None:
    path = build_index(workspace, SPEC).path
    right = path.read_bytes()
    path.write_bytes(right.replace(b'episode_000.jsonl": 3', b'episode_000.jsonl": 9'))
    assert path.read_bytes() != right
    assert build_index(workspace, SPEC).computed
    assert path.read_bytes() == right


def test_the_fingerprint_is_of_the_data_alone(workspace: Workspace, tmp_path: Path) -> None:
    first = build_index(workspace, SPEC)
    shutil.copytree(workspace.root, tmp_path / "copy")
    copy = Workspace(tmp_path / "copy")
    for path in SPEC.jsonl(copy).iterdir():
        os.utime(path)
    assert build_index(copy, SPEC).fingerprint == first.fingerprint


def test_several_processes_write_the_same(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    build_index(workspace, SPEC)
    document = index_path(workspace, SPEC).read_bytes()
    monkeypatch.setattr(module, "_PARALLEL_BYTES", 0)
    monkeypatch.setattr(module, "_BATCH_BYTES", 1)
    build_index(workspace, SPEC, force=True, jobs=3)
    assert index_path(workspace, SPEC).read_bytes() == document


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "{path}: has no frames. Remove the file, then run dm05-prep index {flags}"),
        (b"{}\n", "{path}: has 1 frame where at least 2 are due. Remove the file, then run dm05-prep index {flags}"),
        (b"{}", "{path}: has 1 frame where at least 2 are due. Remove the file, then run dm05-prep index {flags}"),
        (b"{}\n\n{}\n", "{path}:2: blank line. dm05-prep validate {flags} --fix mends it"),
        (b"{}\n{}\n\n", "{path}:3: blank line. dm05-prep validate {flags} --fix mends it"),
        (b"{}\n \t\n{}\n", "{path}:2: line of white space only. dm05-prep validate {flags} --fix mends it"),
        (b"{}\r\n\r\n{}\r\n", "{path}:2: blank line. dm05-prep validate {flags} --fix mends it"),
        ("{}\n\u3000\n{}\n".encode(), "{path}:2: line of white space only. dm05-prep validate {flags} --fix mends it"),
        ("{}\n{}\n".encode("utf-16"), "{path}: is UTF-16, not UTF-8. dm05-prep validate {flags} --fix mends it"),
    ],
)
def test_files_that_are_no_episodes(workspace: Workspace, data: bytes, text: str) -> None:
    path = SPEC.jsonl(workspace) / "episode_001.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        build_index(workspace, SPEC)
    assert str(caught.value) == text.format(path=path, flags=f"--dataset-name toy {workspace.flag}")
    assert not index_path(workspace, SPEC).exists() and not workspace.index_cache.exists()


LINE = st.sampled_from([b"{}", b'{"a": "\\n"}', b"{", b" {}", b"x", b"\xe2\x80\xa8{}", b"{}\r", b"{}{}"])


@given(st.lists(LINE, min_size=2, max_size=9), st.booleans())
def test_lines_are_counted_as_splitting_would(lines: list[bytes], ended: bool) -> None:
    data = b"\n".join(lines) + (b"\n" if ended else b"")
    assert count_bytes(data, "x").frames == len(lines)
    assert count_bytes(memoryview(bytearray(data)), "x") == count_bytes(data, "x")


def test_a_folder_without_episodes(workspace: Workspace) -> None:
    for path in SPEC.jsonl(workspace).iterdir():
        path.unlink()
    folder = SPEC.jsonl(workspace)
    mend = f"dm05-prep dataset --subset toy {workspace.flag} lays a dataset out"
    with pytest.raises(DataError) as caught:
        build_index(workspace, SPEC)
    assert str(caught.value) == f"{folder}: has no .jsonl files. {mend}"
    folder.rmdir()
    with pytest.raises(DataError) as caught:
        build_index(workspace, SPEC)
    assert str(caught.value) == f"{folder}: there is no such folder. {mend}"


def test_episodes_in_subfolders_and_symlinks(workspace: Workspace, tmp_path: Path) -> None:
    folder = SPEC.jsonl(workspace)
    (folder / "more").mkdir()
    (folder / "episode_000.jsonl").rename(folder / "more" / "episode_000.jsonl")
    (folder / "more" / "loop").symlink_to(folder)
    (folder / "episode_001.jsonl").rename(tmp_path / "far.jsonl")
    (folder / "episode_001.jsonl").symlink_to(tmp_path / "far.jsonl")
    build_index(workspace, SPEC)
    index = require_fresh(workspace, SPEC)
    assert list(index.entries) == ["episode_001.jsonl", "episode_002.jsonl", "more/episode_000.jsonl"]
    (tmp_path / "far.jsonl").unlink()
    with pytest.raises(DataError) as caught:
        build_index(workspace, SPEC)
    path = folder / "episode_001.jsonl"
    assert str(caught.value) == f"{path}: is no file that can be read (a symlink to nothing?). Remove or restore it"


def command(workspace: Workspace, *flags: str) -> subprocess.CompletedProcess[str]:
    (workspace.root / "datasets.json").write_text(
        json.dumps(
            {
                "toy": {
                    "folder": "data/toy",
                    "image_keys": ["images_1", "images_2"],
                    "image_prompts": ["Head", "Wrist"],
                    "state_desc": ["joint", "joint", "joint", "gripper"],
                    "action_dim": 3,
                }
            }
        )
    )
    start = [sys.executable, "-c", "from dm05_prep.cli import main; main()", "index", "--dataset-name", "toy"]
    environment = os.environ | {"WORKSPACE_DIR": str(workspace.root)}
    return subprocess.run([*start, *flags], capture_output=True, text=True, env=environment, check=False)


def test_the_command(workspace: Workspace) -> None:
    path = index_path(workspace, SPEC)
    missing = command(workspace, "--check")
    again = f"Run dm05-prep index --dataset-name toy --workspace '{workspace.root}'"
    assert (missing.returncode, missing.stderr) == (1, f"dm05-prep: error: {path}: there is no index. {again}\n")
    written = command(workspace)
    assert (written.returncode, written.stdout) == (0, f"index      3 episodes, 12 frames, written: {path}\n")
    assert command(workspace).stdout == f"index      3 episodes, 12 frames, already current: {path}\n"
    assert command(workspace, "--check").stdout == f"index      3 episodes, 12 frames, current: {path}\n"
    assert command(workspace, "--rebuild", "--quiet").stdout == ""
    assert command(workspace, "--check", "--rebuild").returncode == 2
    os.utime(SPEC.jsonl(workspace) / "episode_002.jsonl")
    stale = command(workspace, "--check")
    reason = "1 episode file modified since (episode_002.jsonl)"
    assert stale.returncode == 1
    assert stale.stderr == f"dm05-prep: error: {path}: the index is stale: {reason}. {again}\n"
    assert check_fresh(read_index(path, workspace, SPEC)) == [reason]
