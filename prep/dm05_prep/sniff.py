"""What a file is that stands where a part of an archive should be, told by its first bytes."""

from __future__ import annotations

import os
from pathlib import Path

from dm05_prep.errors import PrepError
from dm05_prep.parts import ArchiveKind

HEAD_BYTES = 512
_MAGIC: dict[ArchiveKind, bytes] = {"tar.gz": b"\x1f\x8b", "tar.zst": b"\x28\xb5\x2f\xfd", "zip": b"PK"}


def sniff(head: bytes) -> str | None:
    """What is wrong with a part that starts with ``head``, None when nothing can be told."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a large-file pointer (the text that git keeps), not the file itself"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return "a web page (an error page?), not a part of an archive"
    if text.startswith((b'{"error', b'{"code"', b'{"message')):
        return "an error message of a server, not a part of an archive"
    return None


def check_head(path: Path, kind: ArchiveKind | None) -> None:
    """Raise PrepError when the file at ``path`` is no part; ``kind`` is given for the first part of an archive."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    what = sniff(head)
    if what:
        raise PrepError(what, where=path, fix="Download it again (large files need: git lfs pull, or hf download)")
    if kind is None or (kind != "tar" and head.startswith(_MAGIC[kind])):
        return
    found = next((name for name, magic in _MAGIC.items() if head.startswith(magic)), None)
    if kind != "tar":
        raise PrepError(f"this is no {kind} archive", where=path, fix="Download it again, or the first part is missing")
    if found and head[257:262] != b"ustar":
        raise PrepError(f"this is {found}, not tar", where=path, fix=f"Rename it so that the archive ends in .{found}")


def find_hole(path: Path) -> tuple[int, int] | None:
    """(start, bytes) of the first hole of a MiB or more in the file, as an interrupted download leaves it."""
    with path.open("rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            start = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
            while start < size:
                try:
                    end = os.lseek(file.fileno(), start, os.SEEK_DATA)
                except OSError:  # no data after the hole
                    end = size
                if end - start >= 1 << 20:
                    return start, end - start
                start = os.lseek(file.fileno(), end, os.SEEK_HOLE)
        except (OSError, AttributeError):  # the system does not tell
            return None
    return None
