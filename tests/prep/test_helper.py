"""Downloaders in a child process: their result counts only when it is right, and they never outlive us."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from dm05_prep.sources import helper, hf
from dm05_prep.sources.helper_child import _shown
from dm05_prep.sources.retry import Stopped
from fake_secrets import SECRETS
from places import PART, Place, fetch, make_place, random_bytes

pytestmark = pytest.mark.usefixtures("quiet_environment")

SIZE = 20 << 20
PROGRAM = Path(__file__).with_name("fetch_parts.py")


@pytest.fixture
def place(hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(hf, "HELPER_MIN_BYTES", 1 << 20)
    monkeypatch.setenv("HF_HUB_ENABLE_HF_TRANSFER", "1")
    return make_place("hf", *hub_process, monkeypatch)


def children() -> list[psutil.Process]:
    """The helpers that run; other tests' processes may end while they are looked at."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "helper_child" in " ".join(child.cmdline()):
                found.append(child)
    return found


def check(place: Place, target: Path, data: bytes) -> None:
    """Fetch, and look at what came and what was left."""
    seen: list[int] = []
    fetch(place.open(), target, progress=seen.append)
    assert target.read_bytes() == data
    assert sum(seen) == len(data)
    assert [path.name for path in target.parent.iterdir()] == [PART]
    assert children() == []


def test_hf_transfer_brings_the_file(place: Place, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    data = place.put(random_bytes(SIZE))
    place.service.order(token=SECRETS["hub"])
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    check(place, tmp_path / "out" / PART, data)
    agents = {request["headers"].get("user-agent") for request in place.service.requests("/cdn/")}
    assert "dm05-prep" not in agents, "it was not our loop"
    assert capsys.readouterr().err == ""


FAULTS: dict[str, dict[str, Any]] = {
    "the address is refused": {"kind": "status", "status": 403},
    "no ranges": {"kind": "ignore_range"},
    "short answers that look right": {"kind": "short_range", "most": 500_000},
    "wrong bytes": {"kind": "corrupt"},
    "nothing comes": {"kind": "stall_body", "after": 10},
}


@pytest.mark.parametrize("name", FAULTS)
def test_when_it_fails_our_loop_takes_over(
    place: Place, tmp_path: Path, monkeypatch: Any, capsys: Any, name: str
) -> None:
    """As many faulty answers as hf_transfer may ask for; then the server is well again."""
    data = place.put(random_bytes(SIZE))
    place.service.order(token=SECRETS["hub"], faults=[{**FAULTS[name], "match": "/cdn/", "times": -1}])
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    run = hf.run_helper

    def run_then_mend(*arguments: Any, **options: Any) -> None:
        try:
            run(*arguments, **options)
        finally:
            place.service.order(faults=[])

    monkeypatch.setattr(hf, "run_helper", run_then_mend)
    check(place, tmp_path / "out" / PART, data)
    said = capsys.readouterr().err
    assert "hf_transfer failed" in said and "fetching it without" in said
    assert not any(secret in said for secret in SECRETS.values()) and "s3cret" not in said


def test_a_file_begun_by_our_loop_is_continued_by_it(place: Place, tmp_path: Path, monkeypatch: Any) -> None:
    place.put(random_bytes(SIZE))
    place.service.order(rate=2_000_000)
    monkeypatch.setenv("HF_HUB_ENABLE_HF_TRANSFER", "0")
    stop = threading.Event()
    with pytest.raises(Stopped):
        fetch(place.open(), tmp_path / PART, progress=lambda count: stop.set(), stop=stop)
    monkeypatch.setenv("HF_HUB_ENABLE_HF_TRANSFER", "1")
    place.service.order(rate=0, forget=True)
    fetch(place.open(), tmp_path / PART)
    assert 0 < place.service.sent(PART) < SIZE


def test_a_stop_kills_it_within_a_second(place: Place, tmp_path: Path) -> None:
    place.put(random_bytes(SIZE))
    place.service.order(faults=[{"kind": "stall_body", "after": 10, "match": "/cdn/", "times": -1}])
    stop = threading.Event()
    source = place.open()
    file = source.files()[0]
    threading.Timer(0.8, stop.set).start()
    started = time.monotonic()
    with pytest.raises(Stopped):
        source.fetch(file, tmp_path / PART, progress=lambda count: None, stop=stop)
    assert time.monotonic() - started < 1.8
    assert children() == [] and list(tmp_path.glob(f"{PART}*")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="a child can be tied to its parent on Linux only")
def test_it_dies_with_us(place: Place, tmp_path: Path) -> None:
    place.put(random_bytes(helper.HELPER_MIN_BYTES + 1))
    place.service.order(rate=3_000_000)
    command = [sys.executable, str(PROGRAM), "hf", place.uri, place.service.url, str(tmp_path / "out"), "4"]
    parent = subprocess.Popen(command)
    until = time.monotonic() + 20
    while not (found := psutil.Process(parent.pid).children()) and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.4)
    assert "hf_" not in " ".join(found[0].cmdline()), "no token or address among the arguments"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs(found, timeout=5)[1] == []
    place.service.order(rate=0)
    subprocess.run(command, check=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [PART]


def test_xet_whose_storage_cannot_be_reached(place: Place, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    data = place.put(random_bytes(2 << 20))
    place.service.order(xet=True)
    monkeypatch.setenv("HF_HUB_ENABLE_HF_TRANSFER", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "0")
    check(place, tmp_path / "out" / PART, data)
    assert "xet failed" in capsys.readouterr().err


def test_behind_a_mirror_xet_is_not_even_tried(place: Place, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    data = place.put(random_bytes(2 << 20))
    place.service.order(xet=True)
    monkeypatch.setenv("HF_HUB_ENABLE_HF_TRANSFER", "0")
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "1")
    check(place, tmp_path / "out" / PART, data)
    assert capsys.readouterr().err == ""
    assert place.service.requests("xet") == []


def test_errors_of_the_child_show_no_secret() -> None:
    error = RuntimeError("HTTP 403 for url (https://cdn.example/f?X-Signature=abc&token=hf_x)\nBearer hf_x")
    text = _shown(error, "hf_x")
    assert "\n" not in text and "hf_x" not in text and "abc" not in text and "cdn.example/f" in text
