"""Keys and endpoint for Baidu BOS, from the places where people have them.

::

    ~/.go-bcecli/credentials   [Defaults]  Ak = ...  Sk = ...  Sts = ...        written by bcecmd; values may be empty
    ~/.go-bcecli/config        [Defaults]  Domain = bj.bcebos.com  Region = bj  Https = yes
                               [Domains "bj"]  Endpoint = bj.bcebos.com

A flag comes before the environment, the environment before these files. Without keys, requests go out unsigned.
"""

from __future__ import annotations

import configparser
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from dm05_schemas.errors import UsageError
from dm05_schemas.files import expanded

from dm05_prep.errors import PrepError
from dm05_prep.sources.options import SourceOptions

DEFAULT_REGION = "bj"
CREDENTIALS_FILE = Path("~/.go-bcecli/credentials")
CONFIG_FILE = Path("~/.go-bcecli/config")
RELEASED_BUCKETS = frozenset({"aihc-rdw-bj", "aihc-models-bj"})

_KEY_VARIABLES = (("BCE_ACCESS_KEY_ID", "BCE_SECRET_ACCESS_KEY"), ("BOS_AK", "BOS_SK"))
_TOKEN_VARIABLES = ("BCE_SESSION_TOKEN", "BCE_SECURITY_TOKEN")
_ENDPOINT_VARIABLES = ("BCE_ENDPOINT", "BOS_ENDPOINT")
_REGION_VARIABLES = ("BCE_REGION", "BOS_REGION")


@dataclass(frozen=True, kw_only=True)
class BosLogin:
    """A key pair, the token that goes with a temporary one, and the place they came from (the only part to show)."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    place: str


def find_login(options: SourceOptions) -> BosLogin | None:
    """The keys to sign with, None for unsigned requests.

    Raises:
        PrepError: half a pair, keys that cannot be sent, or a file that cannot be read.
    """
    if options.anonymous:
        return None
    if options.credentials is not None:
        path = expanded(options.credentials)
        login = _from_file(path)
        if not path.exists():
            raise PrepError("no such file", where=path, fix="Give a file as bcecmd writes it with --credentials")
        if login is None:
            raise PrepError("has no Ak and Sk in [Defaults]", where=path, fix="Give a file as bcecmd writes it")
        return login
    for access_name, secret_name in _KEY_VARIABLES:
        access, secret = _variable(access_name), _variable(secret_name)
        if bool(access) != bool(secret):
            missing = secret_name if access else access_name
            raise PrepError("half of the key pair is missing", where=f"${missing}", fix="Set both, or none")
        if access:
            token = next((value for name in _TOKEN_VARIABLES if (value := _variable(name))), None)
            place = f"${access_name}" + (" with a session token" if token else "")
            return _checked(BosLogin(access_key=access, secret_key=secret, token=token, place=place))
    return _from_file(expanded(CREDENTIALS_FILE))


def find_endpoint(options: SourceOptions, bucket: str) -> str:
    """``scheme://host[:port]`` to send requests for ``bucket`` to.

    The released buckets are in one region, so bcecmd's configuration, which is about the user's own, is not used for
    them.

    Raises:
        PrepError, UsageError: a value that is no host or region.
    """
    for text, place in _named_endpoints(options):
        if text:
            return _endpoint(text, place)
    region, place = _named_region(options)
    if region:
        return _endpoint(f"{region}.bcebos.com", place)
    if bucket not in RELEASED_BUCKETS:
        configured = _configured_endpoint(expanded(CONFIG_FILE))
        if configured:
            return configured
    return f"https://{DEFAULT_REGION}.bcebos.com"


def _named_endpoints(options: SourceOptions) -> list[tuple[str | None, str]]:
    found = [(options.endpoint, "--endpoint")]
    if not options.region:
        found += [(_variable(name), f"${name}") for name in _ENDPOINT_VARIABLES]
    return found


def _named_region(options: SourceOptions) -> tuple[str | None, str]:
    for text, place in [(options.region, "--region"), *((_variable(name), f"${name}") for name in _REGION_VARIABLES)]:
        if text:
            if not re.fullmatch("[a-z0-9-]+", text):
                raise UsageError(f"{text!r} is no region", where=place, fix="For example: bj, gz, su")
            return text, place
    return None, ""


def _endpoint(text: str, place: str, scheme: str = "https") -> str:
    """``text`` with a scheme, without path, user and password."""
    try:
        parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise UsageError("is no endpoint", where=place, fix="For example: https://bj.bcebos.com")
    return f"{parts.scheme}://{parts.hostname}{port}"


def _from_file(path: Path) -> BosLogin | None:
    values = _read_ini(path).get("defaults", {})
    access, secret = values.get("ak", ""), values.get("sk", "")
    if not access and not secret:
        return None
    if not access or not secret:
        raise PrepError(f"has {'Ak' if access else 'Sk'} alone", where=path, fix="bcecmd -c writes both")
    token = values.get("sts") or None
    place = f"{path}" + (" with Sts" if token else "")
    return _checked(BosLogin(access_key=access, secret_key=secret, token=token, place=place))


def _checked(login: BosLogin) -> BosLogin:
    """Keys that a header cannot hold are refused here: whatever refuses them later would show them."""
    for text in (login.access_key, login.secret_key, login.token or ""):
        if not text.isascii() or not text.isprintable() or " " in text:
            what = "holds no keys: blanks or strange characters in one of them"
            raise PrepError(what, where=login.place, fix="Set them again, or unset them")
    return login


def _configured_endpoint(path: Path) -> str | None:
    sections = _read_ini(path)
    values = sections.get("defaults", {})
    region, domain = values.get("region", ""), values.get("domain", "")
    if not domain and region:
        domain = sections.get(f'domains "{region.lower()}"', {}).get("endpoint", "") or f"{region}.bcebos.com"
    if not domain:
        return None
    return _endpoint(domain, str(path), "http" if values.get("https", "").lower() == "no" else "https")


def _read_ini(path: Path) -> dict[str, dict[str, str]]:
    """Section -> key -> value, names in lower case; empty without a file. An error never shows a line of it."""
    parser = configparser.RawConfigParser(strict=False, interpolation=None, default_section="\0")
    try:
        parser.read_string(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise PrepError(f"cannot be read: {error.strerror}", where=path, fix="Give a readable file, or none") from None
    except (configparser.Error, UnicodeDecodeError):
        raise PrepError("cannot be read as INI text", where=path, fix="bcecmd -c writes it anew") from None
    return {
        name.strip().lower(): {key.strip().lower(): value.strip() for key, value in parser.items(name) if value}
        for name in parser.sections()
    }


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()
