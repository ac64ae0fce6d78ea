"""Names and sizes of the parts of an archive: which files belong together, in which order, and whether any is missing.

::

    libero.tar.part-000  -001 ...      numbers, padded or not, from 0 or 1
    libero.tar.part-aa   -ab  ...      letters, as ``split`` writes them (``zz`` or, growing, ``yz zaaa``)
    libero.tar.00  libero.tar.aa       the same without the word "part"
    libero.tar                         one whole archive; likewise .tar.gz .tgz .tar.zst .zip

All parts but the last have the same size, the last is not larger. Every other file that carries the archive's name is
a leftover of some download, and an error: which of two files is right cannot be guessed.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dm05_prep.errors import PrepError
from dm05_prep.sources.base import RemoteFile

_Family = tuple[str, bool]  # what stands before the index, and whether the index is a number
ArchiveKind = Literal["tar", "tar.gz", "tar.zst", "zip"]

_KINDS: dict[str, ArchiveKind] = {
    ".tar": "tar",
    ".tar.gz": "tar.gz",
    ".tgz": "tar.gz",
    ".tar.zst": "tar.zst",
    ".tar.zstd": "tar.zst",
    ".tzst": "tar.zst",
    ".zip": "zip",
}
_NAME = re.compile(r"(?P<stem>.*?)(?P<ending>\.(?:tar\.gz|tar\.zstd|tar\.zst|tgz|tzst|tar|zip))(?P<rest>(?![a-z]).*)")
_PART = re.compile(r"(?P<lead>[._-]part[._-]?|[._-])(?P<index>[0-9]+|[a-z]+)")
_BESIDE = re.compile(r".*\.(?:sha256(?:sums?)?|sha1|md5(?:sums?)?|crc32|asc|sig|json|txt|md|metadata)")
_OTHER_COMPRESSION = re.compile(r"\.(?:xz|bz2|lzma|lz4|lz|Z|br)(?:[._-].*)?")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part; ``start`` and ``end`` are offsets in the whole archive."""

    file: RemoteFile
    start: int

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def end(self) -> int:
        return self.start + self.file.size


@dataclass(frozen=True)
class PartSet:
    """The parts of one archive in order; ``archive`` is the name they share, such as ``libero.tar``."""

    archive: str
    kind: ArchiveKind
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole archive."""
        return self.parts[-1].end

    @property
    def largest(self) -> int:
        """Bytes of the largest part."""
        return max(part.file.size for part in self.parts)

    @property
    def stem(self) -> str:
        """The archive's name without folder and endings."""
        return _stem(self.archive)

    @cached_property
    def _starts(self) -> list[int]:
        return [part.start for part in self.parts]

    def index_at(self, offset: int) -> int:
        """Index of the part that holds the byte at ``offset``; the last one for the end of the archive."""
        return max(0, bisect.bisect_right(self._starts, offset) - 1)

    def where(self, offset: int) -> str:
        """``libero.tar.part-003: byte 512`` for an offset in the archive."""
        part = self.parts[self.index_at(offset)]
        return f"{part.name}: byte {offset - part.start}"


def order_parts(files: Iterable[RemoteFile], *, prefer: Iterable[str] = (), place: str = "") -> PartSet:
    """Find the one archive among ``files`` and put its parts in order.

    Args:
        files: all files of the source; those that belong to no archive are passed over.
        prefer: names, with or without ending, to choose by when there are several archives, best first.
        place: name of the source for messages.

    Raises:
        PrepError: no archive, several of which none is preferred, a gap, a duplicate, a leftover or an odd size.
    """
    groups: dict[str, list[RemoteFile]] = defaultdict(list)
    seen = list(files)
    for file in seen:
        if file.name.startswith("/") or ".." in file.name.split("/"):
            raise PrepError(f"a file name that leads out of the source: {file.name!r}", where=place)
        match = _NAME.fullmatch(file.name)
        if match:
            groups[match["stem"] + match["ending"]].append(file)
    groups = {name: group for name, group in groups.items() if not all(_BESIDE.fullmatch(file.name) for file in group)}
    archive = _choose(groups, list(prefer), place, len(seen))
    return _assemble(archive, groups[archive], place)


def _choose(groups: dict[str, list[RemoteFile]], prefer: list[str], place: str, count: int) -> str:
    if not groups:
        held = "the folder is empty" if not count else f"none of its {count} files is one"
        raise PrepError(f"no archive or parts here: {held}", where=place, fix="Expected NAME.tar.part-000 and so on")
    if len(groups) == 1:
        return next(iter(groups))
    for stem in prefer:
        named = [archive for archive in groups if stem in (archive, _stem(archive))]
        if len(named) == 1:
            return named[0]
    raise PrepError(
        f"several archives here: {', '.join(sorted(groups))}", where=place, fix="Say which with --archive NAME"
    )


def _stem(archive: str) -> str:
    return _match(archive.rpartition("/")[2])["stem"]


def _match(archive: str) -> re.Match[str]:
    match = _NAME.fullmatch(archive)
    if not match:
        raise ValueError(f"{archive} is not the name of an archive")
    return match


def _assemble(archive: str, files: list[RemoteFile], place: str) -> PartSet:
    ending = _match(archive)["ending"]
    whole, main, members = _sort_out(archive, files, place)
    if not whole and main is None:
        raise PrepError(f"no parts of {archive} here", where=place, fix="Expected NAME.tar.part-000 and so on")
    ordered = whole if main is None else _in_order(members, archive + main[0], place)
    _check_sizes(ordered)
    parts, start = [], 0
    for file in ordered:
        parts.append(Part(file=file, start=start))
        start += file.size
    return PartSet(archive, _KINDS[ending], tuple(parts))


def _sort_out(
    archive: str, files: list[RemoteFile], place: str
) -> tuple[list[RemoteFile], _Family | None, list[tuple[str, RemoteFile]]]:
    """The whole archive, if there is one, and the family of parts with the index text of each."""
    families: dict[_Family, list[tuple[str, RemoteFile]]] = defaultdict(list)
    whole: list[RemoteFile] = []
    leftovers: list[RemoteFile] = []
    for file in files:
        rest = file.name[len(archive) :]
        part = _PART.fullmatch(rest)
        if not rest:
            whole.append(file)
        elif part:
            families[part["lead"], part["index"].isdigit()].append((part["index"], file))
        else:
            leftovers.append(file)
    main = max(families, key=lambda family: len(families[family]), default=None)
    for family, members in families.items():
        if family != main or (whole and len(members) == 1) or not _plausible(family, members):
            leftovers += [file for _, file in members]
            if family == main:
                main = None
    leftovers = [file for file in leftovers if not _BESIDE.fullmatch(file.name)]
    if leftovers and not whole and all(_OTHER_COMPRESSION.fullmatch(file.name[len(archive) :]) for file in leftovers):
        raise PrepError(
            "this compression is not supported", where=leftovers[0].name, fix="Repack it as .tar or .tar.zst"
        )
    if leftovers:
        names = ", ".join(sorted(file.name for file in leftovers)[:3])
        raise PrepError(
            f"left over from a download beside the parts of {archive}: {names}",
            where=place,
            fix="Finish that download or delete the leftover, then run again",
        )
    if whole and main:
        raise PrepError(f"both {archive} and parts of it are here", where=place, fix="Move one of the two away")
    return whole, main, families[main] if main else []


def _plausible(family: _Family, members: list[tuple[str, RemoteFile]]) -> bool:
    """Letters count as an index when the word "part" leads or when the first one, ``aa``, is there."""
    lead, digits = family
    return digits or "part" in lead or any(set(text) == {"a"} for text, _ in members)


def _in_order(members: list[tuple[str, RemoteFile]], lead: str, place: str) -> list[RemoteFile]:
    """The files by index; every index from the first to the last must be there once."""
    texts = [text for text, _ in members]
    by_index: dict[int, RemoteFile] = {}
    numbering = _numbering(texts)
    for text, file in sorted(members, key=lambda member: member[1].name):
        index = numbering[text]
        if index in by_index:
            raise PrepError(f"the same part twice: {by_index[index].name}", where=file.name, fix="Delete one of them")
        by_index[index] = file
    odd = [file.name for index, file in by_index.items() if index < 0]
    if odd:
        raise PrepError("its ending does not fit those of the other parts", where=min(odd), fix="Rename or delete it")
    digits, width = texts[0].isdigit(), min(map(len, texts))
    first = 1 if digits and 0 not in by_index else 0
    count = max(by_index) - first + 1 - len(by_index)
    if count:
        absent = (index for index in itertools.count(first) if index not in by_index)
        names = ", ".join(lead + _text(index, width, digits) for index in itertools.islice(absent, min(count, 3)))
        more = f" and {count - 3} more" if count > 3 else ""
        raise PrepError(
            f"missing: {names}{more} ({len(by_index)} parts are here)", where=place, fix="Download it and run again"
        )
    return [by_index[index] for index in sorted(by_index)]


def _numbering(texts: list[str]) -> dict[str, int]:
    """text -> index, for padded, unpadded and growing (``yz zaaa``, ``89 9000``) suffixes."""
    width = min(map(len, texts))
    alphabet = "0123456789" if texts[0].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    plain = {text: _value(text, alphabet) for text in texts}
    if all(len(text) == width for text in texts):
        return plain
    grown = {text: _grown(text, width, alphabet) for text in texts}
    if not alphabet[0].isdigit():
        return grown
    return grown if sorted(grown.values()) == list(range(len(texts))) else plain


def _value(text: str, alphabet: str) -> int:
    value = 0
    for letter in text:
        value = value * len(alphabet) + alphabet.index(letter)
    return value


def _grown(text: str, width: int, alphabet: str) -> int:
    """Index of a suffix of ``split`` whose width grows by two each time its first letter runs out."""
    base, last = len(alphabet), alphabet[-1]
    steps = (len(text) - width) // 2
    body = text[steps:]
    if text[:steps] != last * steps or body[0] == last or len(text) != width + 2 * steps:
        return -1 - _value(text, alphabet)  # no such suffix: keeps the set from being complete
    before = 0
    for step in range(steps):
        before += (base - 1) * int(base ** (width + step - 1))
    return before + _value(body, alphabet)


def _text(index: int, width: int, digits: bool) -> str:
    if digits:
        return str(index).zfill(width)
    letters = ""
    for _ in range(width):
        index, rest = divmod(index, 26)
        letters = chr(ord("a") + rest) + letters
    return letters


def _check_sizes(files: list[RemoteFile]) -> None:
    again = "Download it again and run the command once more"
    for file in files:
        if not file.size:
            raise PrepError("an empty file in place of a part", where=file.name, fix=again)
    if len(files) == 1:
        return
    usual, _ = Counter(file.size for file in files[:-1]).most_common(1)[0]
    for file in files[:-1]:
        if file.size != usual:
            raise PrepError(f"{file.size} bytes, where its neighbours have {usual}", where=file.name, fix=again)
    if files[-1].size > usual:
        raise PrepError(
            f"{files[-1].size} bytes, more than the {usual} of the parts before it", where=files[-1].name, fix=again
        )
