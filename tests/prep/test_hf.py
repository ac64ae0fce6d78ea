"""The hub: commits, redirects and tokens, mirrors, the cache of this machine, refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources import SourceOptions, open_source
from dm05_schemas.errors import UsageError
from fake_secrets import SECRETS
from places import PART, Place, fetch, make_place, random_bytes, sha256
from process import Service

pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture
def place(hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place("hf", *hub_process, monkeypatch)


def refusal(place: Place, **options: Any) -> str:
    with pytest.raises(PrepError) as caught:
        place.open(**options).files()
    text = str(caught.value)
    assert not any(secret in text for secret in SECRETS.values())
    return text


@pytest.mark.parametrize("uri", ["owner/name", "datasets/owner/name", "hf://datasets/owner/name", "hf://owner/name/"])
def test_addresses(place: Place, uri: str) -> None:
    place.put(b"x", "f")
    place.uri = uri
    assert [file.name for file in place.open().files()] == ["f"]


@pytest.mark.parametrize("uri", ["name", "a/b/c", "owner/na me", "..//x", "hf://"])
def test_addresses_that_are_none(uri: str) -> None:
    with pytest.raises(UsageError, match="is no repository"):
        open_source("hf", uri, kind="dataset")


def test_the_list_has_sums_of_both_kinds_and_pages(place: Place, tmp_path: Path) -> None:
    contents = {
        name: place.put(random_bytes(size), name) for name, size in (("a", 10), ("b/c", 5000), ("d", 0), ("é f", 3000))
    }
    place.service.order(page=2)
    files = {file.name: file for file in place.open().files()}
    assert set(files) == set(contents)
    assert files["b/c"].sha256 == sha256(contents["b/c"]) and files["a"].sha256 is None
    assert all(files[name].size == len(data) for name, data in contents.items())
    source = place.open()
    for name, data in contents.items():
        assert fetch(source, tmp_path / name, name).read_bytes() == data


def test_small_files_are_checked_by_their_git_name(place: Place, tmp_path: Path) -> None:
    place.put(b"{}" * 100, "config.json")
    place.service.order(faults=[{"kind": "corrupt", "match": "config.json", "times": -1}])
    with pytest.raises(PrepError, match="git_sha1 is"):
        fetch(place.open(), tmp_path / "config.json", "config.json")


def test_the_token_goes_to_the_hub_and_nowhere_else(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = place.put(random_bytes(5000))
    place.service.order(token=SECRETS["hub"])
    text = refusal(place)
    assert "owner/name" in text and "HF_TOKEN" in text and "no token" in text and "401" in text
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    place.service.order(forget=True)
    fetch(place.open(), tmp_path / PART)
    assert (tmp_path / PART).read_bytes() == data
    requests = place.service.requests()
    assert all(request["signed"] for request in requests if request["host"].startswith("127.0.0.1"))
    storage = [request for request in requests if request["host"].startswith("localhost")]
    assert storage and not any(request["signed"] for request in storage)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "token from $HF_TOKEN" in refusal(place)
    assert "no token" in refusal(place, anonymous=True)


def test_refusals_name_what_to_do(place: Place) -> None:
    place.put(b"x")
    place.service.order(gated=True)
    assert "Accept the conditions on http://127.0.0.1" in refusal(place) and "gated" in refusal(place)
    place.service.order(gated=False)
    text = refusal(place, revision="v9")
    assert "no such branch, tag or commit" in text and "owner/name@v9" in text and "--revision" in text


def test_only_the_commit_is_fetched(place: Place, tmp_path: Path) -> None:
    place.put(random_bytes(5000))
    source = place.open(revision="main")
    fetch(source, tmp_path / PART)
    commit = source.commit  # type: ignore[attr-defined]
    assert len(commit) == 40
    assert all(f"/resolve/{commit}/" in request["path"] for request in place.service.requests("/resolve/"))
    assert place.open(revision=commit).files()


def test_the_address_of_the_storage_host_is_asked_for_once(place: Place, tmp_path: Path) -> None:
    place.put(random_bytes(40 << 20))
    fetch(place.open(), tmp_path / PART)
    assert len(place.service.requests("/resolve/")) == 1
    assert len(place.service.requests("/cdn/")) == 3


def test_an_expired_address_is_resolved_again(place: Place, tmp_path: Path) -> None:
    data = place.put(random_bytes(34 << 20))
    place.service.order(rate=30_000_000)
    seen: list[int] = []

    def progress(count: int) -> None:
        if not seen:
            place.service.order(expire=True)
        seen.append(count)

    fetch(place.open(jobs=1), tmp_path / PART, progress=progress)
    assert (tmp_path / PART).read_bytes() == data
    assert len(place.service.requests("/resolve/")) == 2
    assert sum(request["status"] == 403 for request in place.service.requests("/cdn/")) == 1
    assert place.service.sent("cdn/") < len(data) + 1000


def test_an_address_that_is_always_refused_is_named(place: Place, tmp_path: Path) -> None:
    place.put(random_bytes(5000))
    place.service.order(faults=[{"kind": "status", "status": 403, "match": "/cdn/", "times": -1}])
    with pytest.raises(PrepError) as caught:
        fetch(place.open(), tmp_path / PART)
    text = str(caught.value)
    assert "localhost" in text and "refuses the address that the hub signed" in text
    assert "s3cret" not in text and "X-Signature" not in text


def test_a_redirect_to_another_object_is_noticed(place: Place, tmp_path: Path) -> None:
    place.put(random_bytes(5000))
    for headers in ({"X-Linked-Etag": f'"{"0" * 64}"'}, {"X-Linked-Size": "5001"}):
        place.service.order(linked=headers)
        with pytest.raises(PrepError, match="points to another file than its list"):
            fetch(place.open(), tmp_path / PART)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "mirror").mkdir()
    with Service("hub_server", tmp_path / "mirror") as service:
        yield service


def test_a_mirror_that_sends_everything_to_the_hub(
    place: Place, mirror: Service, tmp_path: Path, monkeypatch: Any
) -> None:
    """Bytes come, and the token does not follow to a host that is not known to be the hub."""
    data = place.put(random_bytes(5000))
    mirror.order(redirect_to=place.service.url)
    monkeypatch.setenv("HF_ENDPOINT", f"{mirror.url}/")
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    source = open_source("hf", "owner/name", kind="dataset")
    fetch(source, tmp_path / PART)
    assert (tmp_path / PART).read_bytes() == data
    assert not any(request["signed"] for request in place.service.requests("/resolve/"))
    assert all(request["signed"] for request in mirror.requests("/resolve/"))


def cache(home: Path, place: Place, name: str = PART, data: bytes | None = None) -> Path:
    """Put a file of the commit into the hub's cache of this machine, as its library lays it out."""
    source = place.open()
    source.files()
    commit = source.commit  # type: ignore[attr-defined]
    folder = home / ".cache" / "huggingface" / "hub" / "datasets--owner--name"
    data = (place.folder / name).read_bytes() if data is None else data
    blob = folder / "blobs" / sha256((place.folder / name).read_bytes())
    link = folder / "snapshots" / commit / name
    for path in (blob, link, folder / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs" / "main").write_text(commit)
    return blob


def test_what_the_cache_holds_is_copied(place: Place, tmp_path: Path, quiet_environment: Path) -> None:
    data = place.put(random_bytes(5000))
    blob = cache(quiet_environment, place)
    seen: list[int] = []
    fetch(place.open(), tmp_path / PART, progress=seen.append)
    assert (tmp_path / PART).read_bytes() == data and sum(seen) == 5000
    assert place.service.sent(PART) == 0
    assert blob.exists() and not (tmp_path / PART).is_symlink()


def test_a_broken_cache_is_not_used(place: Place, tmp_path: Path, quiet_environment: Path, capsys: Any) -> None:
    data = place.put(random_bytes(5000))
    cache(quiet_environment, place, data=bytes(5000))
    fetch(place.open(), tmp_path / PART)
    assert (tmp_path / PART).read_bytes() == data
    assert "not used" in capsys.readouterr().err


def test_offline(place: Place, tmp_path: Path, quiet_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = place.put(random_bytes(5000))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(PrepError, match="offline mode is on and the hub's cache has no owner/name@main"):
        place.open().files()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    cache(quiet_environment, place)
    place.service.order(forget=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    source = place.open(endpoint="http://127.0.0.1:9")
    assert [file.sha256 for file in source.files()] == [sha256(data)]
    fetch(source, tmp_path / PART)
    assert (tmp_path / PART).read_bytes() == data
    assert place.service.requests() == []


@pytest.mark.parametrize("variable, below", [("HF_HOME", "hub"), ("HF_HUB_CACHE", "")])
def test_the_cache_may_be_elsewhere(
    place: Place, tmp_path: Path, quiet_environment: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    place.put(random_bytes(5000))
    cache(quiet_environment, place)
    (quiet_environment / ".cache" / "huggingface" / "hub").rename(tmp_path / "hub")
    monkeypatch.setenv(variable, str(tmp_path if below else tmp_path / "hub"))
    fetch(place.open(), tmp_path / PART)
    assert place.service.sent(PART) == 0


def test_the_default_places_are_the_released_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Dexmal/libero (https://huggingface.co, no token)" in open_source("hf", None, kind="dataset").description
    monkeypatch.setenv("HF_ENDPOINT", "https://hf-mirror.com/")
    source = open_source("hf", None, kind="model", options=SourceOptions(revision="v1"))
    assert "Dexmal/DM05@v1 (https://hf-mirror.com, no token)" in source.description
