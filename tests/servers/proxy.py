"""A forward proxy for tests: absolute addresses for http, CONNECT for the rest; may ask for a user and password.

The first line of stdout is the port; then one line a request: ``METHOD TARGET``.
"""

from __future__ import annotations

import argparse
import base64
import select
import socket
import socketserver
from urllib.parse import urlsplit


class Handler(socketserver.StreamRequestHandler):
    """One connection, one request."""

    def handle(self) -> None:
        line = self.rfile.readline().decode("latin-1")
        headers = []
        while (header := self.rfile.readline().decode("latin-1").rstrip("\r\n")) != "":
            headers.append(header)
        method, target, version = line.split()
        print(method, target, flush=True)
        expected = self.server.login  # type: ignore[attr-defined]
        if expected and f"proxy-authorization: {expected}".lower() not in [header.lower() for header in headers]:
            self.wfile.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return
        if method == "CONNECT":
            host, _, port = target.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port))) as far:
                self.wfile.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                relay(self.connection, far)
            return
        parts = urlsplit(target)
        if not parts.hostname:
            self.wfile.write(b"HTTP/1.1 400 Not for a proxy\r\nContent-Length: 0\r\n\r\n")
            return
        with socket.create_connection((parts.hostname, parts.port or 80)) as far:
            path = f"{parts.path}?{parts.query}" if parts.query else parts.path
            kept = [header for header in headers if not header.lower().startswith(("proxy-", "connection:"))]
            far.sendall(
                "\r\n".join([f"{method} {path} {version}", *kept, "Connection: close", "", ""]).encode("latin-1")
            )
            relay(self.connection, far)


def relay(near: socket.socket, far: socket.socket) -> None:
    """Pass bytes both ways until one side ends."""
    while True:
        ready, _, _ = select.select([near, far], [], [])
        for one in ready:
            data = one.recv(65536)
            if not data:
                return
            (far if one is near else near).sendall(data)


class Proxy(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--login", default="", help="USER:PASSWORD that clients must give")
    given = parser.parse_args().login
    with Proxy(("127.0.0.1", 0), Handler) as proxy:
        proxy.login = f"Basic {base64.b64encode(given.encode()).decode()}" if given else ""  # type: ignore[attr-defined]
        print(proxy.server_address[1], flush=True)
        proxy.serve_forever()
