"""The index: number of frames of every episode file, and whether it still tells the truth.

::

    index_cache.json       in the dataset's folder, and a copy at the top of the workspace
      "meta_data"          dataset, total_samples (frames), total_jsonl_files, fingerprint, format, tool_version
      "data"               {"data/libero/libero_pi0_all/jsonl/x.jsonl": number of frames}, relative to the workspace
      "files"              {the same key: [size in bytes, modification time in ns, CRC-32C of the content]}

Files that other code wrote hold ``data`` (keys relative to the workspace or to the dataset, or absolute) and perhaps a
``meta_data`` without ours; they are read too. The fingerprint is of names, sizes, counts and checksums, not of times
or of where the workspace lies, so a copy of a dataset keeps it; statistics and packs record it.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dm05_schemas import strict_json
from dm05_schemas.commands import LAYS_OUT, aiming
from dm05_schemas.errors import DataError
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import INDEX_NAME, Workspace

FORMAT = 1
FOREIGN = "was not written by this program and lacks what shows that a file has changed"


class FileState(NamedTuple):
    """Size in bytes and modification time in ns of a file as it is now; -1 when it is no file that can be read."""

    size: int
    mtime_ns: int


class EpisodeEntry(NamedTuple):
    """What an index says of one file; the last three are None in an index of other code."""

    frames: int
    size: int | None
    mtime_ns: int | None
    crc32c: int | None


@dataclass(frozen=True, kw_only=True)
class Index:
    """An index as read.

    ``entries`` are by name below the folder of episode files; ``outside`` holds keys that lie elsewhere.
    """

    path: Path
    jsonl: Path
    entries: dict[str, EpisodeEntry]
    outside: tuple[str, ...]
    fingerprint: str | None

    @property
    def episodes(self) -> dict[Path, int]:
        """Frames by the absolute path of the episode file, sorted by name."""
        return {self.jsonl / name: entry.frames for name, entry in self.entries.items()}

    @property
    def frames(self) -> int:
        """Frames of all episodes."""
        return sum(entry.frames for entry in self.entries.values())


def index_path(workspace: Workspace, spec: DatasetSpec) -> Path:
    """The index in the dataset's own folder."""
    return spec.root(workspace) / INDEX_NAME


def index_command(workspace: Workspace, spec: DatasetSpec) -> str:
    """The command that writes the index."""
    return f"dm05-prep index --dataset-name {spec.name} {workspace.flag}"


def list_episodes(folder: Path) -> dict[str, FileState]:
    """The episode files below ``folder`` by POSIX name relative to it, sorted; hidden ones do not count.

    Symlinks are followed, a folder that leads back to one above it is not entered again.

    Raises:
        DataError: the folder is missing, or a name is not UTF-8.
    """
    if not folder.is_dir():
        raise DataError("there is no such folder", where=folder, fix=LAYS_OUT)
    found: dict[str, FileState] = {}
    _walk(folder, "", found, frozenset())
    return dict(sorted(found.items()))


def require_episodes(workspace: Workspace, spec: DatasetSpec) -> dict[str, FileState]:
    """:func:`list_episodes` of a dataset.

    Raises:
        DataError: the folder is missing or holds none; the text names the command that lays this dataset out.
    """
    folder = spec.jsonl(workspace)
    with aiming(workspace, spec.name):
        present = list_episodes(folder)
        if not present:
            raise DataError("has no .jsonl files", where=folder, fix=LAYS_OUT)
    return present


def read_index(path: Path, workspace: Workspace, spec: DatasetSpec) -> Index:
    """The index in ``path``, its keys resolved.

    Raises:
        DataError: missing, not strict JSON, not an index, or edited; the text names the command that writes it.
    """
    rebuild = f"Run {index_command(workspace, spec)}"
    if not path.is_file():
        raise DataError("there is no index", where=path, fix=rebuild)
    try:
        document = strict_json.read_object(path)
    except DataError as error:
        raise DataError(error.what, where=path, fix=rebuild) from None
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=path, fix=rebuild) from None
    counts, files, meta = (document.get(key) for key in ("data", "files", "meta_data"))
    if not isinstance(counts, dict):
        raise DataError('is not an index: no "data"', where=path, fix=rebuild)
    states = files if isinstance(files, dict) else {}
    starts = _key_starts(workspace, spec)
    entries: dict[str, EpisodeEntry] = {}
    outside = []
    for key, frames in counts.items():
        if type(frames) is not int or frames < 0:
            raise DataError(f"number of frames of {key!r} is {frames!r}", where=path, fix=rebuild)
        name = _name_of(key, starts)
        if name is None:
            outside.append(key)
        elif name in entries:
            raise DataError(f"{name} stands twice, under two forms of its path", where=path, fix=rebuild)
        else:
            entries[name] = EpisodeEntry(frames, *_state_of(states.get(key)))
    fingerprint = meta.get("fingerprint") if isinstance(meta, dict) else None
    if isinstance(fingerprint, str) and not outside and fingerprint != fingerprint_of(spec.jsonl_dir, entries):
        raise DataError("its numbers do not fit its fingerprint (edited by hand?)", where=path, fix=rebuild)
    return Index(
        path=path,
        jsonl=spec.jsonl(workspace),
        entries=dict(sorted(entries.items())),
        outside=tuple(outside),
        fingerprint=fingerprint if isinstance(fingerprint, str) else None,
    )


def check_fresh(index: Index, now: Mapping[str, FileState] | None = None) -> list[str]:
    """Why the index no longer tells the truth, one text a reason; empty when it does.

    Args:
        index: as read.
        now: the files as :func:`list_episodes` finds them, listed here when None.
    """
    present = list_episodes(index.jsonl) if now is None else now
    both = [name for name in present if name in index.entries]
    own_time = index.path.stat().st_mtime_ns
    changed = {
        "not in the index": [name for name in present if name not in index.entries],
        "in the index but gone": [*(name for name in index.entries if name not in present), *index.outside],
        "of another size": [name for name in both if index.entries[name].size not in (None, present[name].size)],
        "modified since": [name for name in both if _touched(index.entries[name], present[name], own_time)],
    }
    return [_reason(names, what) for what, names in changed.items() if names]


def require_fresh(workspace: Workspace, spec: DatasetSpec) -> Index:
    """The dataset's index, known to be true.

    Raises:
        DataError: missing, broken, stale, or of other code, whose index does not tell whether a file was changed.
    """
    index = read_index(index_path(workspace, spec), workspace, spec)
    fix = f"Run {index_command(workspace, spec)}"
    reasons = check_fresh(index, require_episodes(workspace, spec))
    if reasons:
        raise DataError(f"the index is stale: {'; '.join(reasons)}", where=index.path, fix=fix)
    if index.fingerprint is None:
        raise DataError(FOREIGN, where=index.path, fix=fix)
    return index


def fingerprint_of(jsonl_dir: str, entries: Mapping[str, EpisodeEntry]) -> str:
    """64 hex digits over name, size, frames and checksum of every file."""
    rows = (f"{jsonl_dir}/{name}\t{e.size}\t{e.frames}\t{e.crc32c}\n" for name, e in sorted(entries.items()))
    return hashlib.sha256("".join(rows).encode()).hexdigest()


def _walk(folder: Path, prefix: str, found: dict[str, FileState], above: frozenset[tuple[int, int]]) -> None:
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.endswith(".jsonl") and not _is_folder(entry):
                found[_utf8(prefix + entry.name, folder)] = _file_state(entry)
            elif _is_folder(entry):
                _walk(folder / entry.name, f"{prefix}{entry.name}/", found, above | {here})


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a symlink to itself
        return False


def _file_state(entry: os.DirEntry[str]) -> FileState:
    try:
        status = entry.stat()
    except OSError:
        return FileState(-1, -1)
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait for ever
        return FileState(-1, -1)
    return FileState(status.st_size, status.st_mtime_ns)


def _utf8(name: str, folder: Path) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DataError(f"the file name {name!r} is not UTF-8", where=folder, fix="Rename the file") from None
    return name


def _key_starts(workspace: Workspace, spec: DatasetSpec) -> tuple[str, ...]:
    """How a key of the dataset may start: from the workspace, from the dataset's folder, from the root."""
    folder = spec.jsonl(workspace)
    return tuple(
        f"{start}/"
        for start in (
            f"{spec.folder.as_posix()}/{spec.jsonl_dir}",
            spec.jsonl_dir,
            folder.as_posix(),
            os.path.realpath(folder),
        )
    )


def _name_of(key: str, starts: Sequence[str]) -> str | None:
    """A key's name below the folder of episode files, None when it lies elsewhere."""
    path = posixpath.normpath(key)
    for start in starts:
        if path.startswith(start):
            return path[len(start) :]
    return None


def _state_of(state: object) -> tuple[int | None, int | None, int | None]:
    if isinstance(state, list) and len(state) == 3 and all(type(number) is int for number in state):
        return state[0], state[1], state[2]
    return None, None, None


def _touched(entry: EpisodeEntry, now: FileState, index_time: int) -> bool:
    if entry.size not in (None, now.size):
        return False  # already told as of another size
    return now.mtime_ns > index_time if entry.mtime_ns is None else now.mtime_ns != entry.mtime_ns


def _reason(names: list[str], what: str) -> str:
    return f"{len(names)} episode file{'s' if len(names) > 1 else ''} {what} ({names[0]}{', ...' if names[1:] else ''})"
