"""One small dataset at each kind of place, with the same way to change it and to look at what was served."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dm05_prep.sources import Source, SourceOptions, open_source
from fake_secrets import KEYS, SECRETS
from process import Service

PART = "libero.tar.part-000"


@dataclass
class Place:
    """A service with one file of ``data`` under the name :data:`PART`, and how to open it as a source."""

    kind: str  # bos | anonymous | hf
    service: Service
    folder: Path
    uri: str

    def open(self, *, kind: Any = "dataset", jobs: int = 4, **options: Any) -> Source:
        """The source, as the command line opens it."""
        name: Any = "hf" if self.kind == "hf" else "bos"
        anonymous = self.kind == "anonymous"
        given = SourceOptions(**{"endpoint": self.service.url, "anonymous": anonymous, **options})
        return open_source(name, self.uri, kind=kind, jobs=jobs, options=given)

    def put(self, data: bytes, name: str = PART) -> bytes:
        """Have ``data`` at the place; it is returned."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat().st_mtime_ns if path.exists() else 0
        path.write_bytes(data)
        if before:
            os.utime(path, ns=(before + 10**9, before + 10**9))
        return data

    @property
    def bodies(self) -> str:
        """A pattern for the paths that large bodies come from."""
        return f"/cdn/.*{PART}" if self.kind == "hf" else f"/{PART}"

    def body_requests(self) -> list[dict[str, Any]]:
        """The GETs for the bytes of the file, in order."""
        return self.service.requests(f"{'cdn/' if self.kind == 'hf' else ''}{self._key()}{PART}")

    def _key(self) -> str:
        return "datasets/owner/name/" if self.kind == "hf" else "p/"


def make_place(kind: str, service: Service, root: Path, monkeypatch: Any) -> Place:
    """Empty the service and set the environment up for it."""
    service.order(reset=True, forget=True)
    if kind == "hf":
        folder, uri = root / "datasets" / "owner" / "name", "owner/name"
    else:
        folder, uri = root / "bucket" / "p", "bos://bucket/p/"
        service.order(keys=KEYS, public_read=kind == "anonymous", public_list=kind == "anonymous")
        if kind == "bos":
            monkeypatch.setenv("BCE_ACCESS_KEY_ID", SECRETS["access"])
            monkeypatch.setenv("BCE_SECRET_ACCESS_KEY", SECRETS["secret"])
    for path in sorted(folder.rglob("*"), reverse=True) if folder.exists() else []:
        path.rmdir() if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return Place(kind, service, folder, uri)


def random_bytes(count: int) -> bytes:
    """Bytes that differ everywhere."""
    return os.urandom(count)


def fetch(
    source: Source,
    target: Path,
    name: str = PART,
    *,
    progress: Callable[[int], None] = lambda count: None,
    stop: threading.Event | None = None,
) -> Path:
    """List, then bring one file."""
    file = next(file for file in source.files() if file.name == name)
    return source.fetch(file, target, progress=progress, stop=stop or threading.Event())


def ranges(requests: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """First and last byte of each request that was answered with a body."""
    pairs = [request["range"].removeprefix("bytes=").split("-") for request in requests if request["range"]]
    return [(int(first), int(last)) for first, last in pairs]


def sha256(data: bytes) -> str:
    """Hex digits."""
    return hashlib.sha256(data).hexdigest()
