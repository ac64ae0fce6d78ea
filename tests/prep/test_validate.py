"""Whole datasets through validation: folders, index, statistics, images; messages, output and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from dm05_prep.index import build_index
from dm05_prep.norm_stats import compute
from dm05_prep.validate import validate
from dm05_schemas.episode import read_episode
from dm05_schemas.errors import DataError
from dm05_schemas.index import FOREIGN, index_path
from dm05_schemas.json_schemas import load_schema
from dm05_schemas.workspace import Workspace
from whole_dataset import SPEC, C, Change, J, found, longer_episode, make_dataset, picture
from workspaces import write_vectors


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_dataset(tmp_path)


@pytest.mark.parametrize("deep", [False, True])
def test_a_faultless_dataset(workspace: Workspace, deep: bool) -> None:
    report = validate(workspace, SPEC, deep=deep)
    assert report.findings == ()
    assert (report.episodes, report.frames, report.images) == (2, 7, 14 if deep else 0)


def test_nothing_is_changed_by_looking(workspace: Workspace) -> None:
    before = {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")}
    validate(workspace, SPEC, deep=True)
    assert {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")} == before


STALE = "index_cache.json: the index is stale:"


def no_index(workspace: Workspace) -> None:
    (SPEC.root(workspace) / "index_cache.json").unlink()


def no_copy(workspace: Workspace) -> None:
    workspace.index_cache.unlink()


def other_copy(workspace: Workspace) -> None:
    index = json.loads(workspace.index_cache.read_text())
    del index["meta_data"]
    index["data"][f"data/toy/{J}"] = 99
    workspace.index_cache.write_text(json.dumps(index))


def broken_index(workspace: Workspace) -> None:
    (SPEC.root(workspace) / "index_cache.json").write_text('{"data": {"a": 1, "a": 2}}')


def wrong_count(workspace: Workspace) -> None:
    for path in (workspace.index_cache, SPEC.root(workspace) / "index_cache.json"):
        index = json.loads(path.read_text())
        del index["meta_data"]
        index["data"][f"data/toy/{J}"] = 99
        path.write_text(json.dumps(index))


def edited(workspace: Workspace) -> None:
    path = SPEC.root(workspace) / "index_cache.json"
    path.write_text(path.read_text().replace(f'{J}": 3', f'{J}": 4'))


def changed_behind_its_time(workspace: Workspace) -> None:
    path = SPEC.root(workspace) / J
    state = path.stat()
    path.write_bytes(path.read_bytes().replace(b"put", b"PUT"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def line_of_2_mib(number: int) -> Change:
    def change(workspace: Workspace) -> None:
        path = SPEC.root(workspace) / J
        lines = path.read_bytes().splitlines(keepends=True)
        lines[number] = lines[number].replace(b"{", b'{"blob": "' + b"x" * (1 << 21) + b'", ', 1)
        path.write_bytes(b"".join(lines))
        build_index(workspace, SPEC)
        compute(workspace, SPEC, 4, "absolute")

    return change


def one_frame(workspace: Workspace) -> None:
    path = SPEC.root(workspace) / J
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


def touched(workspace: Workspace) -> None:
    os.utime(SPEC.root(workspace) / J, ns=(1, 1))


def new_episode(workspace: Workspace) -> None:
    shutil.copy(SPEC.root(workspace) / J, SPEC.root(workspace) / "jsonl/z.jsonl")


DATASETS: dict[str, tuple[Change, list[tuple[str, str]]]] = {
    "no index": (no_index, [("index-missing", "index_cache.json: there is no index")]),
    "no copy": (no_copy, [
        ("index-missing", "WORKSPACE/index_cache.json: there is no copy of the index at the top of the workspace"),
    ]),
    "another copy": (other_copy, [
        ("index-copies", "WORKSPACE/index_cache.json: differs from index_cache.json"),
    ]),
    "broken index": (broken_index, [("index-broken", 'index_cache.json: key "a" stands twice')]),
    "wrong count": (wrong_count, [
        ("index-foreign", f"index_cache.json: {FOREIGN}"), ("index-count", f"{J}: has 3 frames, the index says 99"),
    ]),
    "edited index": (edited, [
        ("index-broken", "index_cache.json: its numbers do not fit its fingerprint (edited by hand?)"),
    ]),
    "changed behind its time": (changed_behind_its_time, [
        ("index-content", f"{J}: is not what the index says, though its time is"),
    ]),
    "huge first line": (line_of_2_mib(0), [("huge-line", f"{J}:1: line of 2.0 MiB")]),
    "huge last line": (line_of_2_mib(-1), [("huge-line", f"{J}:3: line of 2.0 MiB")]),
    "one frame": (one_frame, [
        ("index-stale", f"{STALE} 1 episode file of another size (episode_000.jsonl)"),
        ("one-frame", f"{J}: has 1 frame where at least 2 are due"),
    ]),
    "symlink to itself": (lambda w: (SPEC.root(w) / "jsonl/z.jsonl").symlink_to("z.jsonl"), [
        ("broken-link", "jsonl/z.jsonl: is a symlink to nothing or cannot be read"),
        ("index-stale", f"{STALE} 1 episode file not in the index (z.jsonl)"),
    ]),
    "file in place of a pack": (lambda w: (SPEC.root(w) / "pack").write_text(""), [
        ("pack-broken", "pack/pack.json: cannot read the pack: Not a directory"),
    ]),
    "touched": (touched, [
        ("index-stale", f"{STALE} 1 episode file modified since (episode_000.jsonl)"),
    ]),
    "new episode": (new_episode, [
        ("index-stale", f"{STALE} 1 episode file not in the index (z.jsonl)"),
    ]),
    "gone episode": (lambda w: (SPEC.root(w) / J).unlink(), [
        ("index-stale", f"{STALE} 1 episode file in the index but gone (episode_000.jsonl)"),
    ]),
    "longer episode": (longer_episode, [
        ("index-stale", f"{STALE} 1 episode file of another size (episode_000.jsonl)"),
    ]),
    "stray file": (lambda w: (SPEC.root(w) / "jsonl/notes.txt").write_text(""), [
        ("stray-file", "jsonl/notes.txt: is not an episode (.jsonl)"),
    ]),
    "hidden files": (lambda w: (SPEC.root(w) / "jsonl/._episode_000.jsonl").write_bytes(b"\0"), []),
    "symlink to no episode": (lambda w: (SPEC.root(w) / "jsonl/z.jsonl").symlink_to("nowhere"), [
        ("broken-link", "jsonl/z.jsonl: is a symlink to nothing or cannot be read"),
        ("index-stale", f"{STALE} 1 episode file not in the index (z.jsonl)"),
    ]),
    "no images": (lambda w: shutil.rmtree(SPEC.images(w)), [
        ("no-images", "image: there is no such folder, and no pack"),
    ]),
    "no episodes": (lambda w: [path.unlink() for path in SPEC.jsonl(w).iterdir()], [
        ("no-episodes", "jsonl: has no .jsonl files"),
        ("index-stale", f"{STALE} 2 episode files in the index but gone "
         "(episode_000.jsonl, ...)"),
    ]),
    "no dataset": (lambda w: shutil.rmtree(SPEC.root(w)), [("no-dataset", "DATASET: there is no such folder")]),
    "name that is not UTF-8": (lambda w: Path(f"{SPEC.jsonl(w)}/\udcff.jsonl").write_text(""), [
        ("bad-name", "jsonl: the file name '\\udcff.jsonl' is not UTF-8"),
    ]),
    "no statistics": (lambda w: shutil.rmtree(w.norm_stats_dir), [
        ("stats-missing", "WORKSPACE/norm_stats: no statistics of toy yet"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_datasets(workspace: Workspace, name: str) -> None:
    change, expected = DATASETS[name]
    change(workspace)
    for deep in (True, False):
        held = [
            (kind, text.replace(f"{SPEC.root(workspace)}:", "DATASET:").replace(f"{workspace.root}/", "WORKSPACE/"))
            for kind, text in found(workspace, deep)
        ]
        unseen = () if deep else ("index-count", "index-content")
        shorter = [(kind, text.replace("line of 2.0", "line of more than 1")) for kind, text in expected]
        assert held == (expected if deep else [item for item in shorter if item[0] not in unseen])


def stats_files(workspace: Workspace) -> tuple[Path, Path]:
    parquet, json_file = (next(workspace.norm_stats_dir.glob(f"*.{suffix}")) for suffix in ("parquet", "json"))
    return parquet, json_file


def test_statistics_of_other_episodes(workspace: Workspace) -> None:
    longer_episode(workspace)
    build_index(workspace, SPEC)
    parquet, _ = stats_files(workspace)
    text = f"{parquet}: was computed from other episodes than those here now"
    assert found(workspace, deep=False) == [("stats-stale", text)]


def test_a_copy_of_the_dataset_keeps_its_statistics(workspace: Workspace, tmp_path: Path) -> None:
    for path in SPEC.jsonl(workspace).iterdir():
        os.utime(path)
    build_index(workspace, SPEC)
    assert found(workspace) == []


def test_statistics_that_cannot_be_used(workspace: Workspace) -> None:
    parquet, json_file = stats_files(workspace)
    whole = json.loads(json_file.read_text())
    json_file.write_text(json.dumps(whole).replace("[", "[NaN, ", 1))
    assert found(workspace, deep=False) == [("stats-broken", f"{json_file}: NaN is not a JSON number")]
    whole["norm_stats"]["state"]["mean"][0] += 1
    json_file.write_text(json.dumps(whole))
    assert found(workspace, deep=False) == [("stats-broken", f"{json_file}: differs from the parquet beside it")]
    json_file.unlink()
    assert found(workspace, deep=False) == [("stats-broken", f"{json_file}: is missing beside the parquet")]
    parquet.write_bytes(b"PAR1")
    assert found(workspace, deep=False) == [("stats-broken", f"{parquet}: is not a readable parquet file")]


def test_statistics_of_other_dims_and_under_another_name(workspace: Workspace) -> None:
    parquet, json_file = stats_files(workspace)
    for path in (parquet, json_file):
        shutil.copy(path, path.with_stem("toy_0123456789abcdef"))
    whole = json.loads(json_file.read_text())
    whole["norm_stats"]["action"] = whole["norm_stats"]["state"]
    parquet.unlink()
    json_file.write_text(json.dumps(whole))
    assert found(workspace, deep=False) == [
        (
            "stats-broken",
            f"{workspace.root}/norm_stats/toy_0123456789abcdef.parquet: "
            "holds statistics of toy, chunk size 4, absolute, which belong under another name",
        ),
        ("stats-dims", f"{json_file}: action has 4 dims, those of toy have 3"),
    ]


def test_a_near_constant_dim_is_a_warning(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    state, action = np.zeros((200, 4)), np.random.default_rng(0).normal(size=(200, 3))
    state[5, 3] = 1
    write_vectors(workspace, SPEC, [(state, action)])
    compute(workspace, SPEC, 4, "absolute")
    parquet, _ = stats_files(workspace)
    [_, (kind, text)] = [item for item in found(workspace, deep=False) if item[0] in ("no-images", "stats-narrow")]
    assert (kind, text) == (
        "stats-narrow",
        f"{parquet}: state[3]: q01 and q99 are 0, so that it always trains as 0 though it moves",
    )


def test_several_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = make_dataset(tmp_path, lengths=(3,) * 9)
    for path in (SPEC.images(workspace) / "episode_004").rglob("*.jpg"):
        path.write_bytes(b"")
    (SPEC.root(workspace) / "jsonl/episode_007.jsonl").write_text("\n")
    monkeypatch.setattr("dm05_prep.validate.deep._BATCH_BYTES", 1)
    reports = [validate(workspace, SPEC, deep=True, jobs=jobs) for jobs in (1, 3)]
    assert reports[0].findings == reports[1].findings and len(reports[0].findings) == 9


def test_what_is_refused_when_reading_is_found_and_the_reverse(workspace: Workspace) -> None:
    path = SPEC.root(workspace) / J
    good = path.read_bytes()
    for change in (b"\n", b"{}\n", b"\xff\n", good.splitlines()[0] + b",\n", b" \n", b'{"state": NaN}\n', b""):
        path.write_bytes(good + change)
        try:
            read_episode(path, SPEC)
            first = None
        except DataError as error:
            first = str(error).partition(". ")[0].replace(f"{SPEC.root(workspace)}/", "")
        errors = [text for kind, text in found(workspace) if kind not in ("index-stale",)]
        assert errors[:1] == ([] if first is None else [first])


def run(
    workspace: Workspace, *flags: str, cwd: Path | None = None, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, behind another one that starts it."""
    (workspace.root / "datasets.toml").write_text(
        '[toy]\nfolder = "data/toy"\nimage_keys = ["images_1", "images_2"]\nimage_prompts = ["Head", "Wrist"]\n'
        'state_desc = ["joint", "joint", "joint", "gripper"]\naction_dim = 3\n'
    )
    command = [
        sys.executable,
        "-c",
        "from dm05_prep.cli import main; main()",
        "validate",
        "--dataset-name",
        "toy",
        "--workspace",
    ]
    return subprocess.run(
        [*before, *command, str(workspace.root), *flags], capture_output=True, text=True, cwd=cwd, check=False
    )  # fmt: skip


def test_the_table_and_the_exit_code(workspace: Workspace) -> None:
    assert run(workspace).returncode == 0
    for path in (SPEC.images(workspace) / "episode_000").rglob("*.jpg"):
        path.unlink()
    done = run(workspace, "--deep")
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("validate toy: 2 episodes, 7 frames (deep, 14 images) in ")
    assert lines[1:] == [
        'error    image-missing       6  data/toy/jsonl/episode_000.jsonl:1: images_1: there is no '
        '"episode_000/camera_0/000000.jpg" (also :2, :3)',
        f"mend     image-missing: Extract it again with dm05-prep dataset --subset toy {workspace.flag}",
        "bad      toy has 6 errors",
    ]  # fmt: skip
    assert len(run(workspace, "--deep", "--all").stdout.splitlines()) == 10


@pytest.mark.parametrize("index", ["stale", "broken", "missing"])
def test_frames_that_no_index_tells_are_not_said_to_be_none(workspace: Workspace, index: str) -> None:
    if index == "stale":
        path = SPEC.jsonl(workspace) / "episode_000.jsonl"
        path.write_text(path.read_text() * 2)
    elif index == "broken":
        index_path(workspace, SPEC).write_text("{")
    else:
        index_path(workspace, SPEC).unlink()
    done = run(workspace)
    assert done.returncode == 1
    assert done.stdout.startswith("validate toy: 2 episodes, frames not counted (fast) in ")
    report = json.loads(run(workspace, "--json", "-").stdout)
    jsonschema.validate(report, load_schema("validate_report"))
    assert (report["episodes"], report["frames"]) == (2, None)
    assert validate(workspace, SPEC, deep=True).frames == (10 if index == "stale" else 7)


def test_the_json_report_has_its_schema(workspace: Workspace) -> None:
    picture(workspace).unlink()
    out = workspace.root / "report.json"
    done = run(workspace, "--deep", "--json", str(out), "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    report = json.loads(out.read_text())
    jsonschema.validate(report, load_schema("validate_report"))
    assert report["findings"] == [
        {
            "kind": "image-missing",
            "severity": "error",
            "path": "data/toy/jsonl/episode_000.jsonl",
            "line": 2,
            "detail": 'images_1: there is no "episode_000/camera_0/000001.jpg"',
        }
    ]
    assert report["groups"][0] | {"title": ""} == {
        "kind": "image-missing", "severity": "error", "title": "", "count": 1,
        "fix": f"Extract it again with dm05-prep dataset --subset toy {workspace.flag}",
    }  # fmt: skip
    assert json.loads(run(workspace, "--deep", "--json", "-").stdout)["errors"] == 1


def test_annotations_for_github(workspace: Workspace) -> None:
    picture(workspace).write_bytes(b"")
    (SPEC.root(workspace) / "jsonl/a,b:c%.jsonl").write_text("\n")
    done = run(workspace, "--deep", "--format", "github", cwd=workspace.root)
    flags = f"--dataset-name toy {workspace.flag}"
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "::error file=data/toy/jsonl/a%2Cb%3Ac%25.jsonl,title=empty-episode::has no frames. "
        f"Remove the file, then run dm05-prep index {flags}",
        "::error file=data/toy/jsonl/a%2Cb%3Ac%25.jsonl,line=1,title=blank-line::blank line. "
        f"dm05-prep validate {flags} --fix mends it",
        "::error file=data/toy/index_cache.json,title=index-stale::the index is stale: "
        "1 episode file not in the index (a,b:c%25.jsonl). "
        f"dm05-prep index {flags} (or validate --fix) writes it",
        f"::error file=data/toy/{C},title=image-empty::is empty (images_1 of episode_000.jsonl:2). "
        f"Extract it again with dm05-prep dataset --subset toy {workspace.flag}",
        "bad      toy has 4 errors",
    ]


def test_flags_that_do_not_go_together(workspace: Workspace) -> None:
    done = run(workspace, "--jobs", "0")
    assert (done.returncode, done.stderr) == (2, "dm05-prep: error: --jobs must be 1 or more, not 0\n")
    done = run(workspace, "--sample", "3")
    assert (done.returncode, done.stderr) == (2, "dm05-prep: error: --sample and --decode need --deep\n")


UNREADABLE = {
    "episode file": J,
    "episode folder": "jsonl",
    "index": "index_cache.json",
    "statistics": "../../norm_stats",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_may_not_be_read_is_a_finding(workspace: Workspace, tmp_path: Path, name: str) -> None:
    path = SPEC.root(workspace) / UNREADABLE[name]
    path.chmod(0)
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    if drop and not shutil.which("setpriv"):
        pytest.skip("runs as root, and there is no setpriv")
    for flag in ("--deep", "--fix"):
        out = tmp_path / "new" / "report.json"
        done = run(workspace, flag, "--json", str(out), before=drop)
        assert (done.returncode, done.stderr) == (1, "")
        assert "cannot be read: Permission denied" in json.dumps(json.loads(out.read_text())["findings"])
        shutil.rmtree(out.parent)
    path.chmod(0o755)
