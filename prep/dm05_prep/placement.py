"""Which members belong to the wanted dataset, and where below its folder they go."""

from __future__ import annotations

import re

from dm05_prep.names import BadName, clean
from dm05_prep.untar import Member

_MAX_SEEN = 20
_PLAIN = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class Placement:
    """Decides by name alone.

    Args:
        inside: the dataset's folder in the archive, such as ``("libero", "libero_pi0_all")``. An archive of this
            dataset alone may also start at its last component.
    """

    def __init__(self, inside: tuple[str, ...]) -> None:
        self._prefixes = [inside] if len(inside) == 1 else [inside, inside[-1:]]
        self._folded = [tuple(part.casefold() for part in prefix) for prefix in self._prefixes]
        self._last_raw, self._last_folder = b"/", ""
        self.seen: dict[str, None] = {}

    def path_of(self, member: Member) -> str | None:
        """The member's path below the dataset's folder, "" for the folder itself, None when it is not of the dataset.

        Raises:
            BadName: the name leads out of the tree (in any member), or is not fit to be written (in a wanted one).
        """
        folder, _, name = member.name.rpartition(b"/")
        if folder == self._last_raw and _PLAIN.fullmatch(name):  # most members: the next file of the same folder
            return f"{self._last_folder}/{name.decode()}"
        try:
            parts = clean(member.name)
        except BadName:
            if member.name.startswith(b"/") or b".." in member.name.split(b"/") or self._is_wanted(member.name):
                raise
            return None
        for prefix in self._prefixes:
            if parts[: len(prefix)] == prefix:
                if len(parts) > len(prefix) + 1 and name == parts[-1].encode():
                    self._last_raw, self._last_folder = folder, "/".join(parts[len(prefix) : -1])
                return "/".join(parts[len(prefix) :])
        self._refuse_other_spelling(parts)
        if parts and len(self.seen) < _MAX_SEEN:
            self.seen["/".join(parts[: len(self._prefixes[0])])] = None
        return None

    def subset_of(self, path: bytes) -> str | None:
        """The path, below the dataset's folder, of a hard link's target; None when it lies outside."""
        parts = clean(path)
        for prefix in self._prefixes:
            if parts[: len(prefix)] == prefix:
                return "/".join(parts[len(prefix) :])
        return None

    def _is_wanted(self, raw: bytes) -> bool:
        parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
        return any(parts[: len(prefix)] == [part.encode() for part in prefix] for prefix in self._prefixes)

    def _refuse_other_spelling(self, parts: tuple[str, ...]) -> None:
        for prefix, folded in zip(self._prefixes, self._folded, strict=True):
            if tuple(part.casefold() for part in parts[: len(prefix)]) == folded:
                raise BadName(f"its folder differs from {'/'.join(prefix)!r} only by case")
