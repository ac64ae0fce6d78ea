"""What the environment says about the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from dm05_prep.sources.hf_settings import find_settings
from dm05_prep.sources.options import SourceOptions
from dm05_schemas.errors import UsageError
from fake_secrets import SECRETS

NOTHING = SourceOptions()


@pytest.fixture
def home(quiet_environment: Path) -> Path:
    return quiet_environment


def test_defaults(home: Path) -> None:
    settings = find_settings(NOTHING)
    assert settings.endpoint == "https://huggingface.co" and not settings.is_mirror
    assert settings.cache == home / ".cache" / "huggingface" / "hub"
    assert (settings.token, settings.offline, settings.hf_transfer, settings.xet) == (None, False, False, False)


def test_a_user_without_a_home_folder() -> None:
    """Such as a container's number without a name."""
    code = (
        "import os\n"
        "from dm05_prep.sources.hf_settings import find_settings\n"
        "from dm05_prep.sources.options import NO_OPTIONS\n"
        "from dm05_prep.sources.bos_login import find_endpoint, find_login\n"
        "from dm05_schemas.workspace import Workspace\n"
        "os.setuid(54321); os.environ.pop('HOME', None); os.environ.pop('XDG_CACHE_HOME', None)\n"
        "print(find_settings(NO_OPTIONS).cache, find_login(NO_OPTIONS), find_endpoint(NO_OPTIONS, 'mine'))\n"
        "Workspace.resolve(None)"
    )
    if os.getuid() != 0:
        pytest.skip("only root can be someone else")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "/dm05-54321/.cache/huggingface/hub None https://" in done.stdout


def test_tokens(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (home / ".cache" / "huggingface").mkdir(parents=True)
    (home / ".cache" / "huggingface" / "token").write_text(f"{SECRETS['hub']}\n")
    settings = find_settings(NOTHING)
    assert settings.token == SECRETS["hub"] and settings.token_place.endswith("huggingface/token")
    assert SECRETS["hub"] not in repr(settings)
    assert find_settings(SourceOptions(anonymous=True)).token is None
    (tmp_path / "mine").write_text("hf_path")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "mine"))
    assert find_settings(NOTHING).token == "hf_path"
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "hf_old")
    assert find_settings(NOTHING).token == "hf_old"
    monkeypatch.setenv("HF_TOKEN", " hf_new ")
    assert find_settings(NOTHING).token == "hf_new"


@pytest.mark.parametrize("token", ["two words", "secr\u00e9t", "a\x01b"])
def test_a_token_that_is_none_is_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError, match="HF_TOKEN") as caught:
        find_settings(NOTHING)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    "disable, fast, endpoint, xet",
    [
        ("", "", "https://huggingface.co", False),
        ("", "1", "https://huggingface.co", True),
        ("", "1", "https://hf-mirror.com", False),
        ("1", "1", "https://huggingface.co", False),
        ("0", "", "https://huggingface.co", True),
        ("0", "", "https://hf-mirror.com", True),
    ],
)
def test_xet_is_used_when_asked_for_and_not_behind_a_mirror(
    home: Path, monkeypatch: pytest.MonkeyPatch, disable: str, fast: str, endpoint: str, xet: bool
) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", disable)
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", fast)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert find_settings(NOTHING).xet is xet


@pytest.mark.parametrize("value", ["1", "ON", "yes", "True"])
def test_switches(home: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER"):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "42")
    settings = find_settings(NOTHING)
    assert (settings.offline, settings.hf_transfer, settings.timeout_s) == (True, True, 42.0)


@pytest.mark.parametrize("text", ["hf-mirror.com", "ftp://x", "https://", "https://user:pass-word@x"])
def test_endpoints_that_are_none(home: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", text)
    with pytest.raises(UsageError, match="HF_ENDPOINT") as caught:
        find_settings(NOTHING)
    assert "pass-word" not in str(caught.value)
