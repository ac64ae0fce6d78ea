"""What goes wrong for people: one clear line, the right exit code, no traceback, nothing half written."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_commands import Outcome, call, prep, train, tree

DATASET = Path("data/libero/libero_pi0_all")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    prep("demo", folder, "--episodes", "2", "--frames", "10", "--part-kb", "60").succeeded()
    assert len(list((folder / "parts").iterdir())) > 4
    return folder


@pytest.fixture(scope="module")
def good(demo: Path) -> Path:
    """A workspace that is in order."""
    workspace = demo / "dm05"
    prep("dataset", "--source", "local", "--uri", demo / "parts", "--workspace", workspace).succeeded()
    prep("model", "--source", "local", "--uri", demo / "DM05", "--workspace", workspace).succeeded()
    return workspace


@pytest.fixture
def parts(demo: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo / "parts", tmp_path / "parts"))


@pytest.fixture
def workspace(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "dm05"))


def fetch(parts: Path, workspace: Path) -> Outcome:
    return prep("dataset", "--source", "local", "--uri", parts, "--workspace", workspace)


def assert_nothing_half_written(workspace: Path, good: Path) -> None:
    """What is there is whole: no index, no statistics, no temporary file, every data file as it should be."""
    whole = tree(good)
    for name, content in tree(workspace).items():
        if name.startswith("data/") and not Path(name).name.startswith("."):
            assert whole.get(name) == content, f"{name} is not whole"
    assert not (workspace / "norm_stats").exists()
    assert not list(workspace.rglob("index_cache.json"))
    assert not list(workspace.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (["dm05-prep", "datset"], 2, ["datset", "dm05-prep dataset"]),
        (["dm05-prep", "index", "--dataset-nam", "x"], 2, ["--dataset-nam"]),
        (["dm05-prep", "index", "--dataset-name", "libero_pi0_al"], 1, ["libero_pi0_al", "libero_pi0_all"]),
        (["dm05-prep", "norm-stats", "--action-mode", "absolut"], 2, ["absolut"]),
        (["dm05-prep", "norm-stats", "--chunk-size", "ten"], 2, ["ten"]),
        (["dm05-prep", "norm-stats", "--chunk-size", "0"], 2, ["0"]),
        (["dm05-prep", "dataset", "--source", "ftp"], 2, ["ftp"]),
        (["dm05-prep"], 2, ["dm05-prep --help"]),
        (["dm05-train", "--optimizer-config.optim", "adamv"], 2, ["adamv"]),
        (["dm05-train", "--optimizer-config.base-lr", "0"], 2, ["--optimizer-config.base-lr"]),
        (["dm05-train", "--trainer-config.num-train-stepz", "3"], 2, ["num-train-stepz"]),
        (["dm05-train", "--data-config.dataset-name", "libero_goa"], 1, ["libero_goa", "libero_goal"]),
    ],
)
def test_a_wrong_word(line: list[str], code: int, words: list[str], good: Path) -> None:
    before = tree(good)
    place = [] if len(line) == 1 or line[1] == "datset" else ["--workspace", str(good)]
    call(line[0], *line[1:], *place).failed(code, *words)
    assert tree(good) == before


@pytest.mark.parametrize(
    "line",
    [
        ["dm05-prep", "index"],
        ["dm05-prep", "norm-stats"],
        ["dm05-prep", "pack"],
        ["dm05-prep", "report"],
        ["dm05-train"],
    ],
)
def test_an_empty_workspace(line: list[str], tmp_path: Path) -> None:
    call(*line, "--workspace", tmp_path / "none").failed(1, "none")
    assert tree(tmp_path) == {}


def test_a_missing_folder(good: Path, tmp_path: Path) -> None:
    fetch(tmp_path / "nowhere", tmp_path / "dm05").failed(1, "nowhere")
    prep("model", "--source", "local", "--uri", tmp_path / "nowhere", "--workspace", tmp_path / "dm05").failed(
        1, "nowhere"
    )
    train("--workspace", good, "--model-config.model-name-or-path", tmp_path / "nowhere").failed(1, "nowhere")
    assert tree(tmp_path) == {}


def test_a_missing_image_folder_and_a_missing_image(workspace: Path) -> None:
    victim = next((workspace / DATASET / "image").rglob("*.jpg"))
    victim.unlink()
    deep = prep("validate", "--deep", "--workspace", workspace)
    assert deep.code == 1 and victim.name in deep.out + deep.err
    assert "Traceback" not in deep.out + deep.err
    shutil.rmtree(workspace / DATASET / "image")
    train("--workspace", workspace, "--trainer-config.per-device-train-batch-size", "2").failed(1, "image")


def test_an_empty_parts_folder(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    fetch(tmp_path / "parts", tmp_path / "dm05").failed(1, "parts")
    assert tree(tmp_path) == {}


def test_a_missing_middle_part(parts: Path, good: Path, tmp_path: Path) -> None:
    (parts / "libero.tar.part-002").unlink()
    fetch(parts, tmp_path / "dm05").failed(1, "part-002")
    assert_nothing_half_written(tmp_path / "dm05", good)


@pytest.mark.parametrize("which", ["first", "middle", "last"])
@pytest.mark.parametrize("keep", [0, 1000, 30_000])
def test_a_part_cut_short(which: str, keep: int, parts: Path, good: Path, tmp_path: Path) -> None:
    files = sorted(parts.iterdir())
    victim = {"first": files[0], "middle": files[2], "last": files[-1]}[which]
    keep = min(keep, victim.stat().st_size // 2)
    victim.write_bytes(victim.read_bytes()[:keep])
    fetch(parts, tmp_path / "dm05").failed(1, victim.name)
    assert_nothing_half_written(tmp_path / "dm05", good)


def test_after_the_mend_the_same_command_finishes(parts: Path, good: Path, tmp_path: Path) -> None:
    victim = sorted(parts.iterdir())[3]
    content = victim.read_bytes()
    victim.write_bytes(content[:5000])
    fetch(parts, tmp_path / "dm05").failed(1, victim.name)
    victim.write_bytes(content)
    fetch(parts, tmp_path / "dm05").succeeded()
    made, whole = tree(tmp_path / "dm05" / DATASET / "jsonl"), tree(good / DATASET / "jsonl")
    assert made == whole
    assert tree(tmp_path / "dm05" / DATASET / "image") == tree(good / DATASET / "image")


def test_a_checkpoint_cut_short(good: Path, demo: Path, tmp_path: Path) -> None:
    shutil.copytree(demo / "DM05", tmp_path / "DM05")
    weights = tmp_path / "DM05" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    line = ("model", "--source", "local", "--uri", tmp_path / "DM05", "--workspace", tmp_path / "dm05")
    prep(*line).failed(1, "model.safetensors", "cut short")
    train("--workspace", good, "--model-config.model-name-or-path", tmp_path / "DM05").failed(
        1, "model.safetensors", "cut short"
    )
    assert not list(tmp_path.rglob("*.part*"))
    weights.write_bytes(content)
    prep(*line).succeeded()
    assert (tmp_path / "dm05" / "checkpoints" / "DM05" / "model.safetensors").read_bytes() == content


def six_actions(frame: dict[str, Any]) -> None:
    del frame["action"][-1]


def nan_in_state(frame: dict[str, Any]) -> None:
    frame["state"][2] = float("nan")


def infinite_action(frame: dict[str, Any]) -> None:
    frame["action"][0] = float("inf")


def url_outside(frame: dict[str, Any]) -> None:
    frame["images_1"]["url"] = "../../secret.jpg"


FAULTS = [
    (six_actions, ["6", "7", "action"]),
    (nan_in_state, ["NaN"]),
    (infinite_action, ["Infinity"]),
    (url_outside, ["secret.jpg"]),
]
Fault = Callable[[dict[str, Any]], None]


def spoil(text: str, fault: Fault) -> str:
    """The fifth frame of an episode, spoilt."""
    lines = text.splitlines()
    frame = json.loads(lines[4])
    fault(frame)
    lines[4] = json.dumps(frame, ensure_ascii=False)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_a_bad_frame_in_the_archive(fault: Fault, words: list[str], parts: Path, good: Path, tmp_path: Path) -> None:
    whole = b"".join(path.read_bytes() for path in sorted(parts.iterdir()))
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(whole)) as source, tarfile.open(fileobj=out, mode="w") as target:
        for member in source:
            data = source.extractfile(member).read() if member.isfile() else b""  # type: ignore[union-attr]
            if member.name.endswith("libero_pi0_all/jsonl/episode_001.jsonl"):
                data = spoil(data.decode(), fault).encode()
                member.size = len(data)
            target.addfile(member, io.BytesIO(data))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "libero.tar.part-000").write_bytes(out.getvalue())
    fetch(tmp_path / "bad", tmp_path / "dm05").failed(1, "episode_001.jsonl:5", *words)
    assert not (tmp_path / "dm05" / "norm_stats").exists()


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_a_bad_frame_in_the_workspace(fault: Fault, words: list[str], workspace: Path) -> None:
    victim = workspace / DATASET / "jsonl" / "episode_001.jsonl"
    victim.write_text(spoil(victim.read_text(), fault))
    shutil.rmtree(workspace / "norm_stats")
    prep("index", "--workspace", workspace).succeeded()
    place = "episode_001.jsonl:5"
    checked = prep("validate", "--workspace", workspace, "--deep")
    assert checked.code == 1 and "Traceback" not in checked.out + checked.err
    assert place in checked.out + checked.err
    if "secret.jpg" not in words:  # statistics read no urls
        prep("norm-stats", "--workspace", workspace).failed(1, place, *words)
        assert not (workspace / "norm_stats").exists() or not tree(workspace / "norm_stats")
    prep("pack", "--workspace", workspace).failed(1, place, *words)
    assert not (workspace / DATASET / "pack").exists()
    train("--workspace", workspace).failed(1, place, *words)
    assert not list(workspace.rglob("*.tmp"))


def test_statistics_of_other_data_are_not_trained_with(workspace: Path) -> None:
    victim = workspace / DATASET / "jsonl" / "episode_000.jsonl"
    lines = victim.read_text().splitlines(keepends=True)
    victim.write_text("".join(lines[:-1]))
    train("--workspace", workspace).failed(1, "dm05-prep index")
    prep("index", "--workspace", workspace).succeeded()
    train("--workspace", workspace).failed(1, "dm05-prep norm-stats")
