"""Every fault of a server or the network, at every kind of place: the right bytes, or an error that says why."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources import SourceOptions, open_source, partfile
from dm05_prep.sources.retry import Stopped
from fake_secrets import SECRETS
from places import PART, Place, fetch, make_place, random_bytes, ranges, sha256

SPAN = 256 << 10
SIZE = 5 * SPAN + 12345

pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partfile, "SPAN_BYTES", SPAN)


@pytest.fixture(params=["bos", "hf"])
def place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    service, root = hub_process if request.param == "hf" else bos_process
    return make_place(request.param, service, root, monkeypatch)


@pytest.fixture(params=["bos", "anonymous", "hf"])
def any_place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    service, root = hub_process if request.param == "hf" else bos_process
    return make_place(request.param, service, root, monkeypatch)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / PART


def fetch_and_stop(place: Place, target: Path) -> None:
    """Fetch slowly, and stop when some bytes have come."""
    stop, seen = threading.Event(), []

    def progress(count: int) -> None:
        seen.append(count)
        if sum(seen) > SIZE // 5:
            stop.set()

    place.service.order(rate=1_000_000)
    with pytest.raises(Stopped):
        fetch(place.open(), target, progress=progress, stop=stop)
    place.service.order(rate=0)


def leftovers(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path != target)


PASSING: dict[str, dict[str, Any]] = {
    "reset before the headers": {"kind": "reset", "times": 3},
    "silence before the headers": {"kind": "silent"},
    "reset in the body": {"kind": "reset_body", "after": 100_000, "times": 3},
    "stall in the body": {"kind": "stall_body", "after": 100_000},
    "body cut short": {"kind": "short_body", "after": 100_000, "times": 3},
    "body cut at its first byte": {"kind": "short_body", "after": 0, "times": 2},
    "range ignored once": {"kind": "ignore_range"},
    "range ignored later": {"kind": "ignore_range", "skip": 2},
    "range ignored always": {"kind": "ignore_range", "times": -1},
    "range ignored always, later on": {"kind": "ignore_range", "skip": 2, "times": -1},
    "another range": {"kind": "wrong_range", "shift": 7, "skip": 1},
    "another range always": {"kind": "wrong_range", "shift": 7, "times": -1},
    "no Content-Range": {"kind": "no_content_range", "skip": 1},
    "ranges given in pieces": {"kind": "short_range", "most": 50_000, "times": -1},
    "answered in gzip": {"kind": "gzip", "times": 1},
    "416 once": {"kind": "status", "status": 416},
    "412 once": {"kind": "status", "status": 412, "skip": 1},
    "wrong bytes once": {"kind": "corrupt", "skip": 1},
    "a page of a portal once": {"kind": "html", "skip": 1},
    **{f"status {code}": {"kind": "status", "status": code, "times": 3} for code in (408, 429, 500, 502, 503, 504)},
}


@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_leaves_no_trace(place: Place, target: Path, name: str) -> None:
    data = place.put(random_bytes(SIZE))
    place.service.order(faults=[{"match": place.bodies, **PASSING[name]}])
    seen: list[int] = []
    assert fetch(place.open(), target, progress=seen.append) == target
    assert target.read_bytes() == data
    assert sum(seen) == SIZE
    assert leftovers(target) == []


def test_what_brings_enough_may_break_as_often_as_it_likes(place: Place, target: Path) -> None:
    data = place.put(random_bytes(SIZE))
    place.service.order(faults=[{"match": place.bodies, "kind": "short_body", "after": 50_000, "times": -1}])
    fetch(place.open(jobs=1), target)
    assert target.read_bytes() == data
    assert len(place.body_requests()) > SIZE // 50_000


RESUMED = ("reset in the body", "stall in the body", "body cut short")


@pytest.mark.parametrize("name", RESUMED)
def test_a_broken_body_is_continued_at_its_byte(place: Place, target: Path, name: str) -> None:
    place.put(random_bytes(SIZE))
    hits = 1 if name.startswith("stall") else 2
    place.service.order(faults=[{"match": place.bodies, **PASSING[name], "times": hits}])
    fetch(place.open(jobs=1), target)
    asked = ranges(place.body_requests())
    assert [first % SPAN for first, _ in asked].count(0) == 6, "no span is begun twice"
    assert sum(1 for first, _ in asked if first % SPAN == 100_000) >= 1
    assert len(asked) == 6 + hits
    assert place.service.sent(PART) == SIZE, "no byte twice"


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "reset always": ({"kind": "reset", "times": -1}, "8 tries without progress"),
    "503 always": ({"kind": "status", "status": 503, "times": -1}, "HTTP 503 Service Unavailable (8 tries"),
    "429 always": ({"kind": "status", "status": 429, "times": -1}, "HTTP 429 Too Many Requests"),
    "body never begins": ({"kind": "short_body", "after": 0, "times": -1}, "broke off early"),
    "few bytes, then silence, always": ({"kind": "stall_body", "after": 2000, "times": -1}, "(8 tries without"),
    "few bytes, then the end, always": ({"kind": "short_body", "after": 2000, "times": -1}, "(8 tries without"),
    "416 always": ({"kind": "status", "status": 416, "times": -1}, "HTTP 416"),
    "another size": ({"kind": "total", "more": 1, "times": -1}, f"has {SIZE + 1} bytes now, {SIZE} were announced"),
    "a page of a portal always": ({"kind": "html", "times": -1}, "a web page came in place of it"),
    "asked to wait for a day": (
        {"kind": "status", "status": 503, "headers": {"Retry-After": "86400"}},
        "asks to wait 24.0 hours",
    ),
    "redirected to nowhere": (
        {"kind": "status", "status": 307, "headers": {"Location": "http://host:port/"}, "times": -1},
        "redirects to an address that cannot be used",
    ),
    "redirects in a circle": (
        {"kind": "status", "status": 302, "headers": {"Location": ""}, "times": -1},
        "redirects more than",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_fault_that_stays_is_named_and_nothing_is_accepted(place: Place, target: Path, name: str) -> None:
    place.put(random_bytes(SIZE))
    fault, text = FAILING[name]
    if fault.get("status") == 302:
        where = place.service.requests  # a circle through the address itself
        assert where is not None
        fault = {**fault, "headers": {"Location": f"http://127.0.0.1:{place.service.port}/again/{PART}"}}
        place.service.order(faults=[{"match": f"{place.bodies}|/again/", **fault}])
    else:
        place.service.order(faults=[{"match": place.bodies, **fault}])
    with pytest.raises(PrepError) as caught:
        fetch(place.open(), target)
    assert text in str(caught.value)
    assert PART in str(caught.value), "the message names the file"
    assert not target.exists()
    assert not any(secret in str(caught.value) for secret in SECRETS.values())


def test_corruption_for_good_is_refused_with_both_sums(any_place: Place, target: Path) -> None:
    data = any_place.put(random_bytes(SIZE))
    any_place.service.order(faults=[{"match": any_place.bodies, "kind": "corrupt", "times": -1}])
    with pytest.raises(PrepError) as caught:
        fetch(any_place.open(), target)
    text = str(caught.value)
    assert "wrong bytes arrived twice" in text and "published is" in text
    if any_place.kind == "hf":
        assert sha256(data) in text
    assert not target.exists() and leftovers(target) == []


def test_retry_after_is_obeyed(place: Place, target: Path) -> None:
    place.put(random_bytes(1000))
    place.service.order(
        faults=[{"match": place.bodies, "kind": "status", "status": 429, "headers": {"Retry-After": "1"}}], lfs_bytes=1
    )
    started = time.monotonic()
    fetch(place.open(), target)
    assert 1.0 <= time.monotonic() - started < 3.0


def test_a_stop_is_kept_to_and_then_continued(place: Place, target: Path) -> None:
    data = place.put(random_bytes(SIZE))
    fetch_and_stop(place, target)
    there = sum(json.loads((target.parent / f"{PART}.part.json").read_text())["done"])
    assert SIZE // 5 <= there < SIZE
    place.service.order(forget=True)
    fetch(place.open(), target)
    assert target.read_bytes() == data
    assert place.service.sent(PART) == SIZE - there, "no byte twice"


def test_a_stop_while_the_server_is_silent_takes_no_second(place: Place, target: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DM05_PREP_STALL_S", "30")
    place.put(random_bytes(SIZE))
    place.service.order(faults=[{"match": place.bodies, "kind": "stall_body", "after": 1000, "times": -1}])
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    started = time.monotonic()
    with pytest.raises(Stopped):
        fetch(place.open(), target, stop=stop)
    assert time.monotonic() - started < 1.4


def test_ranges_ignored_after_a_part_was_there(place: Place, target: Path) -> None:
    """The law: discard what is there and start at the first byte."""
    data = place.put(random_bytes(SIZE))
    fetch_and_stop(place, target)
    place.service.order(rate=0, faults=[{"match": place.bodies, "kind": "ignore_range", "times": -1}], forget=True)
    fetch(place.open(), target)
    assert target.read_bytes() == data
    assert place.body_requests()[-1]["range"] is None


class Swapping:
    """A progress that changes the file once some bytes have come."""

    def __init__(self, place: Place, data: bytes) -> None:
        self._place, self._data, self.done = place, data, False

    def __call__(self, count: int) -> None:
        if not self.done:
            self.done = True
            self._place.put(self._data)


@pytest.mark.parametrize("size", [SIZE, SIZE - SPAN, SIZE + SPAN])
def test_an_object_replaced_on_the_way_is_fetched_anew(place: Place, target: Path, size: int) -> None:
    place.put(random_bytes(SIZE))
    new = random_bytes(size)
    place.service.order(rate=2_000_000)
    kind = "model" if place.kind == "bos" else "dataset"  # of a bucket, each file of a model is taken as it is
    fetch(place.open(jobs=2, kind=kind), target, progress=Swapping(place, new))
    assert target.read_bytes() == new
    assert leftovers(target) == []


@pytest.mark.parametrize("any_place", ["bos", "anonymous"], indirect=True)
@pytest.mark.parametrize("when", ["on the way", "before its turn"])
def test_a_part_replaced_since_the_listing_is_not_mixed_with_the_others(
    any_place: Place, target: Path, when: str
) -> None:
    """Of parts of two versions no dataset is made. (A hub is asked for one commit.)"""
    place = any_place
    place.put(random_bytes(SIZE))
    source = place.open(jobs=2)
    file = source.files()[0]
    swapping = Swapping(place, random_bytes(SIZE))
    if when == "on the way":
        place.service.order(rate=2_000_000)
    else:
        swapping(0)
    with pytest.raises(PrepError, match=r"was replaced since the run began.*Run the same command again"):
        source.fetch(file, target, progress=swapping, stop=threading.Event())
    assert not target.exists()
    fetch(place.open(), target)
    assert target.read_bytes() == (place.folder / PART).read_bytes()


def test_another_version_never_continues_a_part(place: Place, target: Path) -> None:
    place.put(random_bytes(SIZE))
    fetch_and_stop(place, target)
    new = place.put(random_bytes(SIZE))
    place.service.order(rate=0, forget=True)
    fetch(place.open(), target)
    assert target.read_bytes() == new
    assert place.service.sent(PART) >= SIZE


def test_a_missing_file_is_named(any_place: Place, target: Path) -> None:
    any_place.put(random_bytes(100))
    source = any_place.open()
    file = source.files()[0]
    (any_place.folder / PART).unlink()
    any_place.put(b"x", "other")
    with pytest.raises(PrepError, match=r"does not have|does not exist") as caught:
        source.fetch(file, target, progress=lambda count: None, stop=threading.Event())
    assert PART in str(caught.value)


def test_nobody_listens(any_place: Place, target: Path, unused_port: int) -> None:
    any_place.put(random_bytes(100))
    source = any_place.open(endpoint=f"http://127.0.0.1:{unused_port}")
    with pytest.raises(PrepError) as caught:
        source.files()
    text = str(caught.value)
    assert "refused" in text.lower() and "8 tries" in text and f"127.0.0.1:{unused_port}" in text and "PROXY" in text


def test_the_host_has_no_address(any_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(*arguments: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    source = any_place.open(endpoint="http://no-such-host.example")
    with pytest.raises(PrepError) as caught:
        source.files()
    assert "no-such-host.example" in str(caught.value) and "8 tries" in str(caught.value)


@pytest.fixture
def unused_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield listener.getsockname()[1]  # bound but not listening: connections are refused


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_lists_and_metadata_are_tried_again(any_place: Place, target: Path, status: int) -> None:
    data = any_place.put(random_bytes(1000))
    what = [{"kind": "status", "status": status, "match": "^/bucket$|/api/datasets/[^/]+/[^/]+$"}]
    what += [{"kind": "status", "status": status, "method": "HEAD"}, {"kind": "reset", "method": "HEAD"}]
    any_place.service.order(faults=what)
    fetch(any_place.open(), target)
    assert target.read_bytes() == data


def test_a_list_that_is_no_list(any_place: Place) -> None:
    any_place.put(random_bytes(10))
    any_place.service.order(faults=[{"kind": "html", "times": -1}])
    with pytest.raises(PrepError, match="proxy in between"):
        any_place.open().files()


def test_space_is_checked_before(place: Place, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put(random_bytes(SIZE))
    usage = type("Usage", (), {"total": 10, "used": 9, "free": SIZE - 1})
    monkeypatch.setattr(partfile.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PrepError, match="no space left"):
        fetch(place.open(), target)
    assert place.service.sent(PART) == 0


def test_options_name_the_endpoint_in_the_message() -> None:
    source = open_source("bos", "bos:/bucket/p", kind="dataset", options=SourceOptions(region="gz"))
    assert "bos://bucket/p/" in source.description and "https://gz.bcebos.com" in source.description
