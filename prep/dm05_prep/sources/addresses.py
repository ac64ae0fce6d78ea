"""Addresses, and the proxies that the environment names for them."""

from __future__ import annotations

import base64
import urllib.parse
import urllib.request
from dataclasses import dataclass, field

from dm05_prep.errors import PrepError

PROXY_FIX = "Correct HTTP_PROXY / HTTPS_PROXY / ALL_PROXY, or name the host in NO_PROXY"


@dataclass(frozen=True)
class Proxy:
    """Where requests for one scheme go; ``authorization`` is the value of a Proxy-Authorization header."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)


def display(url: str) -> str:
    """``url`` without user, password, query and fragment: safe in a message."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{netloc(parts)}{parts.path}"


def origin(url: str) -> str:
    """Scheme, host and port of ``url``: what decides whether credentials may go along a redirect."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{parts.port or default_port(parts.scheme)}"


def proxy_for(url: str) -> Proxy | None:
    """The proxy that the environment names for ``url``, if any.

    Raises:
        PrepError: a kind of proxy that cannot be used.
    """
    parts = urllib.parse.urlsplit(url)
    proxies = urllib.request.getproxies_environment()
    text = proxies.get(parts.scheme) or proxies.get("all")
    if not text or urllib.request.proxy_bypass(netloc(parts)):
        return None
    proxy = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = proxy.port or default_port(proxy.scheme)
    except ValueError:
        raise PrepError("the port of the proxy is no number", where=_variable(parts.scheme), fix=PROXY_FIX) from None
    if proxy.scheme != "http" or not proxy.hostname:
        what = f"a {proxy.scheme}:// proxy cannot be used, only http://HOST:PORT"
        raise PrepError(what, where=_variable(parts.scheme), fix=PROXY_FIX)
    authorization = None
    if proxy.username is not None:
        words = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
        authorization = "Basic " + base64.b64encode(words.encode()).decode()
    return Proxy(proxy.hostname, port, authorization)


def netloc(parts: urllib.parse.SplitResult) -> str:
    """Host and port as a Host header has them: no user, and no port that goes without saying."""
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{parts.port}" if parts.port and parts.port != default_port(parts.scheme) else host


def proxy_login_error(where: str) -> PrepError:
    """What an answer of 407 means."""
    return PrepError("the proxy asks for a user and password, or refuses those given", where=where, fix=PROXY_FIX)


def default_port(scheme: str) -> int:
    """Of http and https."""
    return 443 if scheme == "https" else 80


def _variable(scheme: str) -> str:
    return f"${scheme.upper()}_PROXY"
