"""dm05-prep dataset from a slow server: extraction runs while parts arrive; signals at any time lose nothing."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_secrets import SECRETS
from places import Place, make_place
from tars import HOME, honest, split, tree, wanted, write_parts
from test_dataset import FILES, laid_out

pytestmark = pytest.mark.usefixtures("quiet_environment")

CLI = [sys.executable, "-c", "from dm05_prep.cli import main; main()"]
PAD = {f"{HOME}image/pad/{index:04d}.jpg": random.Random(index).randbytes(30_000) for index in range(100)}
PART_BYTES = 400_000


@pytest.fixture(params=["bos", "hf"])
def place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    service, root = hub_process if request.param == "hf" else bos_process
    made = make_place(request.param, service, root, monkeypatch)
    write_parts(made.folder, split(honest({**FILES, **PAD}), PART_BYTES))
    if request.param == "hf":
        monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
        service.order(token=SECRETS["hub"])
    return made


def start(place: Place, workspace: Path, *words: str) -> subprocess.Popen[str]:
    command = ["dataset", "--source", "hf" if place.kind == "hf" else "bos", "--uri", place.uri, *words]
    command += ["--endpoint", place.service.url, "--workspace", str(workspace)]
    return subprocess.Popen([*CLI, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str]) -> str:
    """Everything it said, without a secret or a traceback in it."""
    out, err = child.communicate(timeout=60)
    assert "Traceback" not in err
    assert not any(secret in out + err for secret in SECRETS.values())
    return out + err


def test_extraction_runs_while_parts_arrive(place: Place, tmp_path: Path) -> None:
    place.service.order(rate=1_500_000)
    child = start(place, tmp_path)
    last = f"libero.tar.part-{len(split(honest({**FILES, **PAD}), PART_BYTES)) - 1:03d}"
    early = 0
    while child.poll() is None and not place.service.requests(last):
        early = max(early, sum(1 for _ in tmp_path.rglob("*.jpg")))
        time.sleep(0.05)
    said = finish(child)
    assert child.returncode == 0, said
    assert early > 20, "files were there before the last part was asked for"
    assert laid_out(tmp_path) == wanted({**FILES, **PAD})


SIGNALS = [("bos", signal.SIGKILL), ("hf", signal.SIGKILL), ("bos", signal.SIGTERM), ("hf", signal.SIGINT)]


@pytest.mark.parametrize("place, number", SIGNALS, indirect=["place"])
def test_a_signal_at_any_time_and_again(place: Place, tmp_path: Path, number: int) -> None:
    place.service.order(rate=1_500_000)
    total = sum(path.stat().st_size for path in place.folder.iterdir())
    for _ in range(2):
        child = start(place, tmp_path)
        before = place.service.sent("libero.tar")
        while child.poll() is None and place.service.sent("libero.tar") < before + total // 5:
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.2))
        child.send_signal(number)
        started = time.monotonic()
        said = finish(child)
        assert time.monotonic() - started < 1.5
        assert number == signal.SIGKILL or said.endswith("ted. The same command goes on where it stopped\n")
    place.service.order(rate=0)
    child = start(place, tmp_path)
    said = finish(child)
    assert child.returncode == 0, said
    assert laid_out(tmp_path) == wanted({**FILES, **PAD})
    assert not (tmp_path / "parts").exists()
    in_flight = 2 * 8 * 256 * 1024
    assert place.service.sent("libero.tar") < total + in_flight, "what had arrived is not fetched again"


def test_what_another_source_left_is_said_and_kept(place: Place, tmp_path: Path) -> None:
    place.service.order(rate=1_500_000)
    child = start(place, tmp_path)
    while child.poll() is None and place.service.sent("libero.tar") < 2 * PART_BYTES:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    finish(child)
    (left,) = (tmp_path / "parts").iterdir()
    before = tree(left)
    local = [*CLI, "dataset", "--source", "local", "--uri", str(place.folder), "--workspace", str(tmp_path)]
    done = subprocess.run(local, capture_output=True, text=True)
    line = rf"left       [\d.]+ [KM]iB of parts from elsewhere: {left}\. Delete them, unless "
    assert done.returncode == 0 and re.match(line, done.stdout)
    assert before and tree(left) == before and laid_out(tmp_path) == wanted({**FILES, **PAD})


def test_parts_that_are_read_are_not_called_left(place: Place, tmp_path: Path) -> None:
    assert "left  " not in finish(start(place, tmp_path, "--keep-parts"))
    (kept,) = (tmp_path / "parts").iterdir()
    local = [*CLI, "dataset", "--uri", str(kept), "--workspace", str(tmp_path), "--force"]
    done = subprocess.run(local, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("extract  ")


def test_what_starts_over_does_not_say_that_it_goes_on(place: Place, tmp_path: Path) -> None:
    place.service.order(rate=1_500_000)
    child = start(place, tmp_path, "--force")
    while child.poll() is None and not place.service.sent("libero.tar"):
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    assert finish(child).endswith("dm05-prep: interrupted\n")


def test_a_dry_run_fetches_nothing(place: Place, tmp_path: Path) -> None:
    child = start(place, tmp_path / "ws", "--dry-run")
    said = finish(child)
    assert child.returncode == 0 and "libero.tar" in said
    assert place.service.sent("libero.tar") == 0 and not (tmp_path / "ws").exists()
    assert tree(place.folder)


def test_a_dry_run_says_at_least_what_is_taken(place: Place, tmp_path: Path) -> None:
    """Also of a disk that is too small; sizes in words are rounded, so they are compared in tenths."""
    said = finish(start(place, tmp_path, "--dry-run"))
    most = float(said.split("taken at peak: up to ")[1].split(" MiB")[0])
    done = finish(start(place, tmp_path))
    assert float(done.split("peak disk ")[1].split(" MiB")[0]) <= most + 0.1
    tiny = tmp_path / "tiny"
    tiny.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tiny)], capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        assert "perhaps not enough" in finish(start(place, tiny, "--dry-run"))
    finally:
        subprocess.run(["umount", str(tiny)], check=True)


def test_a_dry_run_counts_what_has_arrived(place: Place, tmp_path: Path) -> None:
    place.service.order(rate=1_500_000)
    child = start(place, tmp_path, "--keep-parts")
    while child.poll() is None and place.service.sent("libero.tar") < 2 * PART_BYTES:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    finish(child)
    place.service.order(rate=0)
    assert " of it are there, all of them, kept" in finish(start(place, tmp_path, "--keep-parts", "--dry-run"))


def test_the_peak_counts_kept_parts_and_a_pack(place: Place, tmp_path: Path) -> None:
    words = ("--keep-parts", "--layout", "both", "--dataset-name", "libero_pi0_all")
    done = finish(start(place, tmp_path, *words))
    taken = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.suffix in (".jpg", ".jsonl", ".bin"))
    taken += sum(path.stat().st_size for path in (tmp_path / "parts").rglob("*.part-*"))
    assert float(done.split("peak disk ")[1].split(" MiB")[0]) == pytest.approx(taken / (1 << 20), abs=0.06)
