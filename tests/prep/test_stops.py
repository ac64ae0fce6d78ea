"""Ctrl-C and SIGTERM while a server says nothing: over within a second, in one line, with the signal's exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.demo.checkpoint import write_checkpoint
from fake_secrets import KEYS
from places import Place, make_place
from tars import write_parts
from test_dataset import PARTS

pytestmark = pytest.mark.usefixtures("quiet_environment")

CLI = [sys.executable, "-c", "from dm05_prep.cli import main; main()"]
ENDS = {signal.SIGINT: (130, "dm05-prep: interrupted"), signal.SIGTERM: (143, "dm05-prep: terminated")}
SILENT = {
    "list": {"match": "^/bucket$|^/api/", "method": "GET"},
    "head": {"match": "part-000|safetensors", "method": "HEAD"},
    "body": {"match": "part-000|safetensors", "method": "GET"},
    "all": {"match": "", "method": "GET"},
}


@pytest.fixture(params=["bos", "hf"])
def place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    service, root = hub_process if request.param == "hf" else bos_process
    made = make_place(request.param, service, root, monkeypatch)
    monkeypatch.setenv("DM05_PREP_STALL_S", "60")
    return made


GOES_ON = ". The same command goes on where it stopped"


def stopped(child: subprocess.Popen[str], place: Place, moment: str, number: signal.Signals, more: str = "") -> None:
    """Send the signal once the server has been asked what it never answers; check how the command ends."""
    fault = SILENT[moment]
    words = [word.strip("^$") for word in fault["match"].split("|")]
    asked = lambda: any(place.service.requests(word, fault["method"]) for word in words)  # noqa: E731
    until = time.monotonic() + 20
    while child.poll() is None and not asked() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    child.send_signal(number)
    started = time.monotonic()
    _, said = child.communicate(timeout=30)
    assert time.monotonic() - started < 1.5, said
    assert (child.returncode, said.strip().splitlines()[-1:]) == (ENDS[number][0], [ENDS[number][1] + more])


@pytest.mark.parametrize("number", list(ENDS))
@pytest.mark.parametrize("moment", ["list", "head", "body"])
@pytest.mark.parametrize("command", ["dataset", "model"])
def test_a_silent_server(place: Place, tmp_path: Path, command: str, moment: str, number: signal.Signals) -> None:
    if place.kind == "hf" and moment == "head":
        pytest.skip("the hub is not asked for metadata file by file")
    if command == "dataset":
        write_parts(place.folder, PARTS)
    else:
        folder = place.folder if place.kind == "bos" else place.folder.parents[2] / "models" / "owner" / "name"
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, 0)
    place.service.order(faults=[{"kind": "silent", "times": -1, **SILENT[moment]}])
    words = [command, "--source", place.kind, "--uri", place.uri, "--endpoint", place.service.url]
    child = subprocess.Popen([*CLI, *words, "--workspace", str(tmp_path / "ws")], stdout=-1, stderr=-1, text=True)
    stopped(child, place, moment, number, "" if moment == "list" else GOES_ON)


@pytest.mark.parametrize("number", list(ENDS))
def test_a_doctor_whose_servers_are_silent(place: Place, number: signal.Signals) -> None:
    place.service.order(keys=KEYS, faults=[{"kind": "silent", "times": -1, **SILENT["all"]}])
    words = ["doctor", "--only", place.kind, "--timeout", "60", "--endpoint", place.service.url]
    child = subprocess.Popen([*CLI, *words], stdout=-1, stderr=-1, text=True)
    stopped(child, place, "all", number)


STRUCK = """
import os, signal, sys
def strike(event, arguments):
    if event == "import" and arguments[0] == {module!r}:
        os.kill(os.getpid(), signal.{number})
sys.addaudithook(strike)
from dm05_prep.__main__ import main
main()
"""


@pytest.mark.parametrize("number", list(ENDS))
@pytest.mark.parametrize("module", ["dm05_prep.cli", "dm05_schemas.cli", "tyro", "numpy", "pyarrow.lib"])
def test_while_modules_are_loaded(tmp_path: Path, module: str, number: signal.Signals) -> None:
    code = STRUCK.format(module=module, number=number.name)
    words = ["dataset", "--source", "local", "--uri", str(tmp_path), "--workspace", str(tmp_path / "ws")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (ENDS[number][0], f"{ENDS[number][1]}\n")
    assert not (tmp_path / "ws").exists()
