"""A tar reader for streams that may be damaged: ustar, PAX and GNU long names, nothing taken on trust.

::

    header block (512) | data, padded to 512 | header block | ... | two zero blocks | zeros up to the record size

Every header's checksum is verified, every number must be a number, a member must fit in what is left of the archive,
and the archive must end with its end mark and then nothing but the padding of one record. Offsets count from the start
of the archive; messages give the part and the byte in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from dm05_prep.errors import PrepError
from dm05_prep.sniff import sniff
from dm05_prep.stream import ByteStream, EndOfStreamError

BLOCK = 512
END_MARK_BYTES = 2 * BLOCK
_ZERO = bytes(BLOCK)
_MAX_EXTENSION_BYTES = 1 << 20
_RECORD_BLOCKS = (1, 2, 4, 8, 10, 16, 20, 32, 40, 64, 126, 128, 256, 512, 1024, 2048)  # that writers use
_KINDS = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "character device",
    b"4": "block device",
    b"5": "folder",
    b"6": "FIFO",
    b"S": "sparse file",
}
_WITHOUT_DATA = ("hard link", "symbolic link", "character device", "block device", "folder", "FIFO")
AGAIN = "Download that part (and the one before it) again, then run the same command: it goes on from there"


class Member(NamedTuple):
    """One member: ``name`` and ``target`` as bytes of the archive, ``size`` of its data, ``offset`` of its header.

    ``kind`` is "file", "folder", "hard link", "symbolic link", or the words for something that is never written.
    """

    name: bytes
    kind: str
    size: int
    offset: int
    target: bytes = b""


class Located(Protocol):
    """Something with offsets that can be told to a person."""

    def where(self, offset: int) -> str:
        """The part and byte of an offset."""
        ...


class DamageError(PrepError):
    """The bytes are not those of an archive; ``offset`` tells where that shows."""

    offset: int


def read_members(stream: ByteStream) -> Iterator[Member]:
    """The members from the stream's offset on, which must be that of a header.

    The consumer may read up to ``member.size`` bytes from ``stream`` before it asks for the next member; what it leaves
    is skipped.

    Raises:
        DamageError: the archive is damaged or ends too early.
    """
    last_header = -1
    while True:
        start = stream.offset
        member = _next_member(stream, start, last_header)
        if member is None:
            return
        last_header = start
        data = stream.offset
        if stream.size is not None and data + member.size > stream.size:
            left = stream.size - start
            raise damage(stream, start, f"{show(member)} claims {member.size} bytes, {left} are left in the archive")
        yield member
        try:
            stream.skip(data + member.size + -member.size % BLOCK - stream.offset)
        except EndOfStreamError:
            raise damage(stream, start, f"the archive ends inside {show(member)}") from None


def show(member: Member) -> str:
    """A member's name for messages."""
    name = member.name.decode("utf-8", "backslashreplace")
    return repr(name if len(name) <= 200 else name[:200] + "...")


def damage(stream: Located, offset: int, what: str, fix: str = AGAIN) -> DamageError:
    """The error for something wrong at ``offset``."""
    error = DamageError(what, where=stream.where(offset), fix=fix)
    error.offset = offset
    return error


def _next_member(stream: ByteStream, start: int, last_header: int) -> Member | None:
    """The member whose (first) header is next; None after the end mark."""
    pax: dict[str, bytes] = {}
    offset = start
    while True:
        header = stream.take(BLOCK)
        if header == _ZERO:
            _check_end(stream, offset)
            return None
        _check_header(stream, header, offset, last_header)
        flag = header[156:157]
        if flag not in (b"L", b"K", b"x", b"g"):
            break
        extension = _extension(stream, header, offset)
        if flag == b"L":
            pax.setdefault("path", extension.rstrip(b"\0"))
        elif flag == b"K":
            pax.setdefault("linkpath", extension.rstrip(b"\0"))
        else:
            records = _pax_records(stream, extension, offset)
            if flag == b"x":
                pax |= records
            elif not records.keys().isdisjoint({"path", "linkpath", "size"}):
                raise damage(
                    stream, offset, "a global header that renames members is not supported", "Repack the archive"
                )
        offset = stream.offset
    member = _member(stream, header, start, offset)
    if flag == b"S":
        _skip_sparse_map(stream, header, offset)
    return _with_pax(stream, member, pax, offset) if pax else member


def _member(stream: ByteStream, header: bytes, start: int, offset: int) -> Member:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    flag = header[156:157]
    kind = _KINDS.get(flag) or f"member of unknown type {flag!r}"
    if kind == "file" and name.endswith(b"/"):
        kind = "folder"
    size = 0 if kind in _WITHOUT_DATA else _number(stream, header[124:136], offset, "size")
    return Member(name, kind, size, start, header[157:257].partition(b"\0")[0])


def _check_header(stream: ByteStream, header: bytes, offset: int, last_header: int) -> None:
    if not header:
        raise damage(
            stream, offset, "the archive ends without its end mark", f"It is cut short or a part is missing. {AGAIN}"
        )
    if len(header) < BLOCK:
        raise damage(stream, offset, "the archive ends inside a header", f"It is cut short. {AGAIN}")
    written = header[148:156].strip(b" \0")
    try:
        expected = int(written, 8)
    except ValueError:
        expected = -1
    if expected == _checksum(header) or expected == _signed_checksum(header):
        return
    if last_header < 0:
        what = sniff(header) or "no tar archive starts here (the first part is missing, or this is something else)"
        raise damage(stream, offset, what)
    part, before = stream.part_at(offset), stream.part_at(last_header)
    if part != before:
        raise damage(
            stream, offset, f"does not continue {before}: one of the two is damaged, swapped or from another archive"
        )
    raise damage(stream, offset, "no member starts where one must: the part is damaged at or before this byte")


def _checksum(header: bytes) -> int:
    """The sum of all bytes, the checksum's own eight counted as spaces."""
    # Adler-32 starts with the sum of all bytes modulo 65521, and 512 bytes below 128 cannot reach that.
    total = (zlib.adler32(header) & 0xFFFF) - 1 if header.isascii() else sum(header)
    return total - sum(header[148:156]) + 8 * 32


def _signed_checksum(header: bytes) -> int:
    """As some old writers computed it."""
    return _checksum(header) - 256 * sum(byte > 127 for byte in header)


def _number(stream: ByteStream, field: bytes, offset: int, what: str) -> int:
    """Octal digits, or GNU's base 256."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.strip(b" \0") or b"0"
    if text.isdigit() and b"8" not in text and b"9" not in text:
        return int(text, 8)
    raise damage(stream, offset, f"the {what} in this header is no number: {field!r}")


def _extension(stream: ByteStream, header: bytes, offset: int) -> bytes:
    """The data of an extension header (long name or PAX records)."""
    size = _number(stream, header[124:136], offset, "size")
    if size > _MAX_EXTENSION_BYTES:
        raise damage(stream, offset, f"an extension header of {size} bytes")
    data = stream.take(size + -size % BLOCK)
    if len(data) < size:
        raise damage(stream, offset, "the archive ends inside an extension header", f"It is cut short. {AGAIN}")
    return data[:size]


def _pax_records(stream: ByteStream, data: bytes, offset: int) -> dict[str, bytes]:
    """``b"21 path=some/name\\n..."`` -> {"path": b"some/name"}."""
    records: dict[str, bytes] = {}
    position = 0
    while position < len(data) and data[position]:
        digits = data[position : position + 20].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = data[position : position + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or len(record) < length or record[-1:] != b"\n":
            raise damage(stream, offset, "a PAX header is damaged")
        records[key.decode("utf-8", "replace")] = value
        position += length
    return records


def _with_pax(stream: ByteStream, member: Member, pax: dict[str, bytes], offset: int) -> Member:
    name, kind, size = pax.get("path", member.name), member.kind, member.size
    if any(key.startswith("GNU.sparse.") for key in pax):
        name, kind = pax.get("GNU.sparse.name", name), "sparse file"
    if "size" in pax and kind not in _WITHOUT_DATA:
        if not pax["size"].isdigit() or len(pax["size"]) > 20:
            raise damage(stream, offset, f"the size in this PAX header is no number: {pax['size'][:30]!r}")
        size = int(pax["size"])
    if kind == "file" and name.endswith(b"/"):
        kind = "folder" if not size else kind
    return member._replace(name=name, kind=kind, size=size, target=pax.get("linkpath", member.target))


def _skip_sparse_map(stream: ByteStream, header: bytes, offset: int) -> None:
    """Old GNU sparse files have more of their map in blocks between header and data."""
    more = header[482]
    while more:
        block = stream.take(BLOCK)
        if len(block) < BLOCK:
            raise damage(stream, offset, "the archive ends inside a header", f"It is cut short. {AGAIN}")
        more = block[504]


def _check_end(stream: ByteStream, start: int) -> None:
    """After the first zero block, at ``start``: a second one, then zeros up to the end of the record, no more."""
    if len(stream.take(BLOCK).strip(b"\0")) or stream.offset != start + END_MARK_BYTES:
        if stream.size is not None and stream.offset == stream.size:
            raise damage(stream, start, "the archive ends inside its end mark", f"It is cut short. {AGAIN}")
        raise damage(stream, start, "zeros where a member must start")
    while data := stream.take(1 << 20):
        if data.count(0) != len(data):
            at = stream.offset - len(data.lstrip(b"\0"))
            raise damage(stream, start, f"zeros where a member must start; the archive goes on at {stream.where(at)}")
    end = stream.offset
    records = (blocks * BLOCK for blocks in _RECORD_BLOCKS)
    least = start + END_MARK_BYTES
    if end > least + 20 * BLOCK and all(-(-least // record) * record != end for record in records):
        raise damage(
            stream, start, f"{end - start} zero bytes at the end: more than an end mark, so members are missing"
        )
