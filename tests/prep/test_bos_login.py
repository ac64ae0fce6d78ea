"""Where keys and endpoints are found, and that none of their words shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources.bos_login import find_endpoint, find_login
from dm05_prep.sources.options import SourceOptions
from dm05_schemas.errors import UsageError
from fake_secrets import SECRETS

NOTHING = SourceOptions()


@pytest.fixture
def home(quiet_environment: Path) -> Path:
    (quiet_environment / ".go-bcecli").mkdir()
    return quiet_environment


def credentials(home: Path, text: str) -> Path:
    path = home / ".go-bcecli" / "credentials"
    path.write_text(text)
    return path


def configure(home: Path, text: str) -> None:
    (home / ".go-bcecli" / "config").write_text(text)


FILE = f"[Defaults]\nAk = {SECRETS['access']}\nSk = {SECRETS['secret']}\nSts = {SECRETS['token']}\n"


def test_nothing_is_anonymous(home: Path) -> None:
    assert find_login(NOTHING) is None


@pytest.mark.parametrize("names", [("BCE_ACCESS_KEY_ID", "BCE_SECRET_ACCESS_KEY"), ("BOS_AK", "BOS_SK")])
@pytest.mark.parametrize("token", [None, "BCE_SESSION_TOKEN", "BCE_SECURITY_TOKEN"])
def test_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str], token: str | None
) -> None:
    credentials(home, "[Defaults]\nAk = other\nSk = other\n")
    monkeypatch.setenv(names[0], f" {SECRETS['access']}\n")
    monkeypatch.setenv(names[1], SECRETS["secret"])
    if token:
        monkeypatch.setenv(token, SECRETS["token"])
    login = find_login(NOTHING)
    assert login and (login.access_key, login.secret_key) == (SECRETS["access"], SECRETS["secret"])
    assert login.token == (SECRETS["token"] if token else None)
    assert names[0] in login.place
    assert not any(secret in repr(login) for secret in SECRETS.values())


@pytest.mark.parametrize(
    "text", [FILE, FILE.upper().replace(SECRETS["secret"].upper(), SECRETS["secret"]), "\ufeff" + FILE]
)
def test_bcecmds_file(home: Path, text: str) -> None:
    credentials(home, text)
    login = find_login(NOTHING)
    assert login and login.secret_key == SECRETS["secret"] and login.token
    assert login.place.endswith("credentials with Sts")


def test_percent_signs_are_no_variables(home: Path) -> None:
    credentials(home, "[Defaults]\nAk = a%(b)s\nSk = 50%\nSts =\n")
    login = find_login(NOTHING)
    assert login and (login.access_key, login.secret_key, login.token) == ("a%(b)s", "50%", None)


def test_a_file_named_by_the_user_comes_first(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BCE_ACCESS_KEY_ID", "environment")
    monkeypatch.setenv("BCE_SECRET_ACCESS_KEY", "environment")
    path = tmp_path / "mine"
    path.write_text(FILE)
    login = find_login(SourceOptions(credentials=path))
    assert login and login.access_key == SECRETS["access"]
    assert find_login(SourceOptions(credentials=path, anonymous=True)) is None
    with pytest.raises(PrepError, match="no such file"):
        find_login(SourceOptions(credentials=tmp_path / "none"))


@pytest.mark.parametrize("text", ["[Defaults]\nAk = \nSk = \n", "", "[Other]\nAk = x\nSk = y\n"])
def test_empty_values_are_none(home: Path, text: str) -> None:
    credentials(home, text)
    assert find_login(NOTHING) is None


def test_half_a_pair(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials(home, f"[Defaults]\nSk = {SECRETS['secret']}\n")
    with pytest.raises(PrepError, match="has Sk alone") as caught:
        find_login(NOTHING)
    monkeypatch.setenv("BCE_ACCESS_KEY_ID", SECRETS["access"])
    with pytest.raises(PrepError, match=r"\$BCE_SECRET_ACCESS_KEY: half of the key pair is missing") as second:
        find_login(NOTHING)
    assert not any(secret in f"{caught.value}{second.value}" for secret in SECRETS.values())


@pytest.mark.parametrize(
    "raw", [f"Ak = {SECRETS['access']}".encode(), b"[Defaults\nx", b"\xff\xfe[D", b"[Defaults]\nsk\xff = 1"]
)
def test_a_file_that_is_none_never_shows_a_line(home: Path, raw: bytes) -> None:
    (home / ".go-bcecli" / "credentials").write_bytes(raw)
    with pytest.raises(PrepError, match="cannot be read as INI text") as caught:
        find_login(NOTHING)
    assert SECRETS["access"] not in str(caught.value)


def test_endpoints(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_endpoint(NOTHING, "mine") == "https://bj.bcebos.com"
    configure(home, "[Defaults]\nDomain = \nRegion = GZ\nHttps = yes\n".replace("GZ", "gz"))
    assert find_endpoint(NOTHING, "mine") == "https://gz.bcebos.com"
    assert find_endpoint(NOTHING, "aihc-rdw-bj") == "https://bj.bcebos.com", (
        "the user's region is not that of the release"
    )
    configure(home, '[Defaults]\nRegion = su\nHttps = no\n[Domains "su"]\nEndpoint = su.internal.example\n')
    assert find_endpoint(NOTHING, "mine") == "http://su.internal.example"
    configure(home, "[Defaults]\nDomain = bos.example.com:8080\nRegion = su\n")
    assert find_endpoint(NOTHING, "mine") == "https://bos.example.com:8080"
    monkeypatch.setenv("BCE_ENDPOINT", "http://env.example")
    assert find_endpoint(NOTHING, "aihc-rdw-bj") == "http://env.example"
    assert find_endpoint(SourceOptions(region="hkg"), "mine") == "https://hkg.bcebos.com"
    assert find_endpoint(SourceOptions(endpoint="bd.bcebos.com", region="hkg"), "mine") == "https://bd.bcebos.com"


@pytest.mark.parametrize("endpoint", ["ftp://x", "https://", "http://user:pass-word@x", "http://x:port"])
def test_endpoints_that_are_none(home: Path, endpoint: str) -> None:
    with pytest.raises(UsageError, match="--endpoint: is no endpoint") as caught:
        find_endpoint(SourceOptions(endpoint=endpoint), "mine")
    assert "pass-word" not in str(caught.value)
    with pytest.raises(UsageError, match="is no region"):
        find_endpoint(SourceOptions(region="b j"), "mine")
