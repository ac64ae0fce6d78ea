"""A small HTTP/1.1 server with ranges, counts of what it served, and faults on demand; the base of the fake services.

Control is over HTTP too, so that a server can run in its own process::

    GET  /__control   {"requests": [{"method", "path", "range", "status", "sent", "host", "signed"}, ...]}
    POST /__control   {"reset": true, "faults": [...], "forget": true, ...}    other keys are up to the service

A fault: ``{"kind": ..., "match": regular expression on the path, "method": "GET", "skip": 0, "times": 1 (-1: always)}``
and more for some kinds: ``status``, ``headers``, ``body``, ``after``, ``shift``, ``most``, ``more``, ``rate``.
"""

from __future__ import annotations

import argparse
import gzip
import http.server
import json
import os
import re
import select
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

CHUNK = 1 << 20
CATCH_UP_S = 0.1


@dataclass
class Answer:
    """What a service wants to send: bytes, or a file (which ranges apply to)."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Path | None = None


class Origin(http.server.ThreadingHTTPServer):
    """The base service; subclasses answer requests and take more control keys."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], root: Path, rate: float = 0.0) -> None:
        super().__init__(address, Handler)
        self.root, self._first_rate = root, rate
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.settle()

    def settle(self) -> None:
        """The behaviour of a service that was just started."""
        self.rate = self._first_rate
        self.faults: list[dict[str, Any]] = []
        self.clock_offset_s = 0.0

    def answer(self, handler: Handler, path: str, query: dict[str, str]) -> Answer:
        """The answer to one request; ``path`` is not decoded."""
        raise NotImplementedError

    def control(self, order: dict[str, Any]) -> None:
        """Change the behaviour; ``reset`` goes back to the first one before."""
        with self.lock:
            if order.get("reset"):
                self.settle()
            if "faults" in order:
                self.faults = [
                    {"skip": 0, "times": 1, "match": "", "method": "GET", **fault} for fault in order["faults"]
                ]
            if order.get("forget"):
                self.requests = []
            self.rate = order.get("rate", self.rate)
            self.clock_offset_s = order.get("clock_offset_s", self.clock_offset_s)

    def fault_for(self, method: str, path: str) -> dict[str, Any] | None:
        """The fault that strikes this request, if any."""
        with self.lock:
            for fault in self.faults:
                if fault["method"] != method or fault["times"] == 0 or not re.search(fault["match"], path):
                    continue
                if fault["skip"] > 0:
                    fault["skip"] -= 1
                    continue
                fault["times"] -= 1
                return fault
        return None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients of these tests leave in the middle; that is no event."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Ranges, faults and counting around :meth:`Origin.answer`."""

    protocol_version = "HTTP/1.1"
    server: Origin
    _due: float  # when the next piece may leave

    def log_message(self, format: str, *args: Any) -> None:
        """No access log."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The service's clock."""
        return super().date_time_string((timestamp or time.time()) + self.server.clock_offset_s)

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.control(json.loads(body))
        self._send(Answer(body=b"{}"), {}, None)

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        if self.path == "/__control":
            with self.server.lock:
                body = json.dumps({"requests": self.server.requests}).encode()
            self._send(Answer(body=body), {}, None)
            return
        entry: dict[str, Any] = {
            "method": self.command,
            "path": unquote(parts.path),
            "range": self.headers.get("Range"),
            "status": 0,
            "sent": 0,
            "host": self.headers.get("Host"),
            "client": self.client_address[1],
            "signed": "Authorization" in self.headers,
            "headers": {name.lower(): value for name, value in self.headers.items() if name != "Authorization"},
        }
        with self.server.lock:
            self.server.requests.append(entry)
        fault = self.server.fault_for(self.command, parts.path)
        if fault and fault["kind"] == "reset":
            self._reset()
            return
        if fault and fault["kind"] == "silent":
            self._hang()
            return
        answer = self._replaced(fault) or self.server.answer(self, parts.path, dict(parse_qsl(parts.query)))
        self._send(answer, entry, fault)

    def _replaced(self, fault: dict[str, Any] | None) -> Answer | None:
        if fault and fault["kind"] == "status":
            body = b"" if self.command == "HEAD" else fault.get("body", "").encode()
            return Answer(fault["status"], {"x-bce-request-id": "req-1", **fault.get("headers", {})}, body)
        if fault and fault["kind"] == "html":
            page = b"<html><body>Please log in to the network</body></html>"
            return Answer(200, {"Content-Type": "text/html"}, page)
        return None

    def _send(self, answer: Answer, entry: dict[str, Any], fault: dict[str, Any] | None) -> None:
        kind = fault["kind"] if fault else ""
        size = answer.file.stat().st_size if answer.file else len(answer.body)
        first, last, status = 0, size - 1, answer.status
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = dict(answer.headers)
        if status == 200 and answer.file and asked and kind not in ("ignore_range", "gzip"):
            first, last = int(asked[1]), min(size - 1, int(asked[2] or size - 1))
            if first >= size:
                status, headers, first, last = 416, {"Content-Range": f"bytes */{size}"}, 0, -1
                answer = Answer(416)
            else:
                if kind == "wrong_range":
                    first += fault["shift"]
                if kind == "short_range":
                    last = min(last, first + fault["most"] - 1)
                status = 206
                headers["Content-Range"] = f"bytes {first}-{last}/{size + (fault['more'] if kind == 'total' else 0)}"
        if kind == "no_content_range":
            headers.pop("Content-Range", None)
        if kind == "headers":
            headers.update(fault["headers"])
        entry["status"] = status
        self.send_response(status)
        if kind == "gzip":
            self._send_gzip(answer, headers)
            return
        headers["Content-Length"] = headers.get("Content-Length", str(last - first + 1))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(answer, first, last, entry, fault or {"kind": ""})

    def _send_gzip(self, answer: Answer, headers: dict[str, str]) -> None:
        raw = answer.file.read_bytes() if answer.file else answer.body
        body = gzip.compress(raw, 1)
        for name, value in {**headers, "Content-Encoding": "gzip", "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_body(self, answer: Answer, first: int, last: int, entry: dict[str, Any], fault: dict[str, Any]) -> None:
        """``reset_body``, ``stall_body``, ``short_body`` strike ``after`` so many bytes; ``corrupt`` flips a bit."""
        if answer.file is None:
            self.wfile.write(answer.body)
            entry["sent"] += len(answer.body)
            return
        self.wfile.flush()
        end = last + 1
        ends_early = fault["kind"] in ("reset_body", "stall_body", "short_body")
        if ends_early:
            end = min(end, first + fault["after"])
        handle = os.open(answer.file, os.O_RDONLY)
        try:
            position, self._due = first, time.monotonic()
            while position < end:
                count = min(CHUNK, end - position)
                position += self._send_piece(handle, position, count, entry, fault)
        finally:
            os.close(handle)
        if fault["kind"] == "reset_body":
            time.sleep(0.05)  # let what was sent arrive: a reset throws away what the client has not read
            self._reset()
        elif fault["kind"] == "stall_body":
            self._hang()
        elif fault["kind"] == "short_body":
            self.close_connection = True

    def _send_piece(self, handle: int, position: int, count: int, entry: dict[str, Any], fault: dict[str, Any]) -> int:
        rate = fault.get("rate", self.server.rate)
        if rate:
            count = min(count, max(1024, int(rate / 20)))
        if fault["kind"] == "corrupt":
            piece = bytearray(os.pread(handle, count, position))
            piece[len(piece) // 2] ^= 0x20
            self.connection.sendall(piece)
            sent = len(piece)
        else:
            sent = os.sendfile(self.connection.fileno(), handle, position, count)
        entry["sent"] += sent
        if rate:  # like a network, it does not slow down because this machine is busy; what a client kept back is lost
            self._due = max(self._due, time.monotonic() - CATCH_UP_S) + sent / rate
            time.sleep(max(0.0, self._due - time.monotonic()))
        return sent

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _hang(self) -> None:
        """Say nothing until the client leaves."""
        select.select([self.connection], [], [], 120)
        self.close_connection = True


def serve(make: Any, parser: argparse.ArgumentParser) -> None:
    """Run a service in this process; the first line of stdout is its port."""
    parser.add_argument("root", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0, help="bytes a second of each connection")
    arguments = parser.parse_args()
    server = make(arguments)
    print(server.server_address[1], flush=True)
    threading.Thread(target=_leave_with_parent, args=(server,), daemon=True).start()
    server.serve_forever(poll_interval=0.1)


def _leave_with_parent(server: Origin) -> None:
    """End when whoever holds our stdin is gone."""
    sys.stdin.buffer.read()
    server.shutdown()
