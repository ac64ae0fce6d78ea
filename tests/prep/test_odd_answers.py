"""Answers and settings that no honest service or person sends: each ends in words, none in a crash or a loop."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources import open_source
from dm05_prep.sources.hf_settings import find_settings
from dm05_prep.sources.numbers import environment_number, whole_number
from dm05_prep.sources.options import SourceOptions
from dm05_prep.sources.retry import RetryPolicy, retry_after
from dm05_schemas.errors import UsageError
from fake_secrets import SECRETS
from places import PART, Place, fetch, make_place, random_bytes

pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture
def bos(bos_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place("bos", *bos_process, monkeypatch)


@pytest.fixture
def hub(hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place("hf", *hub_process, monkeypatch)


@pytest.fixture(params=["bos", "hf"])
def place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    service, root = hub_process if request.param == "hf" else bos_process
    return make_place(request.param, service, root, monkeypatch)


def listed(place: Place, pattern: str, value: object) -> str:
    """The words for a list that says ``value``."""
    place.service.fault("status", status=200, match=pattern, body=json.dumps(value), times=-1)
    with pytest.raises(PrepError) as caught:
        place.open().files()
    return str(caught.value)


@pytest.mark.parametrize("text", ["\xb2", "-5", "9" * 5000, "1.5", "", "\u0663", "0x1"])
def test_what_is_no_whole_number(text: str) -> None:
    assert whole_number(text) is None
    retry_after({"Retry-After": text})


@pytest.mark.parametrize("text", ["\xb2", "9" * 5000])
def test_a_pause_that_is_no_number_is_not_heeded(place: Place, tmp_path: Path, text: str) -> None:
    data = place.put(random_bytes(5000))
    fault = {"kind": "status", "status": 503, "headers": {"Retry-After": text, "X-Linked-Size": text}}
    place.service.order(faults=[{**fault, "match": place.bodies}, {**fault, "match": "^/api/|^/bucket$"}])
    if place.kind == "hf":
        place.service.order(linked={"X-Linked-Size": text})
    assert fetch(place.open(), tmp_path / PART).read_bytes() == data


def test_sizes_below_nothing(bos: Place, hub: Place) -> None:
    bos.put(b"x")
    hub.put(b"x")
    page = {"contents": [{"key": f"p/{PART}", "size": -4}], "isTruncated": False}
    assert "size below 0" in listed(bos, "^/bucket$", page)
    tree = [{"type": "file", "path": PART, "size": -4, "oid": "a"}]
    assert "not in the form that a hub sends" in listed(hub, "/tree/", tree)


def test_a_list_that_goes_round_in_a_circle(bos: Place, hub: Place) -> None:
    bos.put(b"x")
    hub.put(b"x")
    page = {"contents": [{"key": f"p/{PART}", "size": 4}], "isTruncated": True, "nextMarker": "p/a"}
    assert "leads no further" in listed(bos, "^/bucket$", page)
    tree = [{"type": "file", "path": PART, "size": 4, "oid": "a"}]
    link = {"Link": f'<{hub.service.url}/api/datasets/owner/name/tree/x>; rel="next"'}
    fault = {"kind": "status", "status": 200, "match": "/tree/", "body": json.dumps(tree), "headers": link}
    hub.service.order(faults=[{**fault, "times": -1}])
    with pytest.raises(PrepError, match="not in the form that a hub sends"):
        hub.open().files()


def test_keys_that_no_header_can_hold(bos: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    bos.put(b"x")
    for name in ("BCE_ACCESS_KEY_ID", "BCE_SECRET_ACCESS_KEY", "BCE_SESSION_TOKEN"):
        with monkeypatch.context() as patch:
            patch.setenv(name, f"{SECRETS['secret']}\nsecond line")
            with pytest.raises(PrepError, match=r"\$BCE_ACCESS_KEY_ID.*strange characters") as caught:
                bos.open().files()
            assert SECRETS["secret"] not in str(caught.value)


def test_credentials_that_are_no_file(bos: Place, tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(PrepError, match=said):
            bos.open(credentials=path)


@pytest.mark.parametrize("name", ["HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"])
@pytest.mark.parametrize("text", ["x", "0.5", "-1", "\xb2", "1e400", "9" * 17])
def test_timeouts_of_the_hub_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name}: is .*, not a number of seconds"):
        find_settings(SourceOptions())


def test_numbers_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "nan", "-1", "x", "1e30", "inf"):
        monkeypatch.setenv("DM05_PREP_STALL_S", text)
        with pytest.raises(UsageError, match=r"DM05_PREP_STALL_S: is .*, not a number from 0\.01 to 86400"):
            RetryPolicy.from_environment()
    monkeypatch.setenv("DM05_PREP_STALL_S", " 2.5 ")
    assert environment_number("DM05_PREP_STALL_S", 1, least=1, most=3) == 2.5


@pytest.mark.parametrize("kind, said", [("html", "a web page came in place of it"), ("gzip", "encoded as 'gzip'")])
def test_what_is_not_the_file(place: Place, tmp_path: Path, kind: str, said: str) -> None:
    place.put(random_bytes(5000))
    place.service.fault(kind, match=place.bodies, times=-1)
    with pytest.raises(PrepError, match=said):
        fetch(place.open(), tmp_path / PART)


def test_a_redirect_of_a_bos_list(bos: Place) -> None:
    bos.put(b"x")
    bos.service.fault("status", status=302, match="^/bucket$", headers={"Location": "http://127.0.0.1:9/"}, times=-1)
    with pytest.raises(PrepError, match="leads elsewhere"):
        bos.open().files()


def test_a_file_that_the_storage_of_the_hub_does_not_have(hub: Place, tmp_path: Path) -> None:
    hub.put(random_bytes(5000))
    hub.service.fault("status", status=404, match="/cdn/", times=-1)
    with pytest.raises(PrepError, match="The storage does not have it"):
        fetch(hub.open(), tmp_path / PART)


def test_a_commit_that_is_gone(hub: Place, tmp_path: Path) -> None:
    hub.put(random_bytes(5000))
    source = hub.open()
    (file,) = source.files()
    hub.put(random_bytes(5000))
    with pytest.raises(PrepError, match=r"does not have this commit any more.*newest commit"):
        source.fetch(file, tmp_path / PART, progress=lambda count: None, stop=threading.Event())


def test_the_host_that_a_mirror_leads_to_is_named(hub: Place) -> None:
    hub.put(b"x")
    hub.service.order(redirect_to="http://127.0.0.1:9")
    with pytest.raises(PrepError, match=r"127\.0\.0\.1:9: cannot connect"):
        hub.open().files()


@pytest.mark.parametrize(
    "name, options",
    [("bos", {"revision": "v1"}), ("hf", {"region": "bj"}), ("local", {"endpoint": "x"}), ("local", {"revision": "v"})],
)
def test_options_of_another_source(name: Any, options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(options))}: means nothing for --source {name}"):
        open_source(name, None, kind="dataset", options=SourceOptions(**options))  # type: ignore[arg-type]


def test_a_proxy_that_asks_for_a_password(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put(b"x")
    place.service.fault("status", status=407, match="", times=-1)
    with pytest.raises(PrepError, match=r"the proxy asks for a user and password.*HTTP_PROXY"):
        place.open().files()
