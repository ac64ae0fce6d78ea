"""What the environment says about the Hugging Face hub, read when a source is opened.

::

    $HF_HOME  (else $XDG_CACHE_HOME/huggingface, else ~/.cache/huggingface)
      token                                  (or $HF_TOKEN_PATH)
      hub/                                   (or $HF_HUB_CACHE)
        datasets--OWNER--NAME/refs/main      the commit, 40 hex digits
        datasets--OWNER--NAME/snapshots/<commit>/FILE -> ../../blobs/<sha256, or git's sha1>
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from dm05_schemas.errors import UsageError
from dm05_schemas.files import cache_home, expanded

from dm05_prep.sources.numbers import whole_number
from dm05_prep.sources.options import SourceOptions
from dm05_prep.sources.retry import DAY_S

OFFICIAL_ENDPOINT = "https://huggingface.co"
OFFICIAL_HOSTS = frozenset({"huggingface.co", "hf.co"})
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """Where the hub is and how to use it; ``token_place`` is the only part of the token to show.

    ``hf_transfer`` and ``xet`` ask for these downloaders; both give up the exact resume of ours, so neither is used
    unless asked for: by HF_HUB_ENABLE_HF_TRANSFER=1, by HF_XET_HIGH_PERFORMANCE=1 (not behind a mirror: its storage
    hosts are not mirrored), or by HF_HUB_DISABLE_XET=0 (anywhere).
    """

    endpoint: str
    token: str | None = field(default=None, repr=False)
    token_place: str = "no token"
    cache: Path
    offline: bool
    hf_transfer: bool
    xet: bool
    timeout_s: float | None

    @property
    def is_mirror(self) -> bool:
        """True when the endpoint is not the hub itself."""
        return urlsplit(self.endpoint).hostname not in OFFICIAL_HOSTS


def find_settings(options: SourceOptions) -> HubSettings:
    """The settings of the environment, with ``options`` before them.

    Raises:
        UsageError: an endpoint that is no address, a timeout that is no number.
    """
    place = "--endpoint" if options.endpoint else "$HF_ENDPOINT"
    endpoint = _endpoint(options.endpoint or _text("HF_ENDPOINT") or OFFICIAL_ENDPOINT, place)
    home = _folder("HF_HOME") or expanded(cache_home()) / "huggingface"
    token, token_place = (None, "no token") if options.anonymous else _token(home)
    mirror = urlsplit(endpoint).hostname not in OFFICIAL_HOSTS
    xet_choice = _text("HF_HUB_DISABLE_XET")
    timeout_s, _ = _whole_seconds("HF_HUB_DOWNLOAD_TIMEOUT"), _whole_seconds("HF_HUB_ETAG_TIMEOUT")
    return HubSettings(
        endpoint=endpoint,
        token=token,
        token_place=token_place,
        cache=_folder("HF_HUB_CACHE") or _folder("HUGGINGFACE_HUB_CACHE") or home / "hub",
        offline=_is_on("HF_HUB_OFFLINE") or _is_on("TRANSFORMERS_OFFLINE"),
        hf_transfer=_is_on("HF_HUB_ENABLE_HF_TRANSFER"),
        xet=not _is_on("HF_HUB_DISABLE_XET")
        and (bool(xet_choice) or (_is_on("HF_XET_HIGH_PERFORMANCE") and not mirror)),
        timeout_s=timeout_s,
    )


def _endpoint(text: str, place: str) -> str:
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or parts.username is not None:
        raise UsageError("is no address of a hub", where=place, fix="For example: https://hf-mirror.com")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")


def _token(home: Path) -> tuple[str | None, str]:
    for name in _TOKEN_VARIABLES:
        if token := _text(name):
            return _checked(token, f"${name}")
    path = _folder("HF_TOKEN_PATH") or home / "token"
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    return _checked(token, str(path)) if token else (None, "no token")


def _checked(token: str, place: str) -> tuple[str, str]:
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            "holds no token: blanks or strange characters in it", where=place, fix="Set it again, or unset it"
        )
    return token, f"token from {place}"


def _text(name: str) -> str:
    return os.environ.get(name, "").strip()


def _whole_seconds(name: str) -> float | None:
    """The number of a variable that the hub's library reads as well, and would stumble over; None for none and 0."""
    text = _text(name)
    seconds = whole_number(text)
    if text and (seconds is None or seconds > DAY_S):
        raise UsageError(f"is {text!r}, not a number of seconds", where=f"${name}", fix="Correct or unset it")
    return float(seconds) if seconds else None


def _folder(name: str) -> Path | None:
    text = _text(name)
    return expanded(text) if text else None


def _is_on(name: str) -> bool:
    return _text(name).upper() in ("1", "ON", "YES", "TRUE")
