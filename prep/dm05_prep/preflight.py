"""What can be known before a byte is written: damaged parts, and too little space."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from dm05_prep.console import human_bytes, warn
from dm05_prep.errors import PrepError
from dm05_prep.names import BadName, is_sidecar
from dm05_prep.parts import PartSet
from dm05_prep.placement import Placement
from dm05_prep.room import Room, nearest, room_at, shortage
from dm05_prep.sniff import check_head, find_hole
from dm05_prep.stream import PartStream
from dm05_prep.untar import AGAIN, BLOCK, END_MARK_BYTES, damage, read_members

_FILE_BYTES = 4096  # what a file of one byte takes; also the smallest average that is believed without counting
_SLACK_BYTES = 64 << 20


def check_parts(parts: PartSet, paths: list[Path]) -> None:
    """Look at the start of every part on this machine, for holes, and at the archive's end.

    Raises:
        PrepError: something else stands in place of a part, or the archive is cut short.
    """
    for index, (part, path) in enumerate(zip(parts.parts, paths, strict=True)):
        check_head(path, parts.kind if index == 0 else None)
        hole = None if part.file.sha256 else find_hole(path)
        if hole:
            raise PrepError(
                f"{human_bytes(hole[1])} were never written, as an interrupted download leaves them",
                where=f"{part.name}: byte {hole[0]}",
                fix="Download this part again",
            )
    if parts.kind != "tar":
        return
    with paths[-1].open("rb") as file:
        last = parts.parts[-1].file.size
        file.seek(max(0, last - END_MARK_BYTES))
        end = file.read()
    if parts.size % BLOCK or end.strip(b"\0"):
        stream = PartStream(parts, paths.__getitem__)
        with contextlib.closing(stream):
            next(read_members(stream), None)  # without the first part, nothing is where it should be at the end
        raise damage(
            stream,
            parts.size,
            "the archive ends without its end mark",
            f"The last part is cut short, or a part after it is missing. {AGAIN}",
        )


def check_way(folder: Path, *, writes: bool = True) -> None:
    """Raise PrepError when a file is in the way of ``folder`` or, if this run ``writes`` there, a right is missing."""
    place = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if not place.is_dir():
        what = "a link that leads nowhere" if place.is_symlink() and not place.exists() else "a file"
        fix = "Move it away, or choose another folder with --workspace"
        raise PrepError(f"{what} stands where a folder must be", where=place, fix=fix)
    if writes and not os.access(place, os.W_OK | os.X_OK):
        raise PrepError("cannot be written to", where=place, fix="Choose another folder with --workspace")


def check_room(
    parts: PartSet,
    *,
    folder: Path,
    parts_folder: Path,
    copied_bytes: int,
    remaining_bytes: int,
    measure: Callable[[], Room] | None,
) -> None:
    """Compare what the work needs with what the disks have.

    Args:
        folder: where files are written.
        parts_folder: where parts are copied to.
        copied_bytes: space that copied parts will take there at once, 0 when the parts are the user's own.
        remaining_bytes: bytes of the archive still to be read: no dataset in a plain tar is larger.
        measure: counts the wanted members, where the parts are here; only called when ``remaining_bytes`` do not fit.

    Raises:
        PrepError: too little; the text says of what.
    """
    same_disk = nearest(folder).stat().st_dev == nearest(parts_folder).stat().st_dev
    if not same_disk:
        _require(Room(bytes=copied_bytes, inodes=0), parts_folder)
    beside = copied_bytes if same_disk else 0
    most = Room(bytes=remaining_bytes + beside + _SLACK_BYTES, inodes=remaining_bytes // _FILE_BYTES)
    if parts.kind == "tar" and shortage(most, room_at(folder)) is None:
        return
    if measure:
        exact = measure()
        _require(Room(bytes=exact.bytes + beside + _SLACK_BYTES, inodes=exact.inodes), folder)
        return
    _require(Room(bytes=beside + _SLACK_BYTES, inodes=1024), folder)
    free = room_at(folder).bytes
    if remaining_bytes > free:
        warn(
            f"{human_bytes(free)} are free at {nearest(folder)}, the whole archive has {human_bytes(remaining_bytes)}: "
            "if the dataset does not fit, this stops cleanly and can be continued"
        )


def measure(parts: PartSet, paths: list[Path], inside: tuple[str, ...]) -> Room:
    """Space and inodes that the wanted members take, from the headers of a plain tar alone."""
    stream = PartStream(parts, paths.__getitem__)
    placement = Placement(inside)
    count = size = 0
    try:
        for member in read_members(stream):
            with contextlib.suppress(BadName):  # the engine tells
                path = placement.path_of(member)
                if path is not None and not is_sidecar(path):
                    count += 1
                    size += -(-member.size // _FILE_BYTES) * _FILE_BYTES
    finally:
        stream.close()
    return Room(bytes=size, inodes=count)


def _require(needed: Room, folder: Path) -> None:
    short = shortage(needed, room_at(folder))
    if short:
        raise PrepError(short, where=nearest(folder), fix="Free some, or choose another disk with --workspace")
