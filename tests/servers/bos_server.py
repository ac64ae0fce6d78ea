"""A BOS server for tests: ``ROOT/bucket/key`` as objects, bodies in JSON, signatures of bce-auth-v1 verified.

Signatures are computed here from their published description, not by the SDK, so that the two check each other.
Control keys: ``keys`` {access key: {"secret", "token"}}, ``public_read``, ``public_list``, ``sums`` (which checksum
headers objects carry, of crc32, crc32c, md5), ``multipart`` (ETags that are no md5), ``page`` (objects a list page).
"""

from __future__ import annotations

import argparse
import base64
import calendar
import hashlib
import hmac
import json
import time
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from origin import Answer, Handler, Origin, serve


class BosServer(Origin):
    """Path-style requests: ``/bucket`` and ``/bucket/key``."""

    def settle(self) -> None:
        super().settle()
        self.keys: dict[str, dict[str, str]] = {"test-ak": {"secret": "test-sk"}}
        self.public_read = self.public_list = self.multipart = False
        self.sums, self.page = ["crc32"], 1000
        self._known: dict[tuple[str, int, int], dict[str, str]] = {}

    def control(self, order: dict[str, Any]) -> None:
        super().control(order)
        for name in ("keys", "public_read", "public_list", "multipart", "sums", "page"):
            if name in order:
                setattr(self, name, order[name])

    def answer(self, handler: Handler, path: str, query: dict[str, str]) -> Answer:
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        refusal = self._refusal(handler, path, listing=not key)
        if refusal:
            return refused(handler, *refusal)
        folder = self.root / bucket
        if not bucket or not folder.is_dir():
            return refused(handler, 404, "NoSuchBucket")
        if not key:
            return self._list(folder, query)
        file = folder / key
        if not file.is_file():
            return refused(handler, 404, "NoSuchKey")
        headers = {"x-bce-request-id": "req-2", "Accept-Ranges": "bytes", **self._headers(file)}
        match = handler.headers.get("If-Match")
        if match and match.strip('"') != headers["ETag"].strip('"'):
            return refused(handler, 412, "PreconditionFailed")
        return Answer(200, headers, file=file)

    def _headers(self, file: Path) -> dict[str, str]:
        stat = file.stat()
        known = (str(file), stat.st_size, stat.st_mtime_ns)
        if known not in self._known:
            self._known[known] = self._computed(file)
        values = self._known[known]
        md5 = values["md5"]
        headers = {"ETag": f'"-{md5}"' if self.multipart else f'"{md5}"'}
        names = {"crc32": "x-bce-content-crc32", "crc32c": "x-bce-content-crc32c"}
        headers |= {header: values[name] for name, header in names.items() if name in self.sums}
        if "md5" in self.sums:
            headers["Content-MD5"] = base64.b64encode(bytes.fromhex(md5)).decode()
        return headers

    def _computed(self, file: Path) -> dict[str, str]:
        md5, crc, crc_c = hashlib.md5(), 0, 0
        with file.open("rb") as source:
            while data := source.read(1 << 22):
                md5.update(data)
                crc = zlib.crc32(data, crc)
                if "crc32c" in self.sums:
                    import crc32c

                    crc_c = crc32c.crc32c(data, crc_c)
        return {"md5": md5.hexdigest(), "crc32": str(crc), "crc32c": str(crc_c)}

    def _list(self, folder: Path, query: dict[str, str]) -> Answer:
        prefix, marker = query.get("prefix", ""), query.get("marker", "")
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        wanted = [name for name in names if name.startswith(prefix) and name > marker]
        page = wanted[: min(self.page, int(query.get("maxKeys", 1000)))]
        contents = [
            {
                "key": name,
                "size": (folder / name).stat().st_size,
                "eTag": self._headers(folder / name)["ETag"].strip('"'),
                "lastModified": "2026-01-01T00:00:00Z",
                "storageClass": "STANDARD",
                "owner": {"id": "1", "displayName": "x"},
            }
            for name in page
        ]
        more = len(wanted) > len(page)
        body = {"name": folder.name, "prefix": prefix, "marker": marker, "isTruncated": more, "contents": contents}
        body |= {"maxKeys": 1000, "nextMarker": page[-1] if more else None}
        return Answer(200, {"Content-Type": "application/json", "x-bce-request-id": "req-3"}, json.dumps(body).encode())

    def _refusal(self, handler: Handler, path: str, *, listing: bool) -> tuple[int, str] | None:
        """Status and code when the request is not allowed."""
        pairs = parse_qsl(urlsplit(handler.path).query, keep_blank_values=True)
        given = handler.headers.get("Authorization") or dict(pairs).get("authorization")
        if not given:
            allowed = self.public_list if listing else self.public_read
            return None if allowed else (403, "AccessDenied")
        words = given.split("/")
        if len(words) != 6 or words[0] != "bce-auth-v1" or words[1] not in self.keys:
            return 403, "InvalidAccessKeyId"
        token = handler.headers.get("x-bce-security-token") or dict(pairs).get("x-bce-security-token")
        if self.keys[words[1]].get("token") != token:
            return 400, "InvalidSecurityToken"
        signed_at = calendar.timegm(time.strptime(words[2], "%Y-%m-%dT%H:%M:%SZ"))
        age = time.time() + self.clock_offset_s - signed_at
        if not -900 < age < int(words[3]):
            return 400, "RequestExpired"
        expected = signature(self.keys[words[1]]["secret"], words, handler.command, path, pairs, dict(handler.headers))
        return None if hmac.compare_digest(expected, words[5]) else (403, "SignatureDoesNotMatch")


def signature(
    secret: str, words: list[str], method: str, path: str, pairs: list[tuple[str, str]], headers: dict[str, str]
) -> str:
    """The last word of a bce-auth-v1 authorization whose first words are ``words``."""
    key = hmac.new(secret.encode(), "/".join(words[:4]).encode(), hashlib.sha256).hexdigest()
    query = sorted(f"{_encode(name)}={_encode(value)}" for name, value in pairs if name.lower() != "authorization")
    lower = {name.lower(): value.strip() for name, value in headers.items()}
    chosen = words[4].split(";") if words[4] else ["host", "content-length", "content-type", "content-md5"]
    lines = sorted(
        f"{_encode(name)}:{_encode(value)}"
        for name, value in lower.items()
        if value and (name in chosen or (name.startswith("x-bce-") and not words[4]))
    )
    text = "\n".join([method, path, "&".join(query), "\n".join(lines)])
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def refused(handler: Handler, status: int, code: str) -> Answer:
    """An error as BOS sends it; HEAD gets no body."""
    body = {"code": code, "message": f"refused: {code}", "requestId": "req-4"}
    headers = {"x-bce-request-id": "req-4", "Content-Type": "application/json"}
    return Answer(status, headers, b"" if handler.command == "HEAD" else json.dumps(body).encode())


def _encode(text: str) -> str:
    return quote(text, safe="-_.~")


if __name__ == "__main__":
    serve(lambda a: BosServer(("127.0.0.1", a.port), a.root, a.rate), argparse.ArgumentParser(description=__doc__))
