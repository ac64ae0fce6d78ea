"""dm05-prep model: fetched from everywhere, checked, stopped and continued, and no secret in its words."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dm05_prep import console
from dm05_prep.checkpoint_check import LIBERO_ACTION_MEAN, LIBERO_ACTION_STD, check_checkpoint
from dm05_prep.cli import PROG, dispatch
from dm05_schemas import cli
from dm05_schemas.errors import DataError
from fake_secrets import SECRETS
from places import Place, make_place, random_bytes
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.usefixtures("quiet_environment")

CLI = [sys.executable, "-c", "from dm05_prep.cli import main; main()"]


@dataclass
class Done:
    """How the command ended."""

    returncode: int
    stdout: str
    stderr: str


def run(*words: Any) -> Done:
    """The command, in this process, from its words to its exit code; never a secret or a traceback in what it says."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        cli.run(lambda: dispatch(list(map(str, words))), PROG)
    done = Done(int(end.value.code or 0), out.getvalue(), err.getvalue())
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS.values())
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(params=["bos", "hf"])
def place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> Place:
    service, root = hub_process if request.param == "hf" else bos_process
    made = make_place(request.param, service, root, monkeypatch)
    if request.param == "hf":
        made.folder = root / "models" / "owner" / "name"
        monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
        service.order(token=SECRETS["hub"])
    shutil.rmtree(made.folder, ignore_errors=True)
    shutil.copytree(checkpoint, made.folder)
    (made.folder / "README.md").write_text("read me")
    return made


def flags(place: Place, workspace: Path) -> list[str]:
    words = ["model", "--source", "hf" if place.kind == "hf" else "bos", "--uri", place.uri]
    return [*words, "--endpoint", place.service.url, "--workspace", str(workspace)]


def test_fetched_checked_and_then_left_alone(place: Place, tmp_path: Path, checkpoint: Path) -> None:
    dry = run(*flags(place, tmp_path / "ws"), "--dry-run")
    assert dry.returncode == 0 and "fetch      model.safetensors" in dry.stdout and "at peak" in dry.stdout
    assert not (tmp_path / "ws").exists()
    done = run(*flags(place, tmp_path / "ws"))
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "ws" / "checkpoints" / "DM05"
    names = sorted(path.name for path in checkpoint.iterdir())
    assert sorted(path.name for path in folder.iterdir() if path.name != ".fetched.json") == names
    assert all((folder / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)
    assert "names and shapes are right" in done.stdout and "dm05-prep dataset" in done.stdout
    record = (folder / ".fetched.json").read_text()
    assert not any(secret in record for secret in SECRETS.values())
    place.service.order(forget=True)
    again = run(*flags(place, tmp_path / "ws"))
    assert again.returncode == 0 and f"all {len(names)} files are there" in again.stdout
    assert place.service.sent("model.safetensors") == 0
    assert "keep       config.json" in run(*flags(place, tmp_path / "ws"), "--dry-run").stdout


def test_a_new_version_replaces_what_was_fetched_and_spares_what_was_changed(place: Place, tmp_path: Path) -> None:
    assert run(*flags(place, tmp_path)).returncode == 0
    path = place.folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "new": 1}))
    done = run(*flags(place, tmp_path))
    assert done.returncode == 0 and "1 of 6 files" in done.stdout
    ours = tmp_path / "checkpoints" / "DM05" / "tokenizer_config.json"
    assert json.loads(ours.read_text())["new"] == 1
    ours.write_text(json.dumps({"mine": 1}))
    refused = run(*flags(place, tmp_path))
    assert refused.returncode == 1 and "is not the source's file" in refused.stderr and "--force" in refused.stderr
    assert json.loads(ours.read_text()) == {"mine": 1}
    assert run(*flags(place, tmp_path), "--force").returncode == 0
    assert json.loads(ours.read_text())["new"] == 1


def test_a_local_folder_is_copied(copy: Path, tmp_path: Path) -> None:
    done = run("model", "--uri", copy, "--workspace", tmp_path)
    assert done.returncode == 0 and "6 of 6 files" in done.stdout
    assert "all 6 files are there" in run("model", "--uri", copy, "--workspace", tmp_path).stdout
    folder = tmp_path / "checkpoints" / "DM05"
    assert not (folder / "model.safetensors").is_symlink()
    (copy / "config.json").write_bytes((copy / "config.json").read_bytes() + b"\n")
    assert "1 of 6 files" in run("model", "--uri", copy, "--workspace", tmp_path).stdout


def test_a_file_that_is_there_is_summed_under_a_bar(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the weights were put there by hand: no record tells that they are the source's."""
    weights = copy / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (copy / "SHA256SUMS").write_text(f"{digest}  {weights.name}\n")
    here = tmp_path / "checkpoints" / "DM05" / weights.name
    here.parent.mkdir(parents=True)
    shutil.copy(weights, here)
    monkeypatch.setattr(console, "FIRST_LINE_S", 0)
    monkeypatch.setattr(console, "LINE_EVERY_S", 0)
    words = ["model", "--uri", copy, "--workspace", tmp_path, "--dry-run"]
    done = run(*words)
    assert f"keep       {weights.name}" in done.stdout
    assert done.stderr.startswith(f"check {weights.name}: ") and "(100%)" in done.stderr
    assert run(*words, "--quiet").stderr == ""


def test_a_local_folder_that_is_damaged_is_refused_before_anything_is_copied(copy: Path, tmp_path: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = run("model", "--uri", copy, "--workspace", tmp_path / "ws")
    assert done.returncode == 1 and str(weights) in done.stderr and "get it again" in done.stderr
    assert not (tmp_path / "ws").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_within_a_second_and_it_continues(
    place: Place, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DM05_PREP_STALL_S", "30")
    size = (place.folder / "model.safetensors").stat().st_size
    place.service.order(rate=500_000)
    child = subprocess.Popen([*CLI, *flags(place, tmp_path)], stderr=subprocess.PIPE, text=True)
    state = tmp_path / "checkpoints" / "DM05" / "model.safetensors.part.json"
    until = time.monotonic() + 20
    while not (state.exists() and sum(json.loads(state.read_text())["done"]) > 0) and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(number)
    started = time.monotonic()
    _, said = child.communicate(timeout=20)
    assert time.monotonic() - started < 1.0
    ends = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
    code, word = ends[signal.Signals(number)]
    last = f"dm05-prep: {word}. The same command goes on where it stopped"
    assert (child.returncode, said.splitlines()[-1]) == (code, last)
    there = sum(json.loads(state.read_text())["done"])
    assert 0 < there < size
    place.service.order(rate=0, forget=True)
    dry = run(*flags(place, tmp_path), "--dry-run")
    assert "of it are there" in dry.stdout
    assert run(*flags(place, tmp_path)).returncode == 0
    assert place.service.sent("model.safetensors") == size - there


@pytest.mark.parametrize("source", ["remote", "local"])
def test_a_file_that_may_not_grow_is_named(place: Place, tmp_path: Path, copy: Path, source: str) -> None:
    """A limit stands for what hinders while bytes are written: a disk that fails, one that allows no large files."""
    local = ["model", "--uri", str(copy), "--workspace", str(tmp_path)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # noqa: E731
    done = subprocess.run(
        [*CLI, *(local if source == "local" else flags(place, tmp_path))],
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "checkpoints/DM05/" in last and "File too large. That disk" in last


def test_corruption_is_never_accepted(place: Place, tmp_path: Path) -> None:
    place.service.order(faults=[{"kind": "corrupt", "match": "model.safetensors", "times": -1}])
    done = run(*flags(place, tmp_path))
    assert done.returncode == 1 and "wrong bytes arrived twice" in done.stderr
    assert not (tmp_path / "checkpoints" / "DM05" / "model.safetensors").exists()


def test_a_place_without_a_checkpoint(place: Place, tmp_path: Path) -> None:
    (place.folder / "config.json").unlink()
    done = run(*flags(place, tmp_path))
    assert done.returncode == 1 and "holds no checkpoint: there is no config.json" in done.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    monkeypatch.setenv("BCE_ACCESS_KEY_ID", SECRETS["access"])
    monkeypatch.setenv("BCE_SECRET_ACCESS_KEY", SECRETS["secret"])
    for source in ("hf", "bos"):
        done = run("model", "--source", source, "--endpoint", "http://127.0.0.1:9", "--workspace", tmp_path)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and "127.0.0.1:9" in done.stderr


def test_wrong_words(tmp_path: Path) -> None:
    assert run("model", "--jobs", "0").returncode == 2
    assert run("model", "--source", "ftp").returncode == 2
    assert run("model", "--source", "bos", "--uri", "nonsense", "--workspace", tmp_path).returncode == 2
    assert run("model", "--source", "local", "--workspace", tmp_path).returncode == 2


def damage_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def other_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    for token in document["added_tokens"]:
        if token["content"] == "<image_soft_token>":
            token["id"] -= 1
    path.write_text(json.dumps(document))


NORM = "model.vlm.model.language_model.norm.weight"
DAMAGE: dict[str, tuple[Any, str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: is missing"),
    "cut short": (cut, "is cut short"),
    "an error page": (
        lambda folder: (folder / "model.safetensors").write_text("<html>" * 99),
        "not a safetensors file",
    ),
    "a tensor less": (lambda folder: change_weights(folder, lambda weights: weights.pop(NORM)), f"lacks {NORM}"),
    "a tensor more": (
        lambda folder: change_weights(folder, lambda weights: weights.update(extra=np.zeros(1, np.float32))),
        "has unknown extra",
    ),
    "another shape": (
        lambda folder: change_weights(folder, lambda weights: weights.update({NORM: np.zeros(3, np.float32)})),
        "has another shape than config.json asks for",
    ),
    "another type": (
        lambda folder: change_weights(folder, lambda weights: weights.update({NORM: weights[NORM].astype(np.float64)})),
        "holds tensors of type F64",
    ),
    "another model": (lambda folder: damage_config(folder, model_type="gemma3"), "model_type is 'gemma3'"),
    "a config that is cut": (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    "a tokenizer of another model": (other_tokens, "<image_soft_token> has id"),
    "a tokenizer without tokens": (
        lambda folder: (folder / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {}}}'),
        "has no token <pad>",
    ),
    "a small file that is cut": (lambda folder: (folder / "processor_config.json").write_text('{"a"'), "not JSON"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(copy: Path, name: str) -> None:
    spoil, text = DAMAGE[name]
    spoil(copy)
    with pytest.raises(DataError) as caught:
        check_checkpoint(copy)
    assert text in str(caught.value)
    assert str(copy) in str(caught.value)


def test_the_copy_of_the_embeddings_may_be_missing(copy: Path) -> None:
    change_weights(copy, lambda weights: weights.pop("model.vlm.lm_head.weight"))
    report = check_checkpoint(copy)
    assert any("lm_head" in note for note in report.notes)


def stats(mean: Any, std: Any, state: int = 8) -> dict[str, Any]:
    def vector(mean: list[float], std: list[float]) -> dict[str, list[float]]:
        return {"mean": mean, "std": std, "q01": [-1.0] * len(mean), "q99": [1.0] * len(mean)}

    return {"state": vector([0.0] * state, [1.0] * state), "action": vector(list(mean), list(std))}


LIBERO = stats(np.asarray(LIBERO_ACTION_MEAN) + 0.001, np.asarray(LIBERO_ACTION_STD) * 1.01)


@pytest.mark.parametrize(
    "document, text",
    [
        (None, "cannot tell"),
        ({"norm_stats": LIBERO}, "LIBERO: its action statistics are those of libero_pi0_all (state 8, action 7)"),
        ({"norm_stats": stats([0.5] * 7, [1.0] * 7)}, "for one dataset (state 8, action 7)"),
        ({"norm_stats": stats([0.5] * 14, [1.0] * 14, 14)}, "for one dataset (state 14, action 14)"),
        (
            {
                "norm_stats_by_robot": {"Franka": LIBERO, "ALOHA": stats([0.0] * 14, [1.0] * 14, 14)},
                "default_robot_type": "Franka",
            },
            "base: statistics of 2 robots, by default Franka: ALOHA (state 14, action 14), Franka (state 8, action 7)",
        ),
        ({"norm_stats_by_robot": {"Franka": LIBERO}, "default_robot_type": "Franka"}, "LIBERO"),
    ],
)
def test_what_it_was_trained_for(copy: Path, document: Any, text: str) -> None:
    if document is not None:
        (copy / "norm_stats.json").write_text(json.dumps(document))
    assert text in check_checkpoint(copy).kind


def test_the_check_of_a_large_file_reads_its_header_only(copy: Path) -> None:
    """A file of the released size: a hole for the numbers, so that reading them would take its time."""
    golden = Path(__file__).parent.parent / "golden"
    config = json.loads((golden / "dm05_config.json").read_text())
    names = json.loads((golden / "checkpoint_tensors.json").read_text())["tensors"]
    config["vlm_config"]["image_token_index"] = json.loads((copy / "config.json").read_text())["vlm_config"][
        "image_token_index"
    ]
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "preprocessor_config.json").unlink()
    header, position = {}, 0
    for name, shape in names.items():
        end = position + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    with (copy / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    started = time.monotonic()
    report = check_checkpoint(copy)
    assert time.monotonic() - started < 5
    assert report.tensors == 1473 and report.dtypes == ("BF16",)
    assert "names and shapes are right" in report.lines()[0]


def test_two_at_once(place: Place, tmp_path: Path) -> None:
    """The second says so instead of mixing its bytes in."""
    (place.folder / "model.safetensors").write_bytes(random_bytes(2 << 20))
    place.service.order(rate=500_000)
    first = subprocess.Popen([*CLI, *flags(place, tmp_path)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    part = tmp_path / "checkpoints" / "DM05" / "model.safetensors.part"
    while not part.exists() and first.poll() is None:
        time.sleep(0.02)
    second = run(*flags(place, tmp_path))
    assert second.returncode == 1 and "another run is fetching it" in second.stderr
    first.kill()
    first.wait()


def test_a_disk_without_inodes_is_named(place: Place, tmp_path: Path) -> None:
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    options = "size=64m,nr_inodes=6"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tiny)], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        done = run(*flags(place, tiny))
        assert done.returncode == 1 and "no inodes left on the disk" in done.stderr
    finally:
        subprocess.run(["umount", str(tiny)], check=True)
