"""A Hugging Face hub for tests: ``ROOT/datasets/OWNER/NAME/file`` and ``ROOT/models/...`` as repositories.

Files of ``lfs_bytes`` and more are large files: their resolve address redirects to a "CDN", the same server under the
name ``localhost``, with a signature in the address. Control keys: ``token`` (needed to read), ``gated``, ``page``
(entries a tree page), ``expire`` (all signed addresses given out so far are refused), ``linked`` (headers that replace
those of a redirect), ``redirect_to`` (another hub that everything is sent to, as a mirror does), ``xet``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from origin import Answer, Handler, Origin, serve


class HubServer(Origin):
    """One commit for each state of the files: the sha1 over their names and sums."""

    def settle(self) -> None:
        super().settle()
        self.token: str | None = None
        self.gated = self.xet = False
        self.page, self.lfs_bytes, self.generation = 1000, 1024, 0
        self.linked: dict[str, str] = {}
        self.redirect_to = ""
        self._known: dict[tuple[str, int, int], tuple[str, str]] = {}

    def control(self, order: dict[str, Any]) -> None:
        super().control(order)
        for name in ("token", "gated", "page", "lfs_bytes", "linked", "redirect_to", "xet"):
            if name in order:
                setattr(self, name, order[name])
        if order.get("expire"):
            self.generation += 1

    def answer(self, handler: Handler, path: str, query: dict[str, str]) -> Answer:
        words = unquote(path).strip("/").split("/")
        if words[0] == "cdn":
            return self._cdn(handler, words, query)
        if self.redirect_to:
            return Answer(308, {"Location": self.redirect_to + handler.path})
        if words[0] == "api" and words[1:2] == ["agent-harnesses"]:
            return Answer(404)
        kind, owner, name, *rest = _repository(words)
        folder = self.root / kind / owner / name
        refusal = self._refusal(handler, folder)
        if refusal:
            return refusal
        if words[0] == "api":
            return self._api(handler, folder, rest, query)
        return self._resolve(handler, folder, rest)

    def _refusal(self, handler: Handler, folder: Path) -> Answer | None:
        given = handler.headers.get("Authorization")
        if not folder.is_dir() or (self.token and given != f"Bearer {self.token}"):
            return _error(401, "RepoNotFound", "Repository not found")
        if self.gated:
            return _error(403, "GatedRepo", "Access is gated")
        return None

    def _commit(self, folder: Path) -> str:
        text = "".join(f"{path.name} {self._sums(path)[0]}\n" for path in _files(folder))
        return hashlib.sha1(text.encode()).hexdigest()

    def _sums(self, path: Path) -> tuple[str, str]:
        """sha256 and git's sha1 of a file."""
        stat = path.stat()
        known = (str(path), stat.st_size, stat.st_mtime_ns)
        if known not in self._known:
            sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % stat.st_size)
            with path.open("rb") as source:
                while data := source.read(1 << 22):
                    sha256.update(data)
                    git.update(data)
            self._known[known] = sha256.hexdigest(), git.hexdigest()
        return self._known[known]

    def _api(self, handler: Handler, folder: Path, rest: list[str], query: dict[str, str]) -> Answer:
        commit = self._commit(folder)
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", commit):
            return _error(404, "RevisionNotFound", "Invalid rev id")
        identity = "/".join(folder.parts[-2:])
        if not rest or rest[0] == "revision":
            return _json({"id": identity, "sha": commit, "siblings": []})
        if rest[0] == "xet-read-token":
            dead = {
                "X-Xet-Cas-Url": "http://127.0.0.1:9",
                "X-Xet-Access-Token": "t",
                "X-Xet-Token-Expiration": "9999999999",
            }
            return Answer(
                200, dead, json.dumps({"casUrl": "http://127.0.0.1:9", "accessToken": "t", "exp": 9999999999}).encode()
            )
        start = int(query.get("cursor", 0))
        files = _files(folder)
        page = [self._entry(folder, path) for path in files[start : start + self.page]]
        answer = _json(page)
        if start + self.page < len(files):
            address = f"http://{handler.headers['Host']}{handler.path.split('?')[0]}"
            answer.headers["Link"] = f'<{address}?recursive=true&cursor={start + self.page}>; rel="next"'
        return answer

    def _entry(self, folder: Path, path: Path) -> dict[str, Any]:
        size = path.stat().st_size
        sha256, git = self._sums(path)
        entry: dict[str, Any] = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": size, "oid": git}
        if size >= self.lfs_bytes:
            entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
            if self.xet:
                entry["xetHash"] = sha256
        return entry

    def _resolve(self, handler: Handler, folder: Path, rest: list[str]) -> Answer:
        commit = self._commit(folder)
        if len(rest) < 3 or rest[0] != "resolve" or rest[1] not in ("main", commit):
            return _error(404, "RevisionNotFound", "Invalid rev id")
        path = folder / "/".join(rest[2:])
        if not path.is_file():
            return _error(404, "EntryNotFound", "Entry not found")
        sha256, git = self._sums(path)
        if path.stat().st_size < self.lfs_bytes:
            return Answer(200, {"X-Repo-Commit": commit, "ETag": f'"{git}"', "Accept-Ranges": "bytes"}, file=path)
        port = self.server_address[1]
        where = f"http://localhost:{port}/cdn/{quote(path.relative_to(self.root).as_posix())}?X-Signature=s3cret-{self.generation}"
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(path.stat().st_size), "X-Linked-Etag": f'"{sha256}"'}
        if self.xet:
            headers |= {"X-Xet-Hash": sha256, "Link": f'<http://{handler.headers["Host"]}/x>; rel="xet-auth"'}
        return Answer(302, {**headers, **self.linked, "Location": where})

    def _cdn(self, handler: Handler, words: list[str], query: dict[str, str]) -> Answer:
        if query.get("X-Signature") != f"s3cret-{self.generation}":
            return Answer(403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>")
        if handler.headers.get("Authorization"):
            return Answer(400, {}, b"a token was sent to the storage host")
        path = self.root / "/".join(words[1:])
        return Answer(200, {"ETag": f'"{self._sums(path)[1]}"', "Accept-Ranges": "bytes"}, file=path)


def _repository(words: list[str]) -> list[str]:
    """kind, owner, name and the rest, of the words of a path."""
    if words[0] == "api":
        words = words[1:]
    elif words[0] != "datasets":
        words = ["models", *words]
    return [*words, "", "", ""] if len(words) < 3 else words


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def _error(status: int, code: str, text: str) -> Answer:
    return Answer(status, {"X-Error-Code": code, "X-Error-Message": text}, json.dumps({"error": text}).encode())


if __name__ == "__main__":
    serve(lambda a: HubServer(("127.0.0.1", a.port), a.root, a.rate), argparse.ArgumentParser(description=__doc__))
