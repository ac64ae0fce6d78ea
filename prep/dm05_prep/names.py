"""Which member names may be written, and where to: nothing outside the tree, nothing twice.

A name is refused when it is absolute, climbs with ``..``, holds control characters or a backslash, is not UTF-8 or is
too long. :class:`Names` remembers what was written, so that duplicates, names that differ only by case or Unicode form,
files that are also folders, and paths through a link are found, also over a restart.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePosixPath

MAX_COMPONENT_BYTES = 255
MAX_NAME_BYTES = 1024
RESERVED = ".dm05-"  # what our own files at the top of the tree start with
_SIDECAR = re.compile(r"/(?:\._|(?:\.DS_Store|Thumbs\.db|__MACOSX)(?:/|$))")


class BadName(ValueError):
    """Why a member is refused; the engine adds the member and its offset."""


def clean(raw: bytes) -> tuple[str, ...]:
    """The components of a member's name, without ``.`` and empty ones.

    Raises:
        BadName: the name could lead outside the tree or cannot be a file name everywhere.
    """
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise BadName(f"its name is not UTF-8: {raw[:80]!r}") from None
    if name.startswith("/"):
        raise BadName("its name is an absolute path")
    if len(raw) > MAX_NAME_BYTES:
        raise BadName(f"its name has {len(raw)} bytes, more than {MAX_NAME_BYTES}")
    if not name.isprintable() or "\\" in name:
        _check_letters(name)
    parts = name.split("/")
    if "" in parts or "." in parts:
        parts = [part for part in parts if part not in ("", ".")]
    if ".." in parts:
        raise BadName("its name climbs out with '..'")
    if len(raw) > MAX_COMPONENT_BYTES and any(len(part.encode()) > MAX_COMPONENT_BYTES for part in parts):
        raise BadName(f"a component of its name has more than {MAX_COMPONENT_BYTES} bytes")
    return tuple(parts)


def _check_letters(name: str) -> None:
    if "\\" in name:
        raise BadName("its name holds a backslash")
    for letter in name:
        if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            raise BadName(f"its name holds the control character U+{ord(letter):04X}")


def is_sidecar(path: str) -> bool:
    """True for what a Mac or Windows file browser adds to archives, and for all that lies in a folder of that name."""
    return bool(_SIDECAR.search(f"/{path}"))


class Names:
    """Everything written so far under one tree; about 100 bytes of memory a file.

    Of files only a 64-bit hash is kept: that two of a million different names have the same is a chance of 1 in 10^7.
    """

    def __init__(self) -> None:
        self._files: set[int] = set()
        self._folders: dict[str, str] = {}
        self._links: set[str] = set()
        self._last_parent = ""

    def add_file(self, path: str) -> None:
        """Register a file. ``path`` is relative to the tree.

        Raises:
            BadName: it is there already, in this or another spelling, or lies under a file or a link.
        """
        if path.startswith(RESERVED):
            raise BadName("its name is reserved for this tool")
        parent = path.rpartition("/")[0]
        if parent != self._last_parent:
            self.add_folder(parent)
            self._last_parent = parent
        key = _fold(path)
        digest = hash(key)
        if digest in self._files:
            raise BadName("a member of this name, or one that differs only by case or Unicode form, came before")
        if key in self._folders:
            raise BadName("a folder of this name came before")
        self._files.add(digest)

    def add_link(self, path: str) -> None:
        """Register a symbolic link, like a file."""
        self.add_file(path)
        self._links.add(path)

    def add_folder(self, path: str) -> None:
        """Register a folder and the folders above it; again is allowed, in the same spelling.

        Raises:
            BadName: another spelling of it, or a file or link, came before.
        """
        if path.startswith(RESERVED):
            raise BadName("its name is reserved for this tool")
        while path:
            key = _fold(path)
            known = self._folders.get(key)
            if known == path:
                return
            if known is not None:
                raise BadName(f"its folder differs from {known!r} only by case or Unicode form")
            if path in self._links:
                raise BadName(f"it lies behind the symbolic link {path!r}")
            if hash(key) in self._files:
                raise BadName(f"a file called {path!r} came before")
            self._folders[key] = path
            path = path.rpartition("/")[0]

    def is_link(self, path: str) -> bool:
        """True when ``path`` or a folder above it is a link."""
        return any(str(above) in self._links for above in (PurePosixPath(path), *PurePosixPath(path).parents))

    def has_folder(self, path: str) -> bool:
        """True when this folder is registered in this spelling."""
        return self._folders.get(_fold(path)) == path

    def has_file(self, path: str) -> bool:
        """True when exactly this file (or link) was written; a different spelling counts as the same."""
        return hash(_fold(path)) in self._files


def link_target(path: str, target: bytes) -> str:
    """Where a symbolic link at ``path`` leads, relative to the tree.

    Raises:
        BadName: out of the tree.
    """
    try:
        text = target.decode("utf-8")
    except UnicodeDecodeError:
        raise BadName("the target of this link is not UTF-8") from None
    steps = [step for step in text.split("/") if step not in ("", ".")]
    ups = next((count for count, step in enumerate(steps) if step != ".."), len(steps))
    above = path.split("/")[:-1]
    if not text or "\0" in text or text.startswith("/") or ups > len(above):
        raise BadName(f"a symbolic link out of the dataset's folder, to {text!r}")
    if ".." in steps[ups:]:  # behind another link, up is not the way that came down
        raise BadName(f"a symbolic link that goes down and up again, to {text!r}")
    return "/".join(above[: len(above) - ups] + steps[ups:])


def _fold(path: str) -> str:
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())
