"""BOS: addresses, signatures, lists, keys, and the words for its refusals."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import bos_server
import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources import SourceOptions, open_source
from dm05_prep.sources.bos import split_uri
from dm05_prep.sources.bos_api import BosApi, address
from dm05_prep.sources.bos_login import BosLogin
from dm05_prep.sources.connection import Pool
from dm05_prep.sources.names import MODEL_FILES, RELEASED_PARTS
from dm05_prep.sources.retry import RetryPolicy
from dm05_schemas.errors import UsageError
from fake_secrets import KEYS, SECRETS
from hypothesis import given
from hypothesis import strategies as st
from places import PART, Place, fetch, make_place, random_bytes

pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture
def place(bos_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place("bos", *bos_process, monkeypatch)


@pytest.fixture
def public(bos_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    return make_place("anonymous", *bos_process, monkeypatch)


@pytest.mark.parametrize(
    "uri, parts",
    [
        ("bos://bucket/a/b/", ("bucket", "a/b/")),
        ("bos:/bucket/a/b/", ("bucket", "a/b/")),
        ("bos:///bucket//a", ("bucket", "a")),
        ("bos://bucket", ("bucket", "")),
        ("bos://bucket/", ("bucket", "")),
        ("bos:/aihc-models-bj/Dexmal/DM05", ("aihc-models-bj", "Dexmal/DM05")),
    ],
)
def test_addresses(uri: str, parts: tuple[str, str]) -> None:
    assert split_uri(uri) == parts


@pytest.mark.parametrize(
    "uri",
    [
        "bucket/a",
        "s3://bucket/a",
        "bos:",
        "bos://",
        "bos://Bucket/a",
        "bos://b/a",
        "bos://bu_ck/a",
        "bos://bucket/../x",
    ],
)
def test_addresses_that_are_none(uri: str) -> None:
    with pytest.raises(UsageError, match="bos://bucket/folder/"):
        split_uri(uri)


def sdk_url(endpoint: str, bucket: str, key: str, login: BosLogin) -> str:
    """Where the SDK would send a GET."""
    from baidubce.auth.bce_credentials import BceCredentials
    from baidubce.bce_client_configuration import BceClientConfiguration
    from baidubce.services.bos.bos_client import BosClient

    keys = BceCredentials(login.access_key, login.secret_key)
    client = BosClient(BceClientConfiguration(credentials=keys, endpoint=endpoint))
    url = client.generate_pre_signed_url(bucket, key)
    return url.decode() if isinstance(url, bytes) else str(url)


LOGIN = BosLogin(access_key="ak", secret_key="sk", place="a test")
ENDPOINTS = [
    "https://bj.bcebos.com",
    "http://gz.bcebos.com",
    "https://bucket.bj.bcebos.com",
    "http://127.0.0.1:8000",
    "http://localhost:8000",
    "https://bos.example.com",
    "https://x.cdn.bcebos.com",
]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@given(key=st.from_regex(r"[a-zA-Z0-9 _.~+%&=äé漢-]{1,12}(/[a-z #?]{1,5})?", fullmatch=True))
def test_our_requests_go_where_those_of_the_sdk_go(endpoint: str, key: str) -> None:
    if any(part.strip() in (".", "..", "v1") for part in key.split("/")) or key.strip("/") != key:
        return
    ours = BosApi("bucket", endpoint, LOGIN, Pool(1), RetryPolicy()).request(key).url
    theirs = sdk_url(endpoint, "bucket", key, LOGIN)
    assert ours.split("?")[0] == theirs.split("?")[0]


def test_an_endpoint_of_another_bucket_is_refused() -> None:
    with pytest.raises(PrepError, match="belongs to the bucket other"):
        address("https://other.bj.bcebos.com", "bucket")


@given(key=st.text(min_size=1, max_size=20).filter(lambda text: "\x00" not in text and text.isprintable()))
def test_our_signature_is_the_published_one(key: str) -> None:
    """Against the computation of the test service, which knows nothing of the SDK."""
    login = BosLogin(access_key="ak", secret_key="sk", token="sts-token", place="a test")
    request = BosApi("bucket", "http://127.0.0.1:1", login, Pool(1), RetryPolicy()).request(
        key, query={"prefix": key, "maxKeys": "7"}
    )
    parts = urlsplit(request.url)
    words = request.headers["Authorization"].split("/")
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    assert bos_server.signature("sk", words, "GET", parts.path, pairs, dict(request.headers)) == words[5]
    assert request.headers["x-bce-security-token"] == "sts-token"


NAMES = ["a b.bin", "ä/é.tar", "plus+and&=.x", "deep/er/f", "z~tilde_-.", "percent%20.f"]


@pytest.mark.parametrize("kind", ["bos", "anonymous"])
def test_odd_names_are_listed_in_pages_and_fetched(
    bos_process: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    place = make_place(kind, *bos_process, monkeypatch)
    contents = {name: place.put(random_bytes(50), name) for name in NAMES}
    place.service.order(page=2)
    source = place.open()
    assert [file.name for file in source.files()] == sorted(NAMES)
    for name, data in contents.items():
        assert fetch(source, tmp_path / name, name).read_bytes() == data
    assert len(place.service.requests("/bucket")) > 3


def test_a_prefix_is_a_folder_and_may_be_one_object(place: Place, tmp_path: Path) -> None:
    place.put(b"1", "f.tar")
    place.put(b"2", "f.tar.part-000")
    (place.folder.parent / "p2").mkdir(exist_ok=True)
    (place.folder.parent / "p2" / "other").write_bytes(b"3")
    for uri in ("bos://bucket/p/", "bos://bucket/p"):
        place.uri = uri
        assert [file.name for file in place.open().files()] == ["f.tar", "f.tar.part-000"]
    place.uri = "bos://bucket/p/f.tar"
    assert [file.name for file in place.open().files()] == ["f.tar"]
    fetch(place.open(), tmp_path / "f.tar", "f.tar")
    place.uri = "bos://bucket/nothing"
    with pytest.raises(PrepError, match="there is no object under it"):
        place.open().files()


def test_sums_of_every_kind_are_checked(place: Place, tmp_path: Path) -> None:
    """Each alone notices wrong bytes; an ETag that is no md5 is not taken for one."""
    place.put(random_bytes(5000))
    for sums, multipart, noticed in (
        (["crc32"], True, "crc32 is"),
        (["crc32c"], True, "crc32c is"),
        (["md5"], True, "md5 is"),
        ([], False, "md5 is"),
    ):
        place.service.order(sums=sums, multipart=multipart)
        place.put(random_bytes(5000))
        place.service.order(faults=[{"kind": "corrupt", "match": PART, "times": -1}])
        with pytest.raises(PrepError, match=noticed):
            fetch(place.open(), tmp_path / PART)
        place.service.order(faults=[])
        fetch(place.open(), tmp_path / PART)
        (tmp_path / PART).unlink()


def test_without_any_sum_the_size_is_all_there_is(place: Place, tmp_path: Path) -> None:
    data = place.put(random_bytes(5000))
    place.service.order(sums=[], multipart=True)
    fetch(place.open(), tmp_path / PART)
    assert (tmp_path / PART).read_bytes() == data


def refusal(place: Place, **options: Any) -> str:
    with pytest.raises(PrepError) as caught:
        place.open(**options).files()
    text = str(caught.value)
    assert not any(secret in text for secret in SECRETS.values())
    return text


def test_refused_keys(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put(b"x")
    monkeypatch.setenv("BCE_SECRET_ACCESS_KEY", "another")
    text = refusal(place)
    for part in (
        "bos://bucket/p/",
        "$BCE_ACCESS_KEY_ID",
        "403",
        "SignatureDoesNotMatch",
        "req-4",
        "--anonymous",
        "clock",
    ):
        assert part in text
    assert "another" not in text
    monkeypatch.setenv("BCE_ACCESS_KEY_ID", "unknown")
    assert "InvalidAccessKeyId" in refusal(place)


def test_a_session_token_goes_along(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put(random_bytes(100))
    place.service.order(keys={SECRETS["access"]: {"secret": SECRETS["secret"], "token": SECRETS["token"]}})
    assert "InvalidSecurityToken" in refusal(place)
    monkeypatch.setenv("BCE_SESSION_TOKEN", SECRETS["token"])
    fetch(place.open(), tmp_path / PART)


def test_a_wrong_clock_is_named(place: Place) -> None:
    place.put(b"x")
    place.service.order(clock_offset_s=7200)
    text = refusal(place)
    assert "RequestExpired" in text and "clock" in text and "120 minutes behind" in text


def test_an_expired_signature_is_renewed_once(place: Place, tmp_path: Path) -> None:
    """For lists, metadata and bytes alike."""
    data = place.put(random_bytes(100))
    expired = {"kind": "status", "status": 400, "body": '{"code": "RequestExpired", "message": "", "requestId": "1"}'}
    place.service.order(faults=[{**expired, "match": "^/bucket$"}, {**expired, "match": PART}])
    fetch(place.open(), tmp_path / PART)
    assert (tmp_path / PART).read_bytes() == data
    assert [request["status"] for request in place.body_requests()] == [400, 206]
    place.service.order(faults=[{**expired, "match": PART, "times": -1}], forget=True)
    with pytest.raises(PrepError, match="Set the system clock"):
        fetch(place.open(), tmp_path / "again")
    assert len(place.body_requests()) == 2


def test_nothing_is_sent_without_keys(public: Place, tmp_path: Path) -> None:
    public.put(random_bytes(100))
    fetch(public.open(), tmp_path / PART)
    assert not any(request["signed"] for request in public.service.requests())
    public.service.order(public_read=False, public_list=False)
    text = refusal(public)
    assert "BCE_ACCESS_KEY_ID" in text and "AccessDenied" in text


def test_a_missing_bucket(place: Place) -> None:
    place.uri = "bos://no-such-bucket/p/"
    assert "NoSuchBucket" in refusal(place) and "does not exist" in refusal(place)


def test_anonymous_readers_that_may_not_list_get_the_released_names(
    public: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    public.service.order(public_list=False)
    for name in (*RELEASED_PARTS, *MODEL_FILES[:3]):
        public.put(name.encode(), name)
    source = public.open()
    assert [file.name for file in source.files()] == list(RELEASED_PARTS)
    assert "may not be listed without keys" in capsys.readouterr().err
    assert [file.name for file in public.open(kind="model").files()] == list(MODEL_FILES[:3])
    fetch(source, tmp_path / PART)
    assert (tmp_path / PART).read_bytes() == PART.encode()


def test_keys_in_bcecmds_file(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put(random_bytes(10))
    monkeypatch.delenv("BCE_ACCESS_KEY_ID")
    monkeypatch.delenv("BCE_SECRET_ACCESS_KEY")
    path = tmp_path / "keys"
    path.write_text(f"[Defaults]\nAk = {SECRETS['access']}\nSk = {SECRETS['secret']}\nSts = \n")
    fetch(place.open(credentials=path), tmp_path / PART)
    assert all(request["signed"] for request in place.body_requests())


def test_names_that_lead_elsewhere_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    body = '{"contents": [{"key": "p/../../etc/passwd", "size": 1, "eTag": "x"}], "isTruncated": false}'
    place.service.order(faults=[{"kind": "status", "status": 200, "body": body, "match": "^/bucket$"}])
    with pytest.raises(PrepError, match="cannot be a path below the target folder"):
        place.open().files()


def test_a_list_without_end_is_no_loop(place: Place) -> None:
    body = '{"contents": [], "isTruncated": true}'
    place.service.order(faults=[{"kind": "status", "status": 200, "body": body, "match": "^/bucket$", "times": -1}])
    with pytest.raises(PrepError, match="announces more and leads no further"):
        place.open().files()


def test_the_default_places_are_the_released_ones() -> None:
    source = open_source("bos", None, kind="dataset")
    assert (
        "bos://aihc-rdw-bj/huggingface.co/datasets/Dexmal/libero/ (endpoint https://bj.bcebos.com" in source.description
    )
    source = open_source("bos", None, kind="model", options=SourceOptions(region="gz"))
    assert "bos://aihc-models-bj/Dexmal/DM05/ (endpoint https://gz.bcebos.com" in source.description


def test_a_stop_while_the_metadata_do_not_come(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DM05_PREP_RETRY_PAUSE_S", "30")
    place.put(b"x")
    source = place.open()
    file = source.files()[0]
    place.service.order(faults=[{"kind": "status", "status": 503, "method": "HEAD", "times": -1}])
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(PrepError, match="stopped"):
        source.fetch(file, tmp_path / "f", progress=lambda count: None, stop=stop)


def test_the_service_of_the_tests_refuses_what_is_wrong(place: Place) -> None:
    """Its verification counts for something: a changed key, method or header is noticed."""
    login = BosLogin(access_key=SECRETS["access"], secret_key=SECRETS["secret"], place="a test")
    api = BosApi("bucket", place.service.url, login, pool := Pool(5), RetryPolicy())
    place.put(b"x", "a")
    place.put(b"y", "b")
    request = api.request("p/a")
    assert pool.send(request).status == 200
    from dataclasses import replace

    assert pool.send(replace(request, url=request.url.replace("p/a", "p/b"))).status == 403
    assert pool.send(replace(request, headers={**request.headers, "x-bce-date": "2020-01-01T00:00:00Z"})).status == 403
    assert KEYS
