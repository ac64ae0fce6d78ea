"""``dm05-prep doctor``: what of this machine, its network and its keys will work, before gigabytes are on their way.

Every source is asked for the very list that a fetch would need, and for the first byte of its largest file.
"""

from __future__ import annotations

import platform
import shlex
import urllib.request
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import tyro
from dm05_schemas.cli import describe_os_error
from dm05_schemas.errors import DM05Error, UsageError
from dm05_schemas.workspace import Workspace

from dm05_prep.console import human_bytes, say
from dm05_prep.errors import PrepError
from dm05_prep.room import room_at
from dm05_prep.sources import Kind, RemoteFile, bos, hf
from dm05_prep.sources.addresses import proxy_for
from dm05_prep.sources.bos_login import find_endpoint, find_login
from dm05_prep.sources.connection import Pool
from dm05_prep.sources.hf_settings import find_settings
from dm05_prep.sources.options import NO_OPTIONS, SourceOptions
from dm05_prep.sources.retry import DAY_S, Background, RetryPolicy

State = Literal["ok", "note", "fail"]

DATASET_BYTES = 40 << 30  # the released archive is 34.85 GiB, and one part of 4 GiB lies beside it
DATASET_FILES = 560_000
MODEL_BYTES = 11_660_000_000
CLOCK_TOLERANCE_S = 300
PACKAGES = ("dm05", "huggingface_hub", "hf_transfer", "hf-xet", "bce-python-sdk")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at; ``fix`` says what to do about a failure."""

    subject: str
    state: State
    text: str
    fix: str = ""

    def line(self) -> str:
        """``ok    disk           64.2 GiB free``."""
        advice = f". {self.fix}" if self.fix else ""
        return f"{self.state:<5} {self.subject:<14} {self.text}{advice}"


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check endpoints, keys, clock, disk and proxies, and say which fetches will work from here.

    Exit code 0 when dataset and model can both be fetched from somewhere, else 1.

    Examples:
      dm05-prep doctor --workspace dm05
      HF_ENDPOINT=https://hf-mirror.com dm05-prep doctor
      dm05-prep doctor --only bos --region bj
    """

    only: Literal["bos", "hf"] | None = None
    """Look at this source alone."""
    timeout: float = 10.0
    """Seconds to wait for an answer."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """No lines but those of failures."""
    access: Annotated[SourceOptions, tyro.conf.OmitArgPrefixes] = NO_OPTIONS

    def run(self) -> int:
        """Look at everything and print a line each."""
        if not 0.01 <= self.timeout <= DAY_S:
            raise UsageError("must be from 0.01 to 86400 seconds", where="--timeout")
        if self.access.endpoint and not self.only:
            raise UsageError("is for one kind of source", where="--endpoint", fix="Say which: --only bos or --only hf")
        findings = [check_packages(), *check_disk(Workspace.resolve(self.workspace)), *check_proxies()]
        findings += [check_keys(self.access), check_hub_settings(self.access)]
        sources = (self.only,) if self.only else ("bos", "hf")
        kinds: tuple[Kind, ...] = ("dataset", "model")
        pairs: list[tuple[str, Kind]] = [(source, kind) for source in sources for kind in kinds]
        waiting = [Background(partial(check_place, *pair, self.access, self.timeout)) for pair in pairs]
        places = [place.result() for place in waiting]
        findings += [*places, check_clock(sources, self.access, self.timeout)]
        for finding in findings:
            say(finding.line(), self.quiet and finding.state != "fail")
        place = f" --workspace {shlex.quote(str(self.workspace))}" if self.workspace else ""
        return conclude(pairs, places, place, quiet=self.quiet)


def conclude(pairs: list[tuple[str, Kind]], places: list[Finding], place: str = "", *, quiet: bool = False) -> int:
    """Say what works, with ``place`` after each command; the exit code."""
    works = {pair for pair, place in zip(pairs, places, strict=True) if place.state == "ok"}
    for kind in ("dataset", "model"):
        commands = [
            f"dm05-prep {kind} --source {source}{place}"
            for source, what in pairs
            if what == kind and (source, what) in works
        ]
        text = " | ".join(commands) or "cannot be fetched from here"
        say(f"{'works' if commands else 'none':<5} {kind:<14} {text}", quiet and bool(commands))
    return 0 if {kind for _, kind in works} == {"dataset", "model"} else 1


def check_packages() -> Finding:
    """Versions that a report of a fault should name."""
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} is not installed")
    return Finding(subject="versions", state="ok", text=f"Python {platform.python_version()}, {', '.join(versions)}")


def check_disk(workspace: Workspace) -> list[Finding]:
    """Room for the released dataset (with one part) and model."""
    room = room_at(workspace.root)
    free = f"{human_bytes(room.bytes)} free at {workspace.root}"
    findings = []
    for subject, needed in (("disk: dataset", DATASET_BYTES), ("disk: model", MODEL_BYTES)):
        enough = room.bytes >= needed
        fix = "" if enough else "Free some, or choose another --workspace; one subset alone takes less"
        text = f"{free}, the release takes up to {human_bytes(needed)}"
        findings.append(Finding(subject=subject, state="ok" if enough else "note", text=text, fix=fix))
    if room.inodes is not None and room.inodes < DATASET_FILES:
        text = f"{room.inodes:,} files fit, the dataset has up to {DATASET_FILES:,}"
        findings.append(Finding(subject="disk: files", state="note", text=text, fix="Use --layout pack"))
    return findings


def check_proxies() -> list[Finding]:
    """The proxies of the environment, without user and password."""
    proxies = urllib.request.getproxies_environment()
    findings = []
    for scheme in ("http", "https"):
        try:
            proxy = proxy_for(f"{scheme}://example.com")
        except PrepError as error:
            findings.append(Finding(subject=f"{scheme} proxy", state="fail", text=str(error)))
            continue
        if proxy:
            login = " with user and password" if proxy.authorization else ""
            text = f"{proxy.host}:{proxy.port}{login}"
            findings.append(Finding(subject=f"{scheme} proxy", state="ok", text=text))
    if not findings:
        findings.append(Finding(subject="proxy", state="ok", text="none set"))
    if proxies.get("no"):
        findings.append(Finding(subject="no proxy for", state="ok", text=proxies["no"]))
    return findings


def check_keys(options: SourceOptions) -> Finding:
    """Where keys for BOS come from, if any."""
    try:
        login = find_login(options)
    except DM05Error as error:
        return Finding(subject="BOS keys", state="fail", text=str(error))
    if login is None:
        return Finding(subject="BOS keys", state="ok", text="none: public buckets only")
    return Finding(subject="BOS keys", state="ok", text=f"from {login.place}")


def check_hub_settings(options: SourceOptions) -> Finding:
    """How the hub would be used."""
    try:
        settings = find_settings(options)
    except DM05Error as error:
        return Finding(subject="hub settings", state="fail", text=str(error))
    place = "a mirror" if settings.is_mirror else "the hub"
    text = f"{settings.endpoint} ({place}), {settings.token_place}, cache {settings.cache}"
    text += f", hf_transfer {_on(settings.hf_transfer)}, xet {_on(settings.xet)}"
    if settings.offline:
        return Finding(
            subject="hub settings", state="note", text=f"{text}; offline", fix="Unset HF_HUB_OFFLINE to fetch"
        )
    return Finding(subject="hub settings", state="ok", text=text)


def check_place(source: str, kind: Kind, options: SourceOptions, timeout_s: float) -> Finding:
    """List one source for one kind, and have the first byte of its largest file."""
    subject = f"{source} {kind}"
    policy = RetryPolicy(tries=2, first_pause_s=0.5, stall_s=timeout_s)
    try:
        opened = (bos if source == "bos" else hf).open_source(None, kind=kind, jobs=1, options=options, policy=policy)
        files: list[RemoteFile] = opened.files()
        probe = opened.probe(max(files, key=lambda file: file.size))
    except DM05Error as error:
        return Finding(subject=subject, state="fail", text=str(error))
    except OSError as error:
        return Finding(subject=subject, state="fail", text=describe_os_error(error))
    total = human_bytes(sum(file.size for file in files))
    ranges = "" if probe.ranges else "; no ranges, so that an interrupted file starts again"
    text = f"{len(files)} files, {total} in {opened.description}, bytes come from {probe.host}{ranges}"
    return Finding(subject=subject, state="ok", text=text)


def check_clock(sources: tuple[str, ...], options: SourceOptions, timeout_s: float) -> Finding:
    """This machine's clock against those of the servers: signatures are refused when it is far off."""
    pool, known = Pool(timeout_s), []
    for source in sources:
        try:
            endpoint = find_endpoint(options, "") if source == "bos" else find_settings(options).endpoint
        except DM05Error:
            continue
        ahead = pool.clock_ahead_of(endpoint)
        known += [ahead] if ahead is not None else []
    if not known:
        return Finding(subject="clock", state="note", text="no server answered, so that it cannot be compared")
    off = min(known, key=abs)
    text = f"{abs(off):.0f} s {'ahead of' if off >= 0 else 'behind'} the servers"
    if abs(off) > CLOCK_TOLERANCE_S:
        return Finding(subject="clock", state="fail", text=text, fix="Set it: BOS refuses signatures of such a time")
    return Finding(subject="clock", state="ok", text=text)


def _on(value: bool) -> str:
    return "on" if value else "off"
