"""Connections: kept, cut, through proxies, with certificates; and no secret in any of their words."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources.addresses import display, origin, proxy_for
from dm05_prep.sources.connection import Pool, Request
from dm05_prep.sources.retry import Trouble
from places import PART, Place, fetch, make_place, random_bytes

pytestmark = pytest.mark.usefixtures("quiet_environment")

PROXY = Path(__file__).parent.parent / "servers" / "proxy.py"


@pytest.fixture(params=["bos", "anonymous", "hf"])
def place(request: Any, bos_process: Any, hub_process: Any, monkeypatch: pytest.MonkeyPatch) -> Place:
    service, root = hub_process if request.param == "hf" else bos_process
    return make_place(request.param, service, root, monkeypatch)


@dataclass
class RunningProxy:
    """A proxy process and the lines it wrote."""

    port: int
    lines: list[str]


@pytest.fixture(params=["", "user:pass-word"])
def proxy(request: Any) -> Iterator[RunningProxy]:
    child = subprocess.Popen([sys.executable, str(PROXY), "--login", request.param], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    running = RunningProxy(int(child.stdout.readline()), [])
    reader = threading.Thread(target=lambda: running.lines.extend(iter(child.stdout.readline, "")), daemon=True)  # type: ignore[union-attr]
    reader.start()
    yield running
    child.kill()
    child.wait()


@pytest.fixture
def proxy_login(proxy: RunningProxy, request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    login = request.node.callspec.params["proxy"]
    monkeypatch.setenv("HTTP_PROXY", f"http://{login + '@' if login else ''}127.0.0.1:{proxy.port}")
    return str(login)


def test_everything_goes_through_the_proxy(place: Place, tmp_path: Path, proxy: RunningProxy, proxy_login: str) -> None:
    data = place.put(random_bytes(100_000))
    fetch(place.open(), tmp_path / PART)
    assert (tmp_path / PART).read_bytes() == data
    time.sleep(0.1)
    asked = [line for line in proxy.lines if line.startswith("GET http://")]
    assert any(PART in line for line in asked)
    assert len(place.service.requests()) == len(asked), "nothing went past the proxy"


def test_no_proxy_is_heeded(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put(random_bytes(1000))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    fetch(place.open(), tmp_path / PART)


def test_a_wrong_proxy_password_is_named_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, str(PROXY), "--login", "user:right"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:wrong-word@127.0.0.1:{int(child.stdout.readline())}")
        with pytest.raises(PrepError, match="the proxy asks for a user and password") as caught:
            Pool(5).send(Request(url="https://example.invalid/x"))
        assert "wrong-word" not in str(caught.value)
        child.kill()


@pytest.mark.parametrize("text", ["socks5://127.0.0.1:1", "https://127.0.0.1:1", "http://", "http://host:port"])
def test_proxies_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ALL_PROXY", text)
    with pytest.raises(PrepError, match="PROXY"):
        proxy_for("https://huggingface.co")


def test_secrets_are_not_shown() -> None:
    url = "https://me:pass-word@host:8443/a/b?X-Signature=secret#part"
    assert display(url) == "https://host:8443/a/b"
    assert "secret" not in repr(Request(url=url, headers={"Authorization": "secret"}))


def test_origins() -> None:
    assert origin("https://Host/a") == origin("https://host:443/b")
    assert len({origin(url) for url in ("http://h", "https://h", "https://h:8443", "https://g")}) == 4


class Scripted:
    """A TCP server that treats the n-th connection as the n-th function says."""

    def __init__(self, *steps: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self.connections = 0
        threading.Thread(target=self._serve, args=(steps,), daemon=True).start()

    def _serve(self, steps: Any) -> None:
        for step in steps:
            connection, _ = self._listener.accept()
            self.connections += 1
            with connection:
                step(connection)


def answer(connection: socket.socket, body: bytes = b"hi", more: bytes = b"") -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), more, body))


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    server = Scripted(answer, answer)
    pool = Pool(5)
    assert pool.send(Request(url=server.url)).read() == b"hi"
    time.sleep(0.05)
    assert pool.send(Request(url=server.url)).read() == b"hi"
    assert server.connections == 2


def test_connections_are_kept() -> None:
    def twice(connection: socket.socket) -> None:
        answer(connection)
        answer(connection)

    server = Scripted(twice)
    pool = Pool(5)
    assert [pool.send(Request(url=server.url)).read() for _ in range(2)] == [b"hi", b"hi"]
    assert server.connections == 1
    pool.close()


def test_a_body_in_chunks_is_read_whole() -> None:
    def chunked(connection: socket.socket) -> None:
        connection.recv(65536)
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    assert Pool(5).send(Request(url=Scripted(chunked).url)).read() == b"abcde"


def test_a_body_shorter_than_announced_is_trouble() -> None:
    reply = Pool(5).send(Request(url=Scripted(lambda c: answer(c, b"", b"Content-Length: 10\r\n")).url))
    assert reply.length in (0, 10)
    cut = Scripted(lambda c: (c.recv(9999), c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")))
    with pytest.raises(Trouble, match="broke off 7 bytes"):
        Pool(5).send(Request(url=cut.url)).read()


@pytest.mark.parametrize("words", [b"nonsense\r\n\r\n", b"", b"HTTP/1.1 abc\r\n\r\n", b"\x16\x03\x01\x00"])
def test_answers_that_are_no_http_are_trouble(words: bytes) -> None:
    server = Scripted(lambda c: (c.recv(9999), c.sendall(words)))
    with pytest.raises(Trouble):
        Pool(5).send(Request(url=server.url))


def test_a_waiting_read_can_be_cut() -> None:
    server = Scripted(lambda c: (c.recv(9999), threading.Event().wait(20)))
    started = time.monotonic()
    with pytest.raises(Trouble):
        Pool(30).send(Request(url=server.url), lambda link: threading.Timer(0.2, link.cut).start())
    assert time.monotonic() - started < 2


def test_a_token_that_cannot_be_a_header_is_not_shown() -> None:
    server = Scripted(answer)
    with pytest.raises(PrepError) as caught:
        Pool(5).send(Request(url=server.url, headers={"Authorization": "Bearer secret\r\nX: y"}))
    assert "secret" not in str(caught.value)


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody signed is refused at once, and trusted when SSL_CERT_FILE says so."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *subject], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def secure(connection: socket.socket) -> None:
        try:
            with context.wrap_socket(connection, server_side=True) as wrapped:
                wrapped.recv(65536)
                wrapped.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        except OSError:
            pass

    server = Scripted(secure, secure)
    url = server.url.replace("http:", "https:")
    with pytest.raises(PrepError, match="SSL_CERT_FILE"):
        Pool(5).send(Request(url=url))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert Pool(5).send(Request(url=url)).read() == b"hi"
