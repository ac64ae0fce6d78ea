"""A repository of the Hugging Face hub, or of a mirror of it, as a source.

The branch is resolved to a commit first, and only that commit is fetched. Bytes come through our own loop; a file that
the hub's cache on this machine already holds is copied from there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from dm05_schemas.errors import UsageError

from dm05_prep.console import warn
from dm05_prep.errors import PrepError
from dm05_prep.sources.access import Changed, Expired, describe_status
from dm05_prep.sources.addresses import display, origin
from dm05_prep.sources.base import RemoteFile
from dm05_prep.sources.checks import Checks
from dm05_prep.sources.connection import Reply, Request
from dm05_prep.sources.copying import copy_verified
from dm05_prep.sources.helper import HELPER_MIN_BYTES, HelperFailed, run_helper
from dm05_prep.sources.hf_api import HubFile, Repository
from dm05_prep.sources.hf_settings import OFFICIAL_HOSTS, find_settings
from dm05_prep.sources.names import check_name
from dm05_prep.sources.numbers import whole_number
from dm05_prep.sources.options import NO_OPTIONS, SourceOptions
from dm05_prep.sources.retry import RetryPolicy
from dm05_prep.sources.streams import Report
from dm05_prep.sources.transfer import Probe, Transfer

DEFAULT_REPOSITORIES = {"dataset": "Dexmal/libero", "model": "Dexmal/DM05"}
_COMMIT = re.compile("[0-9a-f]{40}")
_HUB_ADDRESS = re.compile(r"(?:hf://|https?://[^/]+/)?(?:(datasets|models)/)?([\w.-]+/[\w.-]+?)/?")


def open_source(
    uri: str | None, *, kind: str, jobs: int, options: SourceOptions = NO_OPTIONS, policy: RetryPolicy | None = None
) -> HubSource:
    """The files of repository ``uri`` (OWNER/NAME, or its address), or of the released dataset or model."""
    text = uri or DEFAULT_REPOSITORIES[kind]
    match = _HUB_ADDRESS.fullmatch(text)
    if not match:
        raise UsageError("is no repository", where=text, fix="For example: --uri Dexmal/libero")
    repository_type = {"datasets": "dataset", "models": "model"}.get(match[1] or "", kind)
    settings = find_settings(options)
    repository = Repository(name=match[2], type=repository_type, settings=settings)
    policy = policy or RetryPolicy.from_environment(stall_s=settings.timeout_s)
    return HubSource(repository, revision=options.revision, jobs=jobs, policy=policy, durable=kind == "model")


class HubSource:
    """See :class:`dm05_prep.sources.base.Source`."""

    owns_parts = True

    def __init__(
        self, repository: Repository, *, revision: str | None, jobs: int, policy: RetryPolicy, durable: bool
    ) -> None:
        self.repository, self._revision, self._durable = repository, revision, durable
        self._transfer = Transfer(jobs=jobs, policy=policy)
        self._lock = threading.Lock()
        self._listed: dict[str, HubFile] = {}
        self.commit = ""
        settings = repository.settings
        place = (
            f"offline, from {settings.cache}" if settings.offline else f"{settings.endpoint}, {settings.token_place}"
        )
        self.description = f"{repository.name}{f'@{revision}' if revision else ''} ({place})"

    def files(self) -> list[RemoteFile]:
        """All files of the commit that the revision stands for now."""
        with self._lock:
            self._list()
            found = sorted(self._listed.values(), key=lambda file: file.name)
        if not found:
            raise PrepError("the repository holds no file", where=self.repository.name, fix="Check its name")
        return [
            RemoteFile(
                name=file.name,
                size=file.size,
                sha256=file.sha256,
                etag=file.sha256 or file.git_sha1,
                url_hint=f"{self.repository.page}/blob/{self.commit}/{file.name}",
            )
            for file in found
        ]

    def fetch(self, file: RemoteFile, target: Path, *, progress: Callable[[int], None], stop: threading.Event) -> Path:
        """See :meth:`dm05_prep.sources.base.Source.fetch`."""
        listed, report = self.lookup(file.name), Report(progress)
        access = _HubAccess(self, listed, stop)
        if not target.exists() and not target.with_name(target.name + ".part.json").exists():
            if self._copy_from_cache(access, listed, target, report.attempt(), stop):
                return target
            if self.repository.settings.offline:
                where = f"{self.repository.name}@{self.commit}/{file.name}"
                raise PrepError("the hub's cache does not hold it whole", where=where, fix="Unset HF_HUB_OFFLINE")
            if self._fetch_by_helper(access, listed, target, report.attempt(), stop):
                return target
        return self._transfer.fetch(access, target, progress=report.attempt(), stop=stop, durable=self._durable)

    def probe(self, file: RemoteFile) -> Probe:
        """Have the first byte of ``file``; raises PrepError."""
        return self._transfer.probe(_HubAccess(self, self.lookup(file.name)))

    def lookup(self, name: str, *, again: bool = False, stop: threading.Event | None = None) -> HubFile:
        """The file ``name`` of the commit; ``again`` asks the hub anew, until ``stop`` is set.

        Raises:
            PrepError: there is none.
        """
        with self._lock:
            if again or not self._listed:
                self._list(stop)
            if name not in self._listed:
                where = f"{self.repository.name}@{self.commit}/{name}"
                raise PrepError("no such file", where=where, fix=f"See {self.repository.page}/tree/main")
            return self._listed[name]

    def refused(self, reply: Reply, at: str) -> PrepError:
        """What a 4xx of the hub to a request for a file means."""
        code = reply.headers.get("X-Error-Code")
        if code == "RevisionNotFound":  # the commit was there when the files were listed
            what = f"the hub does not have this commit any more ({describe_status(reply.status)}, {code})"
            return PrepError(what, where=at, fix="Run the same command again: it takes the newest commit")
        return self.repository.refused(reply.status, code, at)

    def _list(self, stop: threading.Event | None = None) -> None:
        repository, policy = self.repository, self._transfer.policy
        if repository.settings.offline:
            self.commit, found = self._cached_tree()
        else:
            self.commit = repository.commit(self._revision, policy, stop)
            found = repository.tree(self.commit, policy, stop)
        self._listed = {check_name(file.name, f"{repository.name}/{file.name}"): file for file in found}

    def _cache_folder(self) -> Path:
        owner_name = self.repository.name.replace("/", "--")
        return self.repository.settings.cache / f"{self.repository.type}s--{owner_name}"

    def _cached_tree(self) -> tuple[str, list[HubFile]]:
        """Commit and files that the hub's cache holds, for offline mode."""
        folder, revision = self._cache_folder(), self._revision or "main"
        try:
            commit = (folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            commit = revision
        snapshot = folder / "snapshots" / commit
        if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
            what = f"offline mode is on and the hub's cache has no {self.repository.name}@{revision}"
            raise PrepError(what, where=folder, fix="Unset HF_HUB_OFFLINE, or give local files with --source local")
        return commit, [_cached_file(path, snapshot) for path in sorted(snapshot.rglob("*")) if path.is_file()]

    def _copy_from_cache(
        self, access: _HubAccess, file: HubFile, target: Path, progress: Callable[[int], None], stop: threading.Event
    ) -> bool:
        path = self._cache_folder() / "snapshots" / self.commit / file.name
        if not path.is_file():
            return False
        wrong = copy_verified(path, target, file.size, access.checks, progress=progress, stop=stop)
        if wrong:
            warn(f"{path}: {'; '.join(wrong)}; not used")
        return not wrong

    def _fetch_by_helper(
        self, access: _HubAccess, file: HubFile, target: Path, progress: Callable[[int], None], stop: threading.Event
    ) -> bool:
        settings = self.repository.settings
        tool = "hf_transfer" if settings.hf_transfer else "xet" if settings.xet and file.xet else None
        if tool is None or file.size < HELPER_MIN_BYTES:
            return False
        job = {
            "tool": tool,
            "url": self.repository.url(self.commit, file.name),
            "token": settings.token,
            "repository": self.repository.name,
            "type": self.repository.type,
            "commit": self.commit,
            "name": file.name,
            "endpoint": settings.endpoint,
            "connections": self._transfer.jobs,
        }
        try:
            run_helper(
                job,
                target,
                file.size,
                access.checks,
                stall_s=2 * self._transfer.policy.stall_s,
                progress=progress,
                stop=stop,
            )
        except HelperFailed as failure:
            warn(f"{access.where}: {tool} failed ({failure}); fetching it without")
            return False
        return True


class _HubAccess:
    """See :class:`dm05_prep.sources.access.Access`."""

    def __init__(self, source: HubSource, file: HubFile, stop: threading.Event | None = None) -> None:
        self._source, self._name, self._stop = source, file.name, stop
        self._location: str | None = None
        self.network_fix = source.repository.network_fix
        self._take(file)

    def request(self) -> Request:
        location = self._location
        if location is not None:
            return Request(url=location)
        url = self._source.repository.url(self._source.commit, self._name)
        return Request(url=url, headers=self._login(url))

    def moved(self, reply: Reply, location: str) -> Mapping[str, str]:
        size = whole_number(reply.headers.get("X-Linked-Size", ""))
        etag = _plain_etag(reply.headers.get("X-Linked-Etag"))
        if size not in (None, self.size) or (self.checks.sha256 and etag and etag != self.checks.sha256):
            raise Changed("the hub points to another file than its list")
        if self._is_hub(location):
            return self._login(location)
        self._location = location
        return {}

    def check(self, reply: Reply) -> None:
        commit = reply.headers.get("X-Repo-Commit")
        if self._is_hub(reply.url) and commit and commit != self._source.commit:
            raise Changed(f"the hub answers with commit {commit[:12]}, asked for was {self._source.commit[:12]}")

    def refused(self, reply: Reply, body: bytes) -> Exception:
        if self._is_hub(reply.url):
            return self._source.refused(reply, self.where)
        what = f"{display(reply.url)} refuses the address that the hub signed ({describe_status(reply.status)})"
        fix = "The storage does not have it: try another endpoint, or later"
        if reply.status != 404:
            fix = "Check the system clock, then run it again"
        return Expired(reply.url, PrepError(what, where=self.where, fix=fix))

    def renew(self, url: str) -> None:
        self._location = None

    def refresh(self) -> None:
        self._location = None
        self._take(self._source.lookup(self._name, again=True, stop=self._stop))

    def _take(self, file: HubFile) -> None:
        self.size, self.etag = file.size, file.sha256 or file.git_sha1
        self.checks = Checks(sha256=file.sha256, git_sha1=file.git_sha1)
        self.where = f"{self._source.repository.name}@{self._source.commit[:12]}/{file.name}"

    def _is_hub(self, url: str) -> bool:
        hosts = {f"https://{host}:443" for host in OFFICIAL_HOSTS}
        return origin(url) in {origin(self._source.repository.settings.endpoint), *hosts}

    def _login(self, url: str) -> dict[str, str]:
        token = self._source.repository.settings.token
        return {"Authorization": f"Bearer {token}"} if token and self._is_hub(url) else {}


def _plain_etag(text: str | None) -> str:
    return (text or "").removeprefix("W/").strip('"')


def _cached_file(path: Path, snapshot: Path) -> HubFile:
    """A file of the cache; its blob is named by its sum."""
    blob = path.resolve().name
    return HubFile(
        name=path.relative_to(snapshot).as_posix(),
        size=path.stat().st_size,
        sha256=blob if re.fullmatch("[0-9a-f]{64}", blob) else None,
        git_sha1=blob if _COMMIT.fullmatch(blob) else None,
        xet=False,
    )
