"""No secret in anything that a fetch writes, prints or logs, not even with every logger at DEBUG."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_secrets import KEYS, SECRETS
from places import PART, Place, fetch, make_place, random_bytes

pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture(params=["bos", "hf"])
def place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place that wants all the secrets there are for it."""
    service, root = hub_process if request.param == "hf" else bos_process
    made = make_place(request.param, service, root, monkeypatch)
    if request.param == "hf":
        service.order(token=SECRETS["hub"])
    else:
        service.order(keys={SECRETS["access"]: {**KEYS[SECRETS["access"]], "token": SECRETS["token"]}})
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    monkeypatch.setenv("BCE_SESSION_TOKEN", SECRETS["token"])
    return made


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that any logger says."""
    sink = io.StringIO()
    handler = logging.StreamHandler(sink)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield sink
    root.removeHandler(handler)
    root.setLevel(level)


def hidden(*texts: str) -> bool:
    """True when no secret and no signature is in the texts."""
    return not any(secret in text for text in texts for secret in (*SECRETS.values(), "s3cret", "bce-auth-v1"))


def test_nothing_in_logs_and_output(place: Place, tmp_path: Path, log: io.StringIO, capfd: Any) -> None:
    place.put(random_bytes(5000))
    place.service.order(faults=[{"kind": "status", "status": 503, "match": place.bodies, "times": 2}])
    source = place.open()
    fetch(source, tmp_path / PART)
    said = capfd.readouterr()
    assert hidden(log.getvalue(), said.out, said.err, repr(source), source.description, repr(source.files()))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 503])
def test_nothing_in_errors_and_their_tracebacks(place: Place, tmp_path: Path, log: io.StringIO, status: int) -> None:
    place.put(random_bytes(5000))
    for pattern, method in (("", "GET"), (PART, "GET"), (PART, "HEAD")):
        place.service.order(
            faults=[{"kind": "status", "status": status, "match": pattern, "method": method, "times": -1}]
        )
        try:
            fetch(place.open(), tmp_path / PART)
        except Exception as error:
            assert hidden("".join(traceback.format_exception(error)), str(error), repr(error))
    assert hidden(log.getvalue())


def test_nothing_in_what_is_left_on_the_disk(place: Place, tmp_path: Path) -> None:
    place.put(random_bytes(200_000))
    place.service.order(rate=200_000)
    stop = threading.Event()
    with pytest.raises(Exception, match="stopped"):
        fetch(place.open(), tmp_path / "out" / PART, progress=lambda count: stop.set(), stop=stop)
    texts = [path.read_bytes().decode("latin-1") for path in (tmp_path / "out").iterdir() if path.suffix == ".json"]
    assert texts and hidden(*texts)


def test_nothing_among_the_arguments_of_processes(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of a process can be seen by everyone: flags name files and endpoints, never a key."""
    for command in ("model", "dataset", "doctor"):
        words = [sys.executable, "-c", "from dm05_prep.cli import main; main()", command, "--help"]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert not any(word in text for word in ("--token", "--ak", "--sk", "--secret", "--hf-token", "--password"))
