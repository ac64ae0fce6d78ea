"""Lists and metadata of a BOS bucket, and signed requests for its objects.

The SDK does it when there are keys. It neither knows public buckets, nor proxies with a password, nor plain http
through a proxy; there the same requests go over our own connections, with the SDK's signature when there are keys.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from dm05_prep.errors import PrepError
from dm05_prep.sources.access import describe_status
from dm05_prep.sources.addresses import proxy_for
from dm05_prep.sources.bos_login import BosLogin
from dm05_prep.sources.checks import Checks
from dm05_prep.sources.connection import Pool, Request, connection_failure
from dm05_prep.sources.numbers import whole_number
from dm05_prep.sources.retry import RETRY_STATUS, RetryPolicy, Trouble, retry_after

PAGE = 1000
_SDK_NAMES = {  # the SDK's names of the headers that count here
    "content_length": "content-length",
    "etag": "etag",
    "content_md5": "content-md5",
    "bce_content_sha_256": "x-bce-content-sha256",
    "bce_content_crc_32": "x-bce-content-crc32",
    "bce_content_crc_32c": "x-bce-content-crc32c",
}
EXPIRED_CODES = frozenset({"RequestExpired", "RequestTimeTooSkewed"})
_IPV4 = re.compile(r"\d{1,3}(\.\d{1,3}){3}")
_MD5 = re.compile("[0-9a-fA-F]{32}")
_SHA256 = re.compile("[0-9a-fA-F]{64}")
T = TypeVar("T")


class BosFault(Exception):
    """The service said no: status, BOS's code for it, and the id of the request for its support."""

    def __init__(self, status: int, code: str | None, request_id: str | None) -> None:
        super().__init__(f"{describe_status(status)}, {code}, request id {request_id}")
        self.status, self.code, self.request_id = status, code, request_id


@dataclass(frozen=True, kw_only=True)
class Object:
    """One object; size in bytes."""

    key: str
    size: int
    etag: str | None
    checks: Checks


class BosApi:
    """One bucket at one endpoint."""

    def __init__(self, bucket: str, endpoint: str, login: BosLogin | None, pool: Pool, policy: RetryPolicy) -> None:
        self._bucket, self._login, self._pool = bucket, login, pool
        self._base, self._root = address(endpoint, bucket)
        proxy = proxy_for(endpoint)
        usable = proxy is None or (endpoint.startswith("https:") and proxy.authorization is None)
        self._sdk = _sdk_client(endpoint, login, policy, proxy) if login and usable else None

    def list(self, prefix: str) -> list[Object]:
        """All objects whose key starts with ``prefix``.

        Raises:
            BosFault: refused. Trouble: worth another try. PrepError: not worth one.
        """
        found: list[Object] = []
        marker = ""
        while True:
            page = self._page(prefix, marker)
            found += [_listed(item) for item in page["contents"]]
            if not page["isTruncated"]:
                return found
            last, marker = marker, page["nextMarker"] or (found[-1].key if found else "")
            if not page["contents"] or marker <= last:
                raise Trouble("a page of the list announces more and leads no further")

    def head(self, key: str) -> Object:
        """Size, ETag and sums of one object; raises like :meth:`list`."""
        if self._sdk is not None:
            sdk = self._sdk
            meta = vars(self._through_sdk(lambda: sdk.get_object_meta_data(self._bucket, key)).metadata)
            headers = {name: str(meta[ours]) for ours, name in _SDK_NAMES.items() if meta.get(ours) is not None}
        else:
            headers = self._plain(self.request(key, method="HEAD"))[0]
        size = whole_number(headers.get("content-length", ""))
        if size is None:
            raise Trouble("the size of the object is missing from the answer")
        etag = headers.get("etag", "").strip('"') or None
        return Object(key=key, size=size, etag=etag, checks=_checks(etag, headers))

    def request(
        self, key: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, query: Mapping[str, str] = {}
    ) -> Request:
        """A request for an object, or for the bucket (empty key), signed now when there are keys."""
        path = self._root + quote(key, safe="/") if key else self._root.rstrip("/") or "/"
        words = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
        signed = self._signature(method, path, query) if self._login else {}
        url = f"{self._base}{path}?{words}" if words else f"{self._base}{path}"
        return Request(url=url, method=method, headers={**(headers or {}), **signed})

    def _signature(self, method: str, path: str, query: Mapping[str, str]) -> dict[str, str]:
        from baidubce import utils
        from baidubce.auth import bce_v1_signer

        assert self._login is not None
        headers = {"Host": urlsplit(self._base).netloc, "x-bce-date": utils.get_canonical_time().decode()}
        if self._login.token:
            headers["x-bce-security-token"] = self._login.token
        encoded = {name.encode(): value.encode() for name, value in headers.items()}
        words = {name.encode(): value.encode() for name, value in query.items()}
        keys = _credentials(self._login)
        headers["Authorization"] = bce_v1_signer.sign(keys, method.encode(), path.encode(), encoded, words).decode()
        return headers

    def _page(self, prefix: str, marker: str) -> dict[str, Any]:
        if self._sdk is not None:
            sdk = self._sdk
            page = self._through_sdk(
                lambda: sdk.list_objects(self._bucket, max_keys=PAGE, prefix=prefix or None, marker=marker or None)
            )
            contents = [{"key": item.key, "size": item.size, "eTag": item.etag} for item in page.contents or []]
            return {"contents": contents, "isTruncated": page.is_truncated, "nextMarker": page.next_marker}
        query = {"maxKeys": str(PAGE), "prefix": prefix, "marker": marker}
        _, body = self._plain(self.request("", query={name: value for name, value in query.items() if value}))
        try:
            answer = json.loads(body)
            contents = [dict(item) for item in answer.get("contents") or []]
            return {
                "contents": contents,
                "isTruncated": answer.get("isTruncated", False),
                "nextMarker": answer.get("nextMarker"),
            }
        except (ValueError, TypeError, AttributeError):
            raise Trouble("the list is not in the form that BOS sends; is a proxy in between?") from None

    def _plain(self, request: Request) -> tuple[dict[str, str], bytes]:
        reply = self._pool.send(request)
        headers = {name.lower(): value for name, value in reply.headers.items()}
        body = reply.read()
        if reply.status == 200:
            return headers, body
        if reply.status in RETRY_STATUS or reply.status >= 500:
            raise Trouble(describe_status(reply.status), retry_after(reply.headers))
        raise BosFault(reply.status, error_code(body), headers.get("x-bce-request-id"))

    def _through_sdk(self, call: Callable[[], Any]) -> Any:
        """What the SDK returns, with its errors in our words: its own texts hold tracebacks."""
        from baidubce.exception import BceClientError, BceHttpClientError, BceServerError

        try:
            return call()
        except BceHttpClientError as error:
            cause = error.last_error
        except (BceClientError, ValueError, TypeError) as error:
            what = f"the SDK refuses the request ({type(error).__name__})"  # its text may show a signature
            raise PrepError(what, where=f"bos://{self._bucket}", fix="Check address and keys") from None
        if isinstance(cause, BceServerError):
            status = cause.status_code or 0
            if status in RETRY_STATUS or status >= 500:
                raise Trouble(describe_status(status))
            raise BosFault(status, _text(cause.code), _text(cause.request_id))
        if isinstance(cause, OSError | http.client.HTTPException):
            raise connection_failure(cause, self._base)
        raise Trouble("the answer is not in the form that BOS sends; is a proxy in between?")


def address(endpoint: str, bucket: str) -> tuple[str, str]:
    """Where objects of ``bucket`` are: scheme and host, and the start of the path (with its slash).

    ``https://bj.bcebos.com`` takes the bucket into the host name; an address or foreign host gets it in the path.
    """
    parts = urlsplit(endpoint)
    host = (parts.hostname or "").lower()
    labels = host.split(".")
    if host.endswith(".cdn.bcebos.com"):
        return endpoint, "/"
    if host.endswith("bcebos.com") and not _IPV4.fullmatch(host):
        if len(labels) == 3:
            return f"{parts.scheme}://{bucket}.{parts.netloc}", "/"
        if len(labels) == 4 and labels[0] == bucket:
            return endpoint, "/"
        if len(labels) == 4:
            what = f"it belongs to the bucket {labels[0]}, not to {bucket}"
            raise PrepError(
                what, where=endpoint, fix="Give the endpoint of the region, for example https://bj.bcebos.com"
            )
    return endpoint, f"/{bucket}/"


def error_code(body: bytes) -> str | None:
    """The ``code`` of an error body, None when it has none (HEAD, or a page of a proxy)."""
    try:
        code = json.loads(body).get("code")
    except (ValueError, AttributeError):
        return None
    return code if isinstance(code, str) else None


def _sdk_client(endpoint: str, login: BosLogin, policy: RetryPolicy, proxy: Any) -> Any:
    from baidubce.bce_client_configuration import BceClientConfiguration
    from baidubce.retry.retry_policy import NoRetryPolicy
    from baidubce.services.bos.bos_client import BosClient

    logging.getLogger("baidubce").setLevel(logging.WARNING)  # it writes signing keys at DEBUG
    return BosClient(
        BceClientConfiguration(
            credentials=_credentials(login),
            endpoint=endpoint,
            security_token=login.token.encode() if login.token else None,
            connection_timeout_in_mills=int(policy.stall_s * 1000),
            retry_policy=NoRetryPolicy(),
            proxy_host=proxy.host if proxy else None,
            proxy_port=proxy.port if proxy else None,
        )
    )


def _credentials(login: BosLogin) -> Any:
    from baidubce.auth.bce_credentials import BceCredentials

    return BceCredentials(login.access_key, login.secret_key)


def _listed(item: Mapping[str, Any]) -> Object:
    try:
        etag = str(item.get("eTag") or "").strip('"') or None
        key, size = str(item["key"]), int(item["size"])
    except (KeyError, TypeError, ValueError):
        raise Trouble("an entry of the list has no key and size") from None
    if size < 0:
        raise Trouble("an entry of the list has a size below 0")
    return Object(key=key, size=size, etag=etag, checks=_checks(etag, {}))


def _checks(etag: str | None, headers: Mapping[str, str]) -> Checks:
    """The sums that the headers of an object publish. The ETag of an object put in pieces is not an md5.

    crc32c is only used where crc32 is missing: it can add nothing to it.
    """
    md5 = _base64_md5(headers.get("content-md5", "")) or (etag.lower() if etag and _MD5.fullmatch(etag) else None)
    sha256 = headers.get("x-bce-content-sha256", "")
    crc32 = _crc(headers.get("x-bce-content-crc32", ""))
    return Checks(
        sha256=sha256.lower() if _SHA256.fullmatch(sha256) else None,
        md5=md5,
        crc32=crc32,
        crc32c=_crc(headers.get("x-bce-content-crc32c", "")) if crc32 is None else None,
    )


def _crc(text: str) -> int | None:
    value = whole_number(text)
    return value if value is not None and value < 1 << 32 else None


def _base64_md5(text: str) -> str | None:
    try:
        digest = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest.hex() if len(digest) == 16 else None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
