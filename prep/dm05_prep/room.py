"""Space and inodes: what a folder has, what is needed, and which of the two is short."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from dm05_prep.console import human_bytes
from dm05_prep.errors import PrepError
from dm05_prep.untar import Member, show

LARGE_BYTES = 64 << 20  # from here on a single member is checked


@dataclass(frozen=True, kw_only=True)
class Room:
    """Free bytes and inodes; ``inodes`` is None on filesystems that have no fixed number of them."""

    bytes: int
    inodes: int | None


def room_at(path: Path) -> Room:
    """What the filesystem of ``path``, or of its nearest existing parent, has left for this user."""
    stat = os.statvfs(nearest(path))
    return Room(bytes=stat.f_bavail * stat.f_frsize, inodes=stat.f_favail if stat.f_files else None)


def nearest(path: Path) -> Path:
    """``path`` or the closest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def shortage(needed: Room, free: Room) -> str | None:
    """Which of bytes and inodes is short, with both numbers; None when all is well."""
    if needed.bytes > free.bytes:
        return f"no space: {human_bytes(needed.bytes)} are needed, {human_bytes(free.bytes)} are free"
    if needed.inodes is not None and free.inodes is not None and needed.inodes > free.inodes:
        return f"no inodes: {needed.inodes} files and folders are needed, {free.inodes} are free"
    return None


def check_fits(member: Member, folder: Path) -> None:
    """Raise PrepError when one large member alone is more than the disk has left."""
    if member.size > room_at(folder).bytes:
        raise PrepError(
            f"{show(member)} has {human_bytes(member.size)}, {human_bytes(room_at(folder).bytes)} are free on the disk",
            where=folder,
            fix="Free some, then run the same command: it goes on from where it stopped",
        )


def is_full(error: OSError) -> bool:
    """True when the disk, or the user's share of it, has run out."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def full_error(error: OSError, folder: Path) -> PrepError:
    """The error for a disk that ran out on the way: that of the file which ``error`` names, else of ``folder``."""
    if isinstance(error.filename, str):
        folder = Path(folder, error.filename).parent
    free = room_at(folder)
    short = "inodes" if free.inodes is not None and free.inodes < 16 else "space"
    what = f"no {short} left on the disk ({human_bytes(free.bytes)} free)"
    if error.errno == errno.EDQUOT:
        what = "this user's share of the disk (quota) is used up"
    fix = "Free some, then run the same command: it goes on from where it stopped"
    return PrepError(what, where=nearest(folder), fix=fix)
