"""``dm05-prep model``: the released checkpoint, fetched into the workspace and checked.

::

    WORKSPACE/checkpoints/DM05/
      config.json, tokenizer.json, ..., model.safetensors     the large file comes last
      NAME.part, NAME.part.json                               of a file that is on its way
      .fetched.json    {"version": 1, "files": {NAME: {"size", "mtime_ns", "etag"}}}: what was fetched and verified
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import tyro
from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.files import replace_file
from dm05_schemas.workspace import Workspace

from dm05_prep.checkpoint_check import NEEDED, check_checkpoint
from dm05_prep.console import human_bytes, human_time, progress, say
from dm05_prep.errors import PrepError
from dm05_prep.room import full_error, is_full, room_at
from dm05_prep.signals import going_on
from dm05_prep.sources import RemoteFile, Source, SourceName, guess_source, open_source
from dm05_prep.sources.checks import Checks, file_differences
from dm05_prep.sources.copying import copy_verified
from dm05_prep.sources.options import NO_OPTIONS, SourceOptions
from dm05_prep.sources.partfile import arrived

_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
RECORD = ".fetched.json"
SUFFIXES = frozenset({".json", ".jinja", ".safetensors", ".model", ".txt"})


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One file of the checkpoint: where it goes, and whether it has to come; ``bytes_there`` of it have arrived."""

    file: RemoteFile
    target: Path
    needed: bool
    bytes_there: int


@dataclass(frozen=True, kw_only=True)
class ModelCommand:
    """Fetch the released DM05 checkpoint and check it: size, names and shapes of tensors, tokenizer and configs.

    Stopped at any moment, the same command goes on at the byte where it was; when everything is there, it only checks.

    Examples:
      dm05-prep model --source hf --workspace dm05
      dm05-prep model --source bos --dry-run
      dm05-prep model --source local --uri /data/DM05
      HF_ENDPOINT=https://hf-mirror.com dm05-prep model --source hf
    """

    source: SourceName | None = None
    """Where from: Baidu BOS, the Hugging Face hub or a local folder (default: what --uri looks like, else bos)."""
    uri: str | None = None
    """bos://bucket/prefix/, a hub repository, or a local folder (default: the released DM05)."""
    jobs: int = 8
    """Connections at once."""
    check: bool = False
    """Only check what is in the workspace; fetch nothing."""
    dry_run: bool = False
    """Say what would be fetched and how much disk it takes; write nothing."""
    force: bool = False
    """Replace files that differ from the source's."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """No progress bar, no lines but errors."""
    access: Annotated[SourceOptions, tyro.conf.OmitArgPrefixes] = NO_OPTIONS

    def run(self) -> None:
        """Do it."""
        if self.jobs < 1:
            raise UsageError("must be 1 or more", where="--jobs")
        workspace = Workspace.resolve(self.workspace)
        folder = workspace.checkpoint_dir
        if (folder.is_symlink() or folder.exists()) and not folder.is_dir():
            raise DataError("is not a folder", where=folder, fix="Move it away, then run the same command")
        if not self.check:
            name = self.source or guess_source(self.uri)
            source = open_source(name, self.uri, kind="model", jobs=self.jobs, options=self.access)
            plans = plan_files(source, folder, force=self.force, quiet=self.quiet)
            if self.dry_run:
                for line in describe(source, plans, folder):
                    say(line)
                return
            self._fetch(source, plans, folder)
        report = check_checkpoint(folder)
        for line in [*report.lines(), f"next       {_next(workspace)}"]:
            say(line, self.quiet)

    def _fetch(self, source: Source, plans: list[FilePlan], folder: Path) -> None:
        wanted = [plan for plan in plans if plan.needed]
        if not wanted:
            say(f"model      all {len(plans)} files are there: {folder}", self.quiet)
            return
        say(f"source     {source.description}", self.quiet)
        started = time.monotonic()
        if not source.owns_parts:
            check_original(source, wanted[0])
        with going_on():
            fetch_files(source, wanted, folder, quiet=self.quiet)
        size, seconds = sum(plan.file.size for plan in wanted), time.monotonic() - started
        say(
            f"model      {len(wanted)} of {len(plans)} files, {human_bytes(size)} in {human_time(seconds)}: {folder}",
            self.quiet,
        )


def plan_files(source: Source, folder: Path, *, force: bool, quiet: bool = True) -> list[FilePlan]:
    """What has to come, small files first. A large file that no record tells of is summed under a bar.

    Raises:
        PrepError: the source holds no checkpoint.
        DataError: a file here was changed or is another one, and ``force`` was not given.
    """
    files = [file for file in source.files() if _is_wanted(file.name)]
    missing = [name for name in NEEDED if name not in {file.name for file in files}]
    if missing:
        what = f"holds no checkpoint: there is no {', '.join(missing)}"
        if any(_SHARD.fullmatch(file.name) for file in files):
            what = "holds its weights in several files; they are read from one, model.safetensors"
        raise PrepError(what, where=source.description, fix="Check --uri, or choose another --source")
    record = _read_record(folder)
    plans = []
    for file in sorted(files, key=lambda file: (file.size, file.name)):
        target = folder / file.name
        needed = not _is_current(file, target, record.get(file.name), force, quiet)
        plans.append(FilePlan(file=file, target=target, needed=needed, bytes_there=arrived(target) if needed else 0))
    return plans


def fetch_files(source: Source, plans: list[FilePlan], folder: Path, *, quiet: bool) -> None:
    """Bring the files, each verified and then recorded; a second run of any part of it does nothing twice.

    Raises:
        PrepError: a file cannot be had.
        KeyboardInterrupt: stopped by Ctrl-C or SIGTERM; the next run continues.
    """
    missing = sum(plan.file.size - plan.bytes_there for plan in plans)
    free = room_at(folder).bytes
    if missing > free:
        what = f"no space left: {human_bytes(missing)} to come, {human_bytes(free)} free"
        raise PrepError(what, where=folder, fix="Free some space, or choose another --workspace")
    stop = threading.Event()
    with progress(sum(plan.file.size for plan in plans), "B", "model", quiet) as bar:
        try:
            for plan in plans:
                _bring(source, plan, bar.update, stop)
                _record(folder, plan)
        except OSError as error:
            if not is_full(error):
                raise
            raise full_error(error, folder) from None
        finally:
            stop.set()


def check_original(source: Source, plan: FilePlan) -> None:
    """A local checkpoint is checked where it lies, before anything is copied or replaced.

    Raises:
        DataError: a file of it is broken, or does not fit the others.
    """
    path = source.fetch(plan.file, plan.target, progress=lambda count: None, stop=threading.Event())
    try:
        check_checkpoint(path.parent)
    except DataError as error:
        raise DataError(error.what, where=error.where, fix="The original is damaged: get it again") from None


def describe(source: Source, plans: list[FilePlan], folder: Path) -> list[str]:
    """What a run would do, with the disk it takes now and at most."""
    lines = [f"source     {source.description}"]
    for plan in plans:
        begun = f", {human_bytes(plan.bytes_there)} of it are there" if plan.bytes_there else ""
        what = f"{human_bytes(plan.file.size)}{begun}" if plan.needed else "is there"
        lines.append(f"{'fetch' if plan.needed else 'keep':<10} {plan.file.name}  {what}")
    left = sum(plan.file.size - plan.bytes_there for plan in plans if plan.needed)
    replaced = max((plan.target.stat().st_size for plan in plans if plan.needed and plan.target.exists()), default=0)
    free = room_at(folder).bytes
    lines.append(f"disk       {human_bytes(left)} now and at peak, {human_bytes(free)} are free: {folder}")
    if replaced:
        lines.append(f"           files that differ are deleted first, the largest has {human_bytes(replaced)}")
    if left > free:
        lines.append(f"           not enough: {human_bytes(left - free)} are missing")
    return lines


def _bring(source: Source, plan: FilePlan, advance: Callable[[int], object], stop: threading.Event) -> None:
    def report(count: int) -> None:
        advance(count)

    if source.owns_parts:
        source.fetch(plan.file, plan.target, progress=report, stop=stop)
        return
    original = source.fetch(plan.file, plan.target, progress=lambda count: None, stop=stop)
    wrong = copy_verified(original, plan.target, plan.file.size, _published(plan.file), progress=report, stop=stop)
    if wrong:
        raise DataError("; ".join(wrong), where=original, fix="The file is damaged: get it again")


def _is_wanted(name: str) -> bool:
    path = PurePosixPath(name)
    return len(path.parts) == 1 and not name.startswith(".") and path.suffix in SUFFIXES


def _is_current(file: RemoteFile, target: Path, recorded: Any, force: bool, quiet: bool) -> bool:
    """True when ``target`` is the source's file; False when it has to come.

    Raises:
        DataError: there is another file, not one of an earlier fetch, and ``force`` is off.
    """
    if not target.exists():
        return False
    stat = target.stat()
    ours = isinstance(recorded, dict) and (recorded.get("size"), recorded.get("mtime_ns")) == (
        stat.st_size,
        stat.st_mtime_ns,
    )
    if ours and (recorded["size"], recorded.get("etag")) == (file.size, _version(file)):
        return True
    published = _published(file)
    if ours and not published.published():
        return False
    with progress(file.size, "B", f"check {file.name}", quiet) as bar:
        wrong = file_differences(target, file.size, published, threading.Event(), progress=bar.update)
    if wrong and not (force or ours):
        what = f"is not the source's file: {wrong[0]}"
        raise DataError(what, where=target, fix="Replace it with --force, or move it away")
    return not wrong


def _published(file: RemoteFile) -> Checks:
    """The sums in a listing; the ETag of a small file on the hub is git's sha1 of it."""
    git = file.etag if file.etag and len(file.etag) == 40 else None
    return Checks(sha256=file.sha256, md5=file.md5, crc32=file.crc32, git_sha1=git)


def _version(file: RemoteFile) -> str:
    """Changes when the source's file does; of a local file, its time tells."""
    known = file.sha256 or file.etag or file.md5
    return known or f"mtime {Path(file.url_hint).stat().st_mtime_ns}"


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_bytes())
        files = record["files"] if record["version"] == 1 else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return files if isinstance(files, dict) else {}


def _record(folder: Path, plan: FilePlan) -> None:
    stat = plan.target.stat()
    entry = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "etag": _version(plan.file)}
    files = {**_read_record(folder), plan.file.name: entry}
    replace_file(folder / RECORD, json.dumps({"version": 1, "files": files}, indent=1).encode() + b"\n")


def _next(workspace: Workspace) -> str:
    return f"{'dm05-train' if workspace.norm_stats_dir.is_dir() else 'dm05-prep dataset'} {workspace.flag}"
