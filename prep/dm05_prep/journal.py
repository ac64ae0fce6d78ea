"""What an unfinished extraction has made durable, and the record of a finished one.

::

    data/libero/
      libero_pi0_all.partial/         while the work goes on
        journal.json                  the last durable point; replaced by rename
        members.log                   what was written, one line "KIND PATH" each, in the archive's order
        tree/                         becomes libero_pi0_all/ when everything is in it
      libero_pi0_all/
        .dm05-extracted.json          the record; its folder was complete when it got its name

A point is the offset of a member's header with everything before it durable. Files of later members may be in ``tree/``
too; the next run writes them again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from dm05_prep.durable import write_durable
from dm05_prep.errors import PrepError
from dm05_prep.images import ImageMode, ImageState
from dm05_prep.names import Names
from dm05_prep.parts import PartSet

VERSION = 1
RECORD_NAME = ".dm05-extracted.json"
LogKind = Literal["file", "folder", "link", "image"]


class Point(NamedTuple):
    """A place to go on from: totals of everything before ``offset``."""

    offset: int = 0
    log_bytes: int = 0
    files: int = 0
    bytes: int = 0
    left_out: int = 0
    images: ImageState | None = None


@dataclass(kw_only=True)
class Journal:
    """The content of journal.json.

    Attributes:
        parts: (name, size, published sha256 or None) of each part.
        point: the last durable point.
        part_points: for part 0, 1, ... the last member boundary at or before its start.
        digests: part name -> "crc32:..." or "sha256:..." of the parts read so far.
    """

    archive: str
    mode: ImageMode
    parts: list[tuple[str, int, str | None]]
    point: Point = field(default_factory=Point)
    part_points: list[Point] = field(default_factory=lambda: [Point()])
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: PartSet, mode: ImageMode) -> Journal:
        """An empty journal."""
        return cls(
            archive=parts.archive,
            mode=mode,
            parts=[(part.name, part.file.size, part.file.sha256) for part in parts.parts],
        )

    @classmethod
    def load(cls, path: Path) -> Journal | None:
        """The journal at ``path``, None when there is none.

        Raises:
            PrepError: it is of another version or not a journal.
        """
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            if data.pop("version") != VERSION:
                raise ValueError
            data["point"] = _point(data["point"])
            data["part_points"] = [_point(point) for point in data["part_points"]]
            data["parts"] = [tuple(part) for part in data["parts"]]
            return cls(**data)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise PrepError(
                "not a journal of this version of the tool", where=path, fix="Start over with --force"
            ) from None

    def dump(self) -> bytes:
        """The text of the file."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode()

    def save(self, path: Path) -> None:
        """Make the journal durable."""
        write_durable(path, self.dump())

    def differs(self, parts: PartSet) -> str:
        """The part that was read, or the archive, that is not what it was; "" when ``parts`` go on from here."""
        read = slice(parts.index_at(self.point.offset) + 1)
        old, new = self.parts[read], Journal.of(parts, self.mode).parts[read]
        other = next((b[0] for a, b in zip(old, new, strict=False) if not _same(a, b)), "")
        return other or ("" if self.archive == parts.archive and len(old) == len(new) else parts.archive)

    def check_same(self, other: Journal, parts: PartSet, where: Path) -> None:
        """Raise PrepError when this is not what ``other``, the empty journal for ``parts``, would have become."""
        if self.mode != other.mode:
            raise PrepError(
                "an unfinished extraction here was begun with another --layout or --keep-parts",
                where=where,
                fix="Finish it with the flags it was begun with, or start over with --force",
            )
        if differs := self.differs(parts):
            raise PrepError(
                f"an unfinished extraction here is of another archive: {differs} differs",
                where=where,
                fix="Give the parts that it was begun with, or start over with --force",
            )


def _point(values: list[Any]) -> Point:
    return Point(*values[:-1])._replace(images=_image_state(values[-1]))


def _image_state(values: list[Any] | None) -> ImageState | None:
    return (values[0], tuple(values[1])) if values else None


def _same(old: tuple[str, int, str | None], new: tuple[str, int, str | None]) -> bool:
    return old[:2] == new[:2] and (old[2] is None or new[2] is None or old[2] == new[2])


class MemberLog:
    """members.log, opened for appending after ``keep_bytes`` of it."""

    def __init__(self, path: Path, keep_bytes: int) -> None:
        path.touch()
        self._file = path.open("r+b", buffering=1 << 16)
        self._file.truncate(keep_bytes)
        self._size = self._file.seek(keep_bytes)
        self._lines: list[str] = []

    def add(self, kind: LogKind, path: str) -> None:
        """Note what was written; paths hold no line breaks."""
        self._lines.append(f"{kind} {path}\n")

    @property
    def size(self) -> int:
        """Bytes of the log so far."""
        lines, self._lines = self._lines, []
        self._size += self._file.write("".join(lines).encode())
        return self._size

    def flush(self) -> None:
        """Hand everything to the system."""
        _ = self.size
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(path: Path, size: int) -> Iterator[tuple[LogKind, str]]:
    """The first ``size`` bytes of a members.log.

    Raises:
        PrepError: it is shorter than the journal says.
    """
    if not size:
        return
    with path.open("rb") as file:
        while file.tell() < size:
            kind, _, name = file.readline().decode().rstrip("\n").partition(" ")
            if not name:
                raise PrepError("shorter than its journal says", where=path, fix="Start over with --force")
            yield cast(LogKind, kind), name


def reconcile(tree: Path, names: Names, files: int, where: Path, apart: str) -> None:
    """Make ``tree`` hold what the log says: remove files of later members, which are written again.

    The folder ``apart`` is left alone.

    Raises:
        PrepError: not all of the ``files`` files and links of the log are there.
    """
    found = 0
    stack = [""]
    folders: list[str] = []
    while stack:
        folder = stack.pop()
        with os.scandir(tree / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if path == apart:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    stack.append(path)
                    folders.append(path)
                elif names.has_file(path):
                    found += 1
                else:
                    os.unlink(entry.path)
    if found != files:
        raise PrepError(f"holds {found} of the {files} files of its log", where=where, fix="Start over with --force")
    for path in reversed(folders):
        if not names.has_folder(path):
            os.rmdir(tree / path)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The content of .dm05-extracted.json.

    Attributes:
        parts: (name, size, "algorithm:digest" or None when some of the part was not read) of each part.
        mode, images: where the images are, and for a pack the state that its making goes on from.
        files, bytes: members that were taken.
        left_out: browser sidecars that were not.
    """

    archive: str
    source: str
    parts: list[tuple[str, int, str | None]]
    archive_bytes: int
    mode: ImageMode
    images: ImageState | None
    files: int
    bytes: int
    left_out: int
    finished: str

    @classmethod
    def load(cls, folder: Path) -> Record | None:
        """The record of a complete folder; None when it has none that can be read."""
        try:
            data = json.loads((folder / RECORD_NAME).read_bytes())
            if data.pop("version") != VERSION:
                return None
            data["images"] = _image_state(data["images"])
            return cls(**data)
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def save(self, folder: Path) -> None:
        """Write the record into ``folder``."""
        write_durable(folder / RECORD_NAME, json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode())


def partial_folder(target: Path) -> Path:
    """Where the unfinished extraction of ``target`` lies."""
    return target.with_name(target.name + ".partial")


def journal_path(target: Path) -> Path:
    """Where the journal of an unfinished extraction is."""
    return partial_folder(target) / "journal.json"


def was_published(target: Path) -> bool:
    """True when a run renamed its complete tree to ``target`` but was stopped before it removed the rest."""
    partial = partial_folder(target)
    return partial.exists() and not (partial / "tree").exists() and Record.load(target) is not None


def remove_partial(target: Path) -> None:
    """Forget an unfinished extraction; the journal goes first, so that half of a tree is never gone on from."""
    partial = partial_folder(target)
    journal_path(target).unlink(missing_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
