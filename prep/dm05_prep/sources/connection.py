"""HTTP/1.1 over kept connections, for large bodies.

Thin on purpose: no redirect is followed, nothing decoded, retried or buffered here. Any connection can be cut from
another thread, so that a stop never waits for a silent server. Proxies come from the environment.
"""

from __future__ import annotations

import email.utils
import errno
import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message

from dm05_prep.errors import PrepError
from dm05_prep.sources.addresses import PROXY_FIX, default_port, display, netloc, origin, proxy_for
from dm05_prep.sources.retry import Trouble

MAX_SMALL_BODY = 8 << 20
NO_SPLICE = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)  # of a system or filesystem without it
_HELD_BACK = io.DEFAULT_BUFFER_SIZE


@dataclass(frozen=True, kw_only=True)
class Request:
    """A GET or HEAD; ``headers`` and the query of ``url`` may hold secrets and are kept out of the repr."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    method: str = "GET"


def clock_ahead(headers: Message) -> float | None:
    """Seconds that this machine's clock is ahead of a server's, by the Date of its answer."""
    try:
        return time.time() - email.utils.parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except (TypeError, ValueError):
        return None


class Reply:
    """An answer whose body is still on the wire; ``length`` is its size in bytes, None when not announced."""

    def __init__(self, link: Link, response: http.client.HTTPResponse, url: str) -> None:
        self._link, self._response = link, response
        self.url, self.status, self.headers = url, response.status, response.headers
        self.length: int | None = response.length
        self._left = self.length
        self._finished = False
        self._raw = None if response.chunked else response.fp
        self.can_splice = False

    @property
    def complete(self) -> bool:
        """True when all announced bytes were read."""
        return self._left == 0

    def readinto(self, view: memoryview) -> int:
        """One read from the wire into ``view``; 0 at the end of the body, or where the server broke it off.

        Raises:
            Trouble: connection lost or silent.
        """
        if self._left is not None:
            view = view[: self._left]
        if not len(view):
            return 0
        try:
            count = self._raw.readinto1(view) if self._raw else self._response.readinto(view)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._link.close()
            raise Trouble(describe_failure(error, "while the body came")) from None
        if self._left is not None:
            self._left -= count
            # whatever had come with the headers has been read now, if it could be
            self.can_splice = self._link.splices and self._raw is not None and len(view) > _HELD_BACK
        return count

    def splice(self, pipe: int, most: int) -> int | None:
        """Like :meth:`readinto`, into a pipe with room for any; None when these bytes have to be read.

        Raises:
            Trouble: connection lost or silent.
        """
        if not self.can_splice or self._left is None:
            return None
        try:
            count = self._link.splice(pipe, min(most, self._left))
        except OSError as error:
            if error.errno in NO_SPLICE:
                self.can_splice = self._link.splices = False
                return None
            self._link.close()
            raise Trouble(describe_failure(error, "while the body came")) from None
        self._left -= count
        return count

    def read(self) -> bytes:
        """The whole body, up to :data:`MAX_SMALL_BODY`; then the connection is free again.

        Raises:
            Trouble: connection lost, or the body shorter than announced or absurdly long.
        """
        body = bytearray()
        buffer = memoryview(bytearray(65536))
        while count := self.readinto(buffer):
            body += buffer[:count]
            if len(body) > MAX_SMALL_BODY:
                self._link.close()
                raise Trouble(f"answered with more than {MAX_SMALL_BODY} bytes where a short text was due")
        if self._left:
            self._link.close()
            raise Trouble(f"broke off {self._left} bytes before the end of the answer")
        self.finish()
        return bytes(body)

    def finish(self) -> None:
        """Give the connection back to the pool; it is closed when the body was not read to its end."""
        if self._finished:
            return
        self._finished = True
        reusable = self._left == 0 and not self._response.will_close
        self._response.close()
        self._link.release(reusable)


class Link:
    """One connection, to a server or to the proxy before it."""

    def __init__(self, pool: Pool, url: str, timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        self._pool, self.key, self.fresh, self.cut_off = pool, origin(url), True, False
        host, port = parts.hostname or "", parts.port or default_port(parts.scheme)
        self.splices = True
        self._wire: socket.socket | None = None  # http.client forgets its own when the server will close
        self._proxy = proxy_for(url)
        self.via = f" through the proxy {self._proxy.host}:{self._proxy.port}" if self._proxy else ""
        self._absolute = self._proxy is not None and parts.scheme == "http"
        near = (self._proxy.host, self._proxy.port) if self._proxy else (host, port)
        if parts.scheme == "https":
            context = pool.tls_context()
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                *near, timeout=timeout_s, context=context
            )
            if self._proxy:
                login = {"Proxy-Authorization": self._proxy.authorization} if self._proxy.authorization else {}
                self._http.set_tunnel(host, port, headers=login)
        else:
            self._http = http.client.HTTPConnection(*near, timeout=timeout_s)

    def send(self, request: Request) -> Reply:
        """Send ``request`` and read the head of the answer; raises what http.client raises."""
        parts = urllib.parse.urlsplit(request.url)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = {"Host": netloc(parts), "Accept-Encoding": "identity", "User-Agent": "dm05-prep", **request.headers}
        if self._absolute:
            target = f"{parts.scheme}://{netloc(parts)}{target}"
            if self._proxy and self._proxy.authorization:
                headers["Proxy-Authorization"] = self._proxy.authorization
        self._http.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            self._http.putheader(name, value)
        self._http.endheaders()
        self._wire = self._http.sock
        self.splices = self.splices and not isinstance(self._wire, ssl.SSLSocket)
        return Reply(self, self._http.getresponse(), request.url)

    def splice(self, pipe: int, most: int) -> int:
        """Move what has arrived, at least one byte, into a pipe; 0 at the end. Raises OSError."""
        assert self._wire is not None
        wire, timeout_s = self._wire.fileno(), self._wire.gettimeout() or 0.0
        while True:
            try:
                return os.splice(wire, pipe, most)
            except BlockingIOError:
                arrival = select.poll()
                arrival.register(wire, select.POLLIN)
                if not arrival.poll(timeout_s * 1000):
                    raise TimeoutError from None

    def cut(self) -> None:
        """End whatever waits on this connection, from any thread."""
        self.cut_off = True
        if self._wire is not None:
            try:
                self._wire.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        """Close for good."""
        self._http.close()
        self._pool.forget(self)

    def release(self, reusable: bool) -> None:
        """Back to the pool, or closed."""
        if reusable and not self.cut_off and self._http.sock is not None:
            self.fresh = False
            self._pool.keep(self)
        else:
            self.close()


class Pool:
    """Connections kept open between requests, shared by threads."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: dict[str, list[Link]] = {}
        self._tls: ssl.SSLContext | None = None

    def send(self, request: Request, opened: Callable[[Link], None] | None = None) -> Reply:
        """Send over an idle connection, or a new one; a kept one that the server has closed is replaced.

        Args:
            opened: told the connection before it is used, so that it can be cut.

        Raises:
            Trouble: no answer.
            PrepError: no answer, and waiting cannot help.
        """
        while True:
            link = self._take(request.url)
            if opened:
                opened(link)
            try:
                return link.send(request)
            except (OSError, http.client.HTTPException) as error:
                link.close()
                if link.fresh or link.cut_off or isinstance(error, TimeoutError):
                    raise connection_failure(error, request.url, link.via) from None
            except (ValueError, UnicodeError):
                link.close()
                what = "the address or a header of it cannot be sent"
                raise PrepError(
                    what, where=display(request.url), fix="Check the endpoint, the name and the token"
                ) from None

    def clock_ahead_of(self, url: str) -> float | None:
        """Like :func:`clock_ahead`, of the server at ``url``; None when it does not answer."""
        try:
            reply = self.send(Request(url=url, method="HEAD"))
        except (Trouble, PrepError):
            return None
        reply.finish()
        return clock_ahead(reply.headers)

    def keep(self, link: Link) -> None:
        """An idle connection."""
        with self._lock:
            self._idle.setdefault(link.key, []).append(link)

    def forget(self, link: Link) -> None:
        """A connection that is closed."""
        with self._lock:
            kept = self._idle.get(link.key, [])
            if link in kept:
                kept.remove(link)

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            links = [link for kept in self._idle.values() for link in kept]
        for link in links:
            link.close()

    def tls_context(self) -> ssl.SSLContext:
        """Trusts what Python trusts; SSL_CERT_FILE and SSL_CERT_DIR are honoured."""
        with self._lock:
            if self._tls is None:
                self._tls = ssl.create_default_context()
            return self._tls

    def _take(self, url: str) -> Link:
        with self._lock:
            kept = self._idle.get(origin(url))
            if kept:
                return kept.pop()
        return Link(self, url, self._timeout_s)


def describe_failure(error: Exception, when: str) -> str:
    """A connection error in words."""
    if isinstance(error, TimeoutError):
        return f"no byte came in time {when}"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "the host name cannot be resolved"
    if isinstance(error, ConnectionError | http.client.RemoteDisconnected | http.client.IncompleteRead):
        return f"the connection was closed {when}"
    text = str(error.strerror or error) if isinstance(error, OSError) else type(error).__name__
    return f"{text} {when}"


def connection_failure(error: Exception, url: str, via: str = "") -> Exception:
    """Trouble for a failed connection; PrepError where waiting cannot help. ``via``: the proxy, in words."""
    host = netloc(urllib.parse.urlsplit(url)) + via
    if isinstance(error, ssl.SSLCertVerificationError):
        what = f"its certificate is not trusted: {error.verify_message}"
        return PrepError(what, where=host, fix="Set SSL_CERT_FILE to the certificates to trust, and check the clock")
    if isinstance(error, OSError) and str(error).startswith("Tunnel connection failed: 407"):
        return PrepError("the proxy asks for a user and password", where=host, fix=PROXY_FIX)
    return Trouble(f"{host}: {describe_failure(error, 'before an answer came')}")
