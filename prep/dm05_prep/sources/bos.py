"""Baidu BOS as a source: objects under ``bos://bucket/prefix/``.

With keys, lists and metadata come through the SDK and GETs carry its signature. Without, or through a proxy that the
SDK cannot use, the same requests go out over plain HTTPS.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from dm05_schemas.errors import UsageError

from dm05_prep.console import warn
from dm05_prep.errors import PrepError
from dm05_prep.sources.access import Changed, Expired, describe_status
from dm05_prep.sources.addresses import origin, proxy_login_error
from dm05_prep.sources.base import RemoteFile
from dm05_prep.sources.bos_api import EXPIRED_CODES, BosApi, BosFault, Object, error_code
from dm05_prep.sources.bos_login import find_endpoint, find_login
from dm05_prep.sources.checks import Checks
from dm05_prep.sources.connection import Reply, Request
from dm05_prep.sources.names import MODEL_FILES, RELEASED_PARTS, check_name
from dm05_prep.sources.options import NO_OPTIONS, SourceOptions
from dm05_prep.sources.retry import RetryPolicy, persist
from dm05_prep.sources.transfer import Probe, Transfer

CLOCK_TOLERANCE_S = 300.0
T = TypeVar("T")
DEFAULT_URIS = {
    "dataset": "bos://aihc-rdw-bj/huggingface.co/datasets/Dexmal/libero/",
    "model": "bos://aihc-models-bj/Dexmal/DM05/",
}


def open_source(
    uri: str | None,
    *,
    kind: str,
    jobs: int,
    options: SourceOptions = NO_OPTIONS,
    policy: RetryPolicy | None = None,
) -> BosSource:
    """The objects under ``uri``, or the released dataset or model."""
    bucket, prefix = split_uri(uri or DEFAULT_URIS[kind])
    return BosSource(bucket, prefix, kind=kind, jobs=jobs, options=options, policy=policy)


def split_uri(uri: str) -> tuple[str, str]:
    """``bos://bucket/prefix/`` or ``bos:/bucket/prefix/`` -> bucket, prefix without leading slashes.

    Raises:
        UsageError: another form, or a name that BOS does not allow.
    """
    fix = "For example: bos://bucket/folder/"
    if not uri.startswith("bos:/"):
        raise UsageError("is no BOS address", where=uri, fix=fix)
    bucket, _, prefix = uri.removeprefix("bos:").lstrip("/").partition("/")
    prefix = prefix.lstrip("/")
    plain = bucket.replace("-", "")
    if not (3 <= len(bucket) <= 63 and plain.isalnum() and plain.isascii() and bucket == bucket.lower()):
        raise UsageError(f"{bucket!r} is no bucket name", where=uri, fix=fix)
    if any(part in (".", "..") for part in prefix.split("/")):
        raise UsageError("a key cannot have the folder '.' or '..'", where=uri, fix=fix)
    return bucket, prefix


class BosSource:
    """See :class:`dm05_prep.sources.base.Source`."""

    owns_parts = True

    def __init__(
        self, bucket: str, prefix: str, *, kind: str, jobs: int, options: SourceOptions, policy: RetryPolicy | None
    ) -> None:
        self.bucket, self._kind = bucket, kind
        self._key = prefix
        self._prefix = prefix if not prefix or prefix.endswith("/") else prefix + "/"
        self._login = find_login(options)
        self._endpoint = find_endpoint(options, bucket)
        self._transfer = Transfer(jobs=jobs, policy=policy or RetryPolicy.from_environment())
        self.api = BosApi(bucket, self._endpoint, self._login, self._transfer.pool, self._transfer.policy)
        signed = f"keys from {self._login.place}" if self._login else "no keys"
        self.description = f"bos://{bucket}/{self._prefix} (endpoint {self._endpoint}, {signed})"

    def files(self) -> list[RemoteFile]:
        """All objects under the prefix, or the one object that is named exactly."""
        try:
            found = self._ask(lambda: self.api.list(self._prefix), self._prefix)
        except BosFault as fault:
            if fault.status == 403 and self._login is None:
                return self._known_files(fault)
            raise self.explain(fault, self._prefix) from None
        files = [self._describe(item) for item in found if not item.key.endswith("/")]
        if not files and self._key and not self._key.endswith("/"):
            files = self._one_object()
        if not files:
            fix = "Check the address: it names a folder, and keys tell capitals from small letters"
            raise PrepError("there is no object under it", where=f"bos://{self.bucket}/{self._prefix}", fix=fix)
        return sorted(files, key=lambda file: file.name)

    def fetch(self, file: RemoteFile, target: Path, *, progress: Callable[[int], None], stop: threading.Event) -> Path:
        """See :meth:`dm05_prep.sources.base.Source.fetch`."""
        # Parts of two versions make an archive that nobody wrote.
        listed = file.etag if self._kind == "dataset" else None
        access = _BosAccess(self, self._prefix + file.name, stop, listed)
        access.refresh()
        return self._transfer.fetch(access, target, progress=progress, stop=stop, durable=self._kind == "model")

    def probe(self, file: RemoteFile) -> Probe:
        """Have the first byte of ``file``; raises PrepError."""
        access = _BosAccess(self, self._prefix + file.name, threading.Event())
        access.refresh()
        return self._transfer.probe(access)

    def head(self, key: str, stop: threading.Event | None = None) -> Object:
        """Size, ETag and sums of one object.

        Raises:
            PrepError: it cannot be had.
        """
        try:
            return self._ask(lambda: self.api.head(key), key, stop)
        except BosFault as fault:
            raise self.explain(fault, key) from None

    def explain(self, fault: BosFault, key: str) -> PrepError:
        """A refusal in words a user can act on; looks at the server's clock."""
        where = f"bos://{self.bucket}/{key}"
        what = f"{describe_status(fault.status)}{f' {fault.code}' if fault.code else ''}"
        if fault.request_id:
            what += f", request id {fault.request_id}"
        if fault.status == 407:
            return proxy_login_error(where)
        if fault.status == 404:
            return PrepError(f"does not exist ({what})", where=where, fix="Check bucket, key and region")
        if 300 <= fault.status < 400:
            what = f"the answer leads elsewhere ({what}); a proxy or the log-in of a network may stand in between"
            return PrepError(what, where=where, fix=self.network_fix)
        ahead_s = self._transfer.pool.clock_ahead_of(self._endpoint) if self._login else None
        if ahead_s is not None and abs(ahead_s) > CLOCK_TOLERANCE_S:
            what += f"; this machine's clock is {abs(ahead_s) / 60:.0f} minutes {'ahead' if ahead_s > 0 else 'behind'}"
        if fault.code in EXPIRED_CODES:
            return PrepError(f"a new signature is refused as expired ({what})", where=where, fix="Set the system clock")
        if self._login is None:
            fix = "Set BCE_ACCESS_KEY_ID and BCE_SECRET_ACCESS_KEY, or check that it is a public bucket of this region"
            return PrepError(f"refused without keys ({what})", where=where, fix=fix)
        fix = f"Check those keys, their session token (Sts), the clock, and the region of {self._endpoint}; "
        fix += "for a public bucket add --anonymous"
        return PrepError(f"refused with the keys from {self._login.place} ({what})", where=where, fix=fix)

    @property
    def network_fix(self) -> str:
        """What to look at when the host does not answer."""
        return f"Check the network, --endpoint / --region (now {self._endpoint}) and HTTPS_PROXY, then run it again"

    def _ask(self, call: Callable[[], T], key: str, stop: threading.Event | None = None) -> T:
        """``call``, tried again through trouble, and signed once more when a signature has expired."""
        policy, where = self._transfer.policy, f"bos://{self.bucket}/{key}"
        try:
            return persist(call, policy, where=where, fix=self.network_fix, stop=stop)
        except BosFault as fault:
            if fault.code not in EXPIRED_CODES:
                raise
        return persist(call, policy, where=where, fix=self.network_fix, stop=stop)

    def _describe(self, item: Object) -> RemoteFile:
        where = f"bos://{self.bucket}/{item.key}"
        name = check_name(item.key[len(self._prefix) :], where)
        sums = {"sha256": item.checks.sha256, "md5": item.checks.md5}
        return RemoteFile(name=name, size=item.size, crc32=item.checks.crc32, etag=item.etag, url_hint=where, **sums)

    def _one_object(self) -> list[RemoteFile]:
        """The object whose key is the whole address."""
        try:
            item = self._ask(lambda: self.api.head(self._key), self._key)
        except BosFault as fault:
            if fault.status == 404:
                return []
            raise self.explain(fault, self._key) from None
        self._prefix = self._key[: self._key.rfind("/") + 1]
        return [self._describe(item)]

    def _known_files(self, refusal: BosFault) -> list[RemoteFile]:
        """The released file names, each asked for by itself: a public bucket may allow reading but not listing."""
        files = []
        for name in RELEASED_PARTS if self._kind == "dataset" else MODEL_FILES:
            key = self._prefix + name
            try:
                files.append(self._describe(self._ask(functools.partial(self.api.head, key), key)))
            except BosFault as fault:
                if fault.status not in (403, 404):
                    raise self.explain(fault, key) from None
        if not files:
            raise self.explain(refusal, self._prefix) from None
        warn(f"bos://{self.bucket}/{self._prefix} may not be listed without keys: taking {len(files)} released names")
        return sorted(files, key=lambda file: file.name)


class _BosAccess:
    """See :class:`dm05_prep.sources.access.Access`."""

    def __init__(self, source: BosSource, key: str, stop: threading.Event, listed: str | None = None) -> None:
        """``listed``: the ETag that the object has to keep."""
        self._source, self._key, self._stop, self._listed = source, key, stop, listed
        self.where, self.network_fix = f"bos://{source.bucket}/{key}", source.network_fix
        self.size, self.checks = 0, Checks()
        self.etag: str | None = None

    def request(self) -> Request:
        headers = {"If-Match": f'"{self.etag}"'} if self.etag else None
        return self._source.api.request(self._key, headers=headers)

    def moved(self, reply: Reply, location: str) -> Mapping[str, str]:
        return self.request().headers if origin(location) == origin(reply.url) else {}

    def check(self, reply: Reply) -> None:
        etag = reply.headers.get("ETag", "").strip('"')
        if self.etag and etag and etag != self.etag:
            raise Changed(f"the object was replaced: its ETag is {etag} now, it was {self.etag}")

    def refused(self, reply: Reply, body: bytes) -> Exception:
        fault = BosFault(reply.status, error_code(body), reply.headers.get("x-bce-request-id"))
        error = self._source.explain(fault, self._key)
        return Expired(reply.url, error) if fault.code in EXPIRED_CODES else error

    def renew(self, url: str) -> None:
        """Every request is signed by itself."""

    def refresh(self) -> None:
        item = self._source.head(self._key, self._stop)
        if self._listed and item.etag != self._listed:
            what = f"was replaced since the run began: its ETag is {item.etag}, it was {self._listed}"
            raise PrepError(
                what, where=self.where, fix="Run the same command again: it takes all parts as they are then"
            )
        self.size, self.checks, self.etag = item.size, item.checks, item.etag
