"""Whole datasets through validation: folders, index, statistics, images; messages, output and exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from dm05_prep.index import build_index
from dm05_prep.norm_stats import compute
from dm05_prep.pack import build_pack
from dm05_prep.validate import validate
from dm05_prep.validate.image_checks import check_image
from dm05_schemas.episode import read_episode
from dm05_schemas.errors import DataError
from dm05_schemas.findings import KINDS
from dm05_schemas.image import decode_rgb
from dm05_schemas.json_schemas import load_schema
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace
from PIL import Image
from workspaces import make_frame, make_spec, random_episodes, write_lines, write_vectors

SPEC = make_spec()


def encoded(kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (32, 24), seed: int = 0) -> bytes:
    """A picture as a file's bytes."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(sink, kind)
    return sink.getvalue()


def make_dataset(root: Path, lengths: tuple[int, ...] = (3, 4), spec: DatasetSpec = SPEC) -> Workspace:
    """A complete, faultless dataset: frames, images, index, statistics."""
    workspace = Workspace(root)
    write_vectors(workspace, spec, random_episodes(0, lengths, spec))
    picture = encoded()
    for path in spec.jsonl(workspace).iterdir():
        for urls in read_episode(path, spec).urls:
            for url in urls:
                target = spec.images(workspace) / url
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(picture)
    compute(workspace, spec, 4, "absolute")
    return workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_dataset(tmp_path)


def found(workspace: Workspace, deep: bool = True, **options: object) -> list[tuple[str, str]]:
    """Kind and "path:line: detail" of every finding, paths relative to the dataset's folder where they are in it."""
    report = validate(workspace, SPEC, deep=deep, **options)  # type: ignore[arg-type]
    root = f"{SPEC.root(workspace)}{os.sep}"
    return [(item.kind, f"{item.place}: {item.detail}".replace(root, "")) for item in report.findings]


def picture(workspace: Workspace, frame: int = 1) -> Path:
    """The head camera's picture of a frame of the first episode."""
    return SPEC.images(workspace) / f"episode_000/camera_0/{frame:06d}.jpg"


@pytest.mark.parametrize("deep", [False, True])
def test_a_faultless_dataset(workspace: Workspace, deep: bool) -> None:
    report = validate(workspace, SPEC, deep=deep)
    assert report.findings == ()
    assert (report.episodes, report.frames, report.images) == (2, 7, 14 if deep else 0)


def test_nothing_is_changed_by_looking(workspace: Workspace) -> None:
    before = {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")}
    validate(workspace, SPEC, deep=True)
    assert {path: path.stat().st_mtime_ns for path in workspace.root.rglob("*")} == before


Change = Callable[[Workspace], object]
J = "jsonl/episode_000.jsonl"
URL = "episode_000/camera_0/000001.jpg"
C = f"image/{URL}"
STALE = "index_cache.json: the index is stale:"


def put(data: bytes) -> Change:
    """Other bytes in place of one picture."""
    return lambda workspace: picture(workspace).write_bytes(data)


def wrong_case(workspace: Workspace) -> None:
    picture(workspace).rename(picture(workspace).with_name("000001.JPG"))


def other_unicode_form(workspace: Workspace) -> None:
    frames = [make_frame("é" if n else "episode_000", n, [0.0] * 4, [0.0] * 3) for n in range(3)]
    write_lines(SPEC.root(workspace) / J, frames)
    shutil.copytree(SPEC.images(workspace) / "episode_000", SPEC.images(workspace) / "e\u0301")


def dangling(workspace: Workspace) -> None:
    picture(workspace).unlink()
    picture(workspace).symlink_to("nowhere.jpg")


def folder_for_file(workspace: Workspace) -> None:
    picture(workspace).unlink()
    picture(workspace).mkdir()


IMAGES: dict[str, tuple[Change, list[tuple[str, str]]]] = {
    "missing": (
        lambda w: picture(w).unlink(),
        [("image-missing", f'{J}:2: images_1: there is no "episode_000/camera_0/000001.jpg"')],
    ),
    "wrong case": (
        wrong_case,
        [("image-case", f'{J}:2: images_1: "{URL}" is "{URL[:-3]}JPG" on disk')],
    ),
    "symlink to nothing": (
        dangling,
        [("broken-link", f'{J}:2: images_1: "{URL}" is a symlink to nothing')],
    ),
    "folder": (
        folder_for_file,
        [("image-missing", f'{J}:2: images_1: "{URL}" is a folder')],
    ),
    "empty": (put(b""), [("image-empty", f"{C}: is empty (images_1 of episode_000.jsonl:2)")]),
    "HTML": (
        put(b"\r\n<!DOCTYPE html><html>404</html>"),
        [("image-foreign", f"{C}: is HTML or XML, not an image (images_1 of episode_000.jsonl:2)")],
    ),
    "JSON": (put(b'{"e": 1}'), [("image-foreign", f"{C}: is JSON, not an image (images_1 of episode_000.jsonl:2)")]),
    "LFS pointer": (
        put(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        [("image-foreign", f"{C}: is a Git LFS pointer, not an image (images_1 of episode_000.jsonl:2)")],
    ),
    "noise": (
        put(b"\x01\x02\x03\x04\x05\x06\x07\x08\x09"),
        [("image-broken", f"{C}: cannot be decoded: not an image (9 bytes, begins "
          r"b'\x01\x02\x03\x04\x05\x06\x07\x08') (images_1 of episode_000.jsonl:2)")],
    ),
    "truncated": (
        put(encoded()[:-100]),
        [("image-truncated", f"{C}: is cut short: {len(encoded()) - 100} bytes do not reach the end of the picture "
          "(images_1 of episode_000.jsonl:2)")],
    ),
    "truncated in the header": (
        put(encoded()[:50]),
        [("image-truncated", f"{C}: is cut short: 50 bytes do not hold a whole header "
          "(images_1 of episode_000.jsonl:2)")],
    ),
    "truncated PNG": (
        put(encoded("PNG")[:-500]),
        [
            ("image-truncated", f"{C}: is cut short: {len(encoded('PNG')) - 500} bytes do not reach the end of the "
             "picture (images_1 of episode_000.jsonl:2)"),
            ("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)'),
        ],
    ),
    "wrong extension": (
        put(encoded("PNG")),
        [("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)')],
    ),
    "grey": (
        put(encoded(mode="L")),
        [("image-mode", f"{C}: is greyscale, it is converted to RGB (images_1 of episode_000.jsonl:2)")],
    ),
    "CMYK": (
        put(encoded(mode="CMYK")),
        [("image-mode", f"{C}: is CMYK, it is converted to RGB (images_1 of episode_000.jsonl:2)")],
    ),
    "palette": (
        put(encoded("PNG", "P")),
        [
            ("image-mode", f"{C}: is palette, it is converted to RGB (images_1 of episode_000.jsonl:2)"),
            ("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)'),
        ],
    ),
    "RGBA": (
        put(encoded("PNG", "RGBA")),
        [
            ("image-mode", f"{C}: is RGBA, it is converted to RGB (images_1 of episode_000.jsonl:2)"),
            ("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)'),
        ],
    ),
    "16 bit": (
        put(encoded("PNG", "I;16")),
        [
            ("image-depth", f"{C}: has more than 8 bits a channel (mode I;16) (images_1 of episode_000.jsonl:2)"),
            ("image-extension", f'{C}: is PNG, its name ends in ".jpg" (images_1 of episode_000.jsonl:2)'),
        ],
    ),
    "another size": (
        put(encoded(size=(24, 32))),
        [("image-size", f"{J}: 1 image of images_1 is 24x32, most are 32x24")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_images(workspace: Workspace, name: str) -> None:
    change, expected = IMAGES[name]
    change(workspace)
    assert found(workspace) == expected


def test_another_unicode_form_of_a_name(workspace: Workspace) -> None:
    other_unicode_form(workspace)
    build_index(workspace, SPEC)
    kinds = [kind for kind, _ in found(workspace)]
    assert kinds.count("image-case") == 4 and set(kinds) == {"image-case", "stats-stale"}


def test_first_and_last_images_are_missed_by_the_fast_check_too(workspace: Workspace) -> None:
    shutil.rmtree(SPEC.images(workspace) / "episode_001")
    assert found(workspace, deep=False) == [
        ("image-missing", f'jsonl/episode_001.jsonl:{line}: {camera}: there is no "episode_001/camera_{n}/{f:06d}.jpg"')
        for line, f in ((1, 0), (4, 3))
        for n, camera in ((0, "images_1"), (1, "images_2"))
    ]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "GIF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_the_decoder_refuses_is_found_and_the_reverse(kind: str, mode: str) -> None:
    whole = encoded(kind, mode)
    for data in [whole, whole + b"\0" * 99, *(whole[: len(whole) * part // 20] for part in range(1, 20))]:
        try:
            decode_rgb(data)
            refused = False
        except DataError:
            refused = True
        _, problems = check_image(data, "x", decode=True)
        assert any(KINDS[problem.kind].severity == "error" for problem in problems) == refused
        if kind in ("JPEG", "PNG"):
            _, problems = check_image(data, "x", decode=False)
            assert any(KINDS[problem.kind].severity == "error" for problem in problems) == refused


def test_a_picture_that_is_broken_inside_is_found_by_decoding(workspace: Workspace) -> None:
    data = bytearray(encoded())
    data[700:720] = b"\xff\xd9" * 10
    picture(workspace).write_bytes(bytes(data))
    assert found(workspace) == []
    [(kind, text)] = found(workspace, decode=True)
    assert kind == "image-broken" and text.startswith(f"{C}: cannot be decoded: broken JPEG")


def test_a_sample_of_the_images(workspace: Workspace) -> None:
    for path in SPEC.images(workspace).rglob("*.jpg"):
        path.unlink()
    report = validate(workspace, SPEC, deep=True, sample=3)
    assert (report.frames, report.images, len(report.findings)) == (7, 6, 6)
    assert validate(workspace, SPEC, deep=True, sample=3).findings == report.findings
    assert validate(workspace, SPEC, deep=True, sample=99).images == 14


def test_images_through_a_symlinked_folder(workspace: Workspace, tmp_path: Path) -> None:
    pool = tmp_path / "pool with spaces 图"
    SPEC.images(workspace).rename(pool)
    SPEC.images(workspace).symlink_to(pool)
    assert found(workspace) == []


def no_index(workspace: Workspace) -> None:
    (SPEC.root(workspace) / "index_cache.json").unlink()


def no_copy(workspace: Workspace) -> None:
    workspace.index_cache.unlink()


def other_copy(workspace: Workspace) -> None:
    index = json.loads(workspace.index_cache.read_text())
    index["data"][f"data/toy/{J}"] = 99
    workspace.index_cache.write_text(json.dumps(index))


def broken_index(workspace: Workspace) -> None:
    (SPEC.root(workspace) / "index_cache.json").write_text('{"data": {"a": 1, "a": 2}}')


def wrong_count(workspace: Workspace) -> None:
    for path in (workspace.index_cache, SPEC.root(workspace) / "index_cache.json"):
        index = json.loads(path.read_text())
        index["data"][f"data/toy/{J}"] = 99
        path.write_text(json.dumps(index))


def touched(workspace: Workspace) -> None:
    os.utime(SPEC.root(workspace) / J, ns=(1, 1))


def new_episode(workspace: Workspace) -> None:
    shutil.copy(SPEC.root(workspace) / J, SPEC.root(workspace) / "jsonl/z.jsonl")


def longer_episode(workspace: Workspace) -> None:
    path = SPEC.root(workspace) / J
    path.write_text(path.read_text() + path.read_text())


DATASETS: dict[str, tuple[Change, list[tuple[str, str]]]] = {
    "no index": (no_index, [("index-missing", "index_cache.json: there is no index")]),
    "no copy": (no_copy, [
        ("index-missing", "WORKSPACE/index_cache.json: there is no copy of the index at the top of the workspace"),
    ]),
    "another copy": (other_copy, [
        ("index-copies", "WORKSPACE/index_cache.json: differs from index_cache.json"),
    ]),
    "broken index": (broken_index, [("index-broken", 'index_cache.json: key "a" stands twice')]),
    "wrong count": (wrong_count, [("index-count", f"{J}: has 3 frames, the index says 99")]),
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
        assert held == (expected if deep or name != "wrong count" else [])


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


def packed(workspace: Workspace) -> Path:
    """The dataset as a pack alone: its image folder is gone."""
    build_pack(workspace, SPEC)
    shutil.rmtree(SPEC.images(workspace))
    return SPEC.root(workspace) / "pack"


def test_a_pack_in_place_of_images(workspace: Workspace) -> None:
    packed(workspace)
    report = validate(workspace, SPEC, deep=True, decode=True)
    assert report.findings == () and report.images > 0
    assert validate(workspace, SPEC).findings == ()


def test_a_changed_blob(workspace: Workspace) -> None:
    for number, path in enumerate(sorted(SPEC.images(workspace).rglob("*.jpg"))):
        path.write_bytes(encoded(seed=number))
    folder = packed(workspace)
    [blob] = folder.glob("*.bin")
    data = bytearray(blob.read_bytes())
    data[len(encoded()) // 2] ^= 1
    blob.write_bytes(data)
    [(kind, text)] = found(workspace)
    changed = (
        rf"pack/{blob.name}: the image was changed since it was packed \(images_[12] of episode_00[01].jsonl:[1-4]\)"
    )
    assert kind == "pack-broken" and re.fullmatch(changed, text)
    assert found(workspace, deep=False) == []
    blob.write_bytes(data[:-1])
    text = f"part of the pack, has {len(data) - 1:,} bytes where {len(data):,} were written"
    assert found(workspace) == found(workspace, deep=False) == [("pack-broken", f"pack/{blob.name}: {text}")]


def test_a_changed_table(workspace: Workspace) -> None:
    table = packed(workspace) / "frames.arrow"
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    assert [kind for kind, _ in found(workspace)] == ["pack-broken"]


def test_a_pack_of_other_episodes(workspace: Workspace) -> None:
    packed(workspace)
    longer_episode(workspace)
    build_index(workspace, SPEC)
    assert [kind for kind, _ in found(workspace, deep=False)] == ["stats-stale", "pack-broken"]


def run(workspace: Workspace, *flags: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
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
        [*command, str(workspace.root), *flags], capture_output=True, text=True, cwd=cwd, check=False
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
        "mend     image-missing: Extract it again with dm05-prep dataset",
        "bad      toy has 6 errors",
    ]  # fmt: skip
    assert len(run(workspace, "--deep", "--all").stdout.splitlines()) == 10


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
        "kind": "image-missing", "severity": "error", "title": "", "count": 1, "fix": KINDS["image-missing"].fix,
    }  # fmt: skip
    assert json.loads(run(workspace, "--deep", "--json", "-").stdout)["errors"] == 1


def test_annotations_for_github(workspace: Workspace) -> None:
    picture(workspace).write_bytes(b"")
    (SPEC.root(workspace) / "jsonl/a,b:c%.jsonl").write_text("\n")
    done = run(workspace, "--deep", "--format", "github", cwd=workspace.root)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "::error file=data/toy/jsonl/a%2Cb%3Ac%25.jsonl,title=empty-episode::has no frames. "
        "Remove the file, then run dm05-prep index",
        "::error file=data/toy/jsonl/a%2Cb%3Ac%25.jsonl,line=1,title=blank-line::blank line. "
        "dm05-prep validate --fix mends it",
        "::error file=data/toy/index_cache.json,title=index-stale::the index is stale: "
        "1 episode file not in the index (a,b:c%25.jsonl). dm05-prep index (or validate --fix) writes it",
        f"::error file=data/toy/{C},title=image-empty::is empty (images_1 of episode_000.jsonl:2). "
        "Extract it again with dm05-prep dataset",
        "bad      toy has 4 errors",
    ]


def test_flags_that_do_not_go_together(workspace: Workspace) -> None:
    done = run(workspace, "--jobs", "0")
    assert (done.returncode, done.stderr) == (2, "dm05-prep: error: --jobs must be 1 or more, not 0\n")
    done = run(workspace, "--sample", "3")
    assert (done.returncode, done.stderr) == (2, "dm05-prep: error: --sample and --decode need --deep\n")
