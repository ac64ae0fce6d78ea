"""The files of a hub repository: its commit and tree, through huggingface_hub, with errors in words."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dm05_schemas.errors import UsageError

from dm05_prep.errors import PrepError
from dm05_prep.sources.access import describe_status
from dm05_prep.sources.addresses import PROXY_FIX, proxy_for, proxy_login_error
from dm05_prep.sources.hf_settings import HubSettings
from dm05_prep.sources.retry import RETRY_STATUS, RetryPolicy, Trouble, persist, retry_after

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file of a commit; ``sha256`` for large files, ``git_sha1`` for the others, size in bytes."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None
    xet: bool


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository of the hub, type ``dataset`` or ``model``."""

    name: str
    type: str
    settings: HubSettings

    @property
    def page(self) -> str:
        """Its page, where a licence may be accepted."""
        return f"{self.settings.endpoint}/{'datasets/' if self.type == 'dataset' else ''}{self.name}"

    @property
    def network_fix(self) -> str:
        """What to look at when the hub does not answer."""
        return f"Check the network, HF_ENDPOINT (now {self.settings.endpoint}) and HTTPS_PROXY, then run it again"

    def commit(self, revision: str | None, policy: RetryPolicy, stop: threading.Event | None = None) -> str:
        """The commit that a branch or tag stands for, 40 hex digits.

        Raises:
            PrepError: no such repository or revision, no access, no answer. Stopped: ``stop`` was set.
        """
        api = self._api()
        call = functools.partial(
            api.repo_info, self.name, repo_type=self.type, revision=revision, timeout=policy.stall_s
        )
        commit = self._persist(lambda: call().sha, revision, policy, stop)
        if not isinstance(commit, str):
            raise PrepError("the hub names no commit", where=self._at(revision), fix=self.network_fix)
        return commit

    def tree(self, commit: str, policy: RetryPolicy, stop: threading.Event | None = None) -> list[HubFile]:
        """All files of ``commit``; raises like :meth:`commit`."""
        api = self._api()
        call = functools.partial(
            api.list_repo_tree, self.name, repo_type=self.type, revision=commit, recursive=True, expand=False
        )
        return self._persist(lambda: _files(call()), commit, policy, stop)

    def url(self, commit: str, name: str) -> str:
        """The address that answers with the file, or redirects to it."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.name, name, repo_type=self.type, revision=commit, endpoint=self.settings.endpoint)

    def refused(self, status: int, code: str | None, at: str) -> PrepError:
        """What the hub's 4xx means; ``code`` is its X-Error-Code, ``at`` the thing asked for."""
        have = self.settings.token_place
        what = f"({describe_status(status)}{f', {code}' if code else ''}, with {have})"
        if status == 407:
            return proxy_login_error(at)
        if code == "GatedRepo":
            fix = f"Accept the conditions on {self.page} and set HF_TOKEN to a token of that account"
            return PrepError(f"access is gated {what}", where=at, fix=fix)
        if code == "RevisionNotFound":
            return PrepError(f"no such branch, tag or commit {what}", where=at, fix="Check --revision")
        if status == 404 and code == "EntryNotFound":
            return PrepError(f"no such file {what}", where=at, fix=f"See {self.page}/tree/main")
        if status in (401, 403, 404):
            fix = f"Check the name and HF_TOKEN, and accept the conditions, if any, on {self.page}"
            return PrepError(f"does not exist, or may not be read {what}", where=at, fix=fix)
        return PrepError(f"refused {what}", where=at, fix=f"See {self.page}")

    def _at(self, revision: str | None) -> str:
        return f"{self.name}@{revision}" if revision else self.name

    def _api(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about HF_HUB_ENABLE_HF_TRANSFER, which we heed ourselves
            from huggingface_hub import HfApi
        logging.getLogger("huggingface_hub").setLevel("ERROR")
        return HfApi(endpoint=self.settings.endpoint, token=self.settings.token or False)

    def _persist(
        self, call: Callable[[], T], revision: str | None, policy: RetryPolicy, stop: threading.Event | None
    ) -> T:
        at = self._at(revision)
        return persist(lambda: self._translated(call, at), policy, where=at, fix=self.network_fix, stop=stop)

    def _translated(self, call: Callable[[], T], at: str) -> T:
        """``call``, its errors as Trouble or PrepError; the library's own texts may hold addresses with secrets."""
        import httpx2
        from huggingface_hub import errors

        try:
            return call()
        except errors.HFValidationError:
            raise UsageError("is no name of a repository", where=at, fix="For example: --uri Dexmal/libero") from None
        except errors.OfflineModeIsEnabled:
            raise PrepError("offline mode is on", where=at, fix="Unset HF_HUB_OFFLINE") from None
        except errors.HfHubHTTPError as error:
            response = getattr(error, "response", None)
            status = response.status_code if response is not None else 0
            headers = dict(response.headers.items()) if response is not None else {}
            if status in RETRY_STATUS or status >= 500:
                named = {name.title(): value for name, value in headers.items()}
                raise Trouble(describe_status(status), retry_after(named)) from None
            raise self.refused(status, headers.get("x-error-code"), at) from None
        except httpx2.ProxyError:
            raise PrepError("the proxy refuses", where=at, fix=PROXY_FIX) from None
        except (httpx2.HTTPError, OSError) as error:
            raise Trouble(_describe(error, self.settings.endpoint)) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Trouble("the answer is not in the form that a hub sends; is a proxy in between?") from None


def _describe(error: Exception, endpoint: str) -> str:
    import httpx2

    url = _url_of(error) or endpoint  # a mirror may have sent us on
    proxy = proxy_for(url)
    host = urlsplit(url).netloc.rpartition("@")[2] + (f" through the proxy {proxy.host}:{proxy.port}" if proxy else "")
    if isinstance(error, httpx2.TimeoutException):
        return f"{host}: no answer came in time"
    if isinstance(error, httpx2.TooManyRedirects):
        return f"{host}: redirects in a circle"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{host}: cannot connect: {cause.strerror}"
        cause = cause.__cause__ or cause.__context__
    return f"{host}: the connection failed ({type(error).__name__})"


def _url_of(error: Exception) -> str:
    """The address of the request that failed; empty when it is not known."""
    try:
        return str(error.request.url)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return ""


def _files(entries: Iterable[Any]) -> list[HubFile]:
    """The files of a tree; ValueError when its pages go round in a circle or a size is none."""
    found: dict[str, HubFile] = {}
    for entry in entries:
        if hasattr(entry, "blob_id"):
            if entry.path in found or entry.size < 0:
                raise ValueError(entry.path)
            found[entry.path] = _file(entry)
    return list(found.values())


def _file(entry: Any) -> HubFile:
    lfs = entry.lfs
    return HubFile(
        name=entry.path,
        size=entry.size,
        sha256=lfs.sha256 if lfs else None,
        git_sha1=None if lfs else entry.blob_id,
        xet=bool(getattr(entry, "xet_hash", None)),
    )
