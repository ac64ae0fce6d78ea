"""Start one of the fake services in a process of its own, give it orders and read what it counted."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent


class Service:
    """A running ``bos_server`` or ``hub_server`` over the files of ``root``."""

    def __init__(self, name: str, root: Path, **control: Any) -> None:
        command = [sys.executable, str(HERE / f"{name}.py"), str(root)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.child.stdout is not None
        self.port = int(self.child.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        if control:
            self.order(**control)

    def order(self, **control: Any) -> None:
        """Change the behaviour; see the module of the service."""
        request = urllib.request.Request(f"{self.url}/__control", json.dumps(control).encode(), method="POST")
        self._open(request)

    def fault(self, kind: str, **details: Any) -> None:
        """One fault and no other."""
        self.order(faults=[{"kind": kind, **details}])

    def requests(self, path: str = "", method: str = "GET") -> list[dict[str, Any]]:
        """What was asked for so far, on paths that hold ``path``."""
        found = json.loads(self._open(urllib.request.Request(f"{self.url}/__control")))["requests"]
        return [entry for entry in found if path in entry["path"] and entry["method"] == method]

    def sent(self, path: str = "") -> int:
        """Bytes of bodies sent so far."""
        return sum(entry["sent"] for entry in self.requests(path) if not entry["path"].startswith("/api"))

    def close(self) -> None:
        """End the process."""
        self.child.kill()
        self.child.communicate()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, request: urllib.request.Request) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as reply:
            return bytes(reply.read())
