"""How one file of a source is asked for, and what the answers mean.

Each source implements :class:`Access`; :func:`open_span` does the asking, follows redirects, and accepts a body only
when it is the very range that was asked for, of the version that is being fetched.
"""

from __future__ import annotations

import http
import re
from collections.abc import Callable, Mapping
from typing import Protocol
from urllib.parse import quote, urljoin, urlsplit

from dm05_prep.errors import PrepError
from dm05_prep.sources.addresses import display, proxy_login_error
from dm05_prep.sources.checks import Checks
from dm05_prep.sources.connection import Link, Pool, Reply, Request
from dm05_prep.sources.partfile import Span
from dm05_prep.sources.retry import RETRY_STATUS, Trouble, retry_after

MAX_REDIRECTS = 6
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_ADDRESS_SIGNS = "%/:=&?~#+!$,;'@()*[]"  # what an address may hold as it is; some servers leave more in a Location
_CONTENT_RANGE = re.compile(r"bytes\s+(\d+)-(\d+)/(\d+|\*)")


class Changed(Exception):
    """The object is another one than the one that is being fetched."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoRange(Exception):
    """The server ignores ranges, or answers with others than those asked for."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Expired(Exception):
    """A signature or signed address is not valid any more.

    Args:
        url: the address that was refused.
        error: what to raise when a new one is refused as well.
    """

    def __init__(self, url: str, error: PrepError) -> None:
        super().__init__(str(error))
        self.url, self.error = url, error


class Access(Protocol):
    """One remote file.

    Attributes:
        where: names the file in messages, without secrets.
        network_fix: what to check when the host does not answer.
        size, checks, etag: of the version that is being fetched; ``refresh`` may replace them.
    """

    where: str
    network_fix: str
    size: int
    checks: Checks
    etag: str | None

    def request(self) -> Request:
        """Address and headers of a GET, signed or resolved now."""
        ...

    def moved(self, reply: Reply, location: str) -> Mapping[str, str]:
        """The server redirects to ``location``: the headers that may go there; raises Changed."""
        ...

    def check(self, reply: Reply) -> None:
        """Changed, when the headers of a 200 or 206 belong to another version."""
        ...

    def refused(self, reply: Reply, body: bytes) -> Exception:
        """What a status of 4xx means here: Expired, Trouble or PrepError."""
        ...

    def renew(self, url: str) -> None:
        """``url`` has expired: the next request resolves or signs again."""
        ...

    def refresh(self) -> None:
        """Ask for size, sums and ETag again; raises PrepError."""
        ...


def open_span(pool: Pool, access: Access, span: Span, *, whole: bool, opened: Callable[[Link], None]) -> Reply:
    """Ask for the rest of ``span`` and return the answer, its body unread.

    Args:
        whole: the span is the whole file, and the server may send it from the start without being asked for a range.

    Raises:
        Trouble, Changed, NoRange, Expired, PrepError
    """
    request = access.request()
    ranged = {} if whole and span.position == 0 else {"Range": f"bytes={span.position}-{span.end - 1}"}
    for _ in range(MAX_REDIRECTS):
        reply = pool.send(Request(url=request.url, headers={**request.headers, **ranged}), opened)
        location = reply.headers.get("Location")
        if reply.status not in _REDIRECTS or not location:
            break
        try:
            location = _target(request.url, location)
            headers = access.moved(reply, location)
        finally:
            reply.read()
        request = Request(url=location, headers=headers)
    else:
        raise Trouble(f"redirects more than {MAX_REDIRECTS} times, last to {display(request.url)}")
    try:
        _judge(access, span, reply, whole)
    except BaseException:
        reply.finish()
        raise
    return reply


def describe_status(status: int) -> str:
    """``503 -> "HTTP 503 Service Unavailable"``."""
    try:
        return f"HTTP {status} {http.HTTPStatus(status).phrase}"
    except ValueError:
        return f"HTTP {status}"


def _target(url: str, location: str) -> str:
    """The absolute address that a redirect of ``url`` leads to; Trouble when it is none."""
    target = urljoin(url, quote(location.encode("latin-1"), safe=_ADDRESS_SIGNS))
    try:
        parts = urlsplit(target)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise Trouble("redirects to an address that cannot be used")
    return target


def _judge(access: Access, span: Span, reply: Reply, whole: bool) -> None:
    status = reply.status
    if status == 206:
        _judge_range(access, span, reply)
    elif status == 200:
        if _is_web_page(reply) and reply.length != access.size:
            raise Trouble("a web page came in place of it, perhaps the log-in of a network or proxy")
        if reply.length is not None and reply.length != access.size and not _is_encoded(reply):
            raise Changed(f"the server sends {reply.length} bytes, {access.size} were announced")
        if _is_encoded(reply):
            raise NoRange(
                f"the server sends it encoded as {reply.headers['Content-Encoding']!r}, which was not asked for"
            )
        if span.position or not (whole or span.end == access.size):
            raise NoRange("the server ignores the range asked for")
        access.check(reply)
    elif status in (412, 416):
        reply.read()
        raise Changed(f"the server refuses the version or range asked for ({describe_status(status)})")
    else:
        after = retry_after(reply.headers)
        body = reply.read()
        if status == 407:
            raise proxy_login_error(access.where)
        if status in RETRY_STATUS or status >= 500:
            raise Trouble(describe_status(status), after)
        if 400 <= status < 500:
            raise access.refused(reply, body)
        raise Trouble(f"answers {describe_status(status)} to a GET")


def _judge_range(access: Access, span: Span, reply: Reply) -> None:
    text = reply.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if match and match[3] != "*" and int(match[3]) != access.size:
        raise Changed(f"the file has {match[3]} bytes now, {access.size} were announced")
    if not match or int(match[1]) != span.position or int(match[2]) < span.position or _is_encoded(reply):
        asked = f"{span.position}-{span.end - 1}"
        raise NoRange(f"the server answers the range {asked} with {text or 'no Content-Range'!r}")
    if reply.length is not None and reply.length != int(match[2]) - int(match[1]) + 1:
        raise NoRange(f"the server announces {reply.length} bytes for the range {text!r}")
    access.check(reply)


def _is_web_page(reply: Reply) -> bool:
    return reply.headers.get_content_type() == "text/html"


def _is_encoded(reply: Reply) -> bool:
    return reply.headers.get("Content-Encoding", "identity").lower() not in ("identity", "")
