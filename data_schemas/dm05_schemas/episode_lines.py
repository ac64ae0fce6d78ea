"""The lines of an episode file: their ends, what is no line of JSON, and what is wrong with a single one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dm05_schemas import strict_json
from dm05_schemas.findings import Finding, finding
from dm05_schemas.frame import check_frame
from dm05_schemas.registry import DatasetSpec

HUGE_LINE = 1 << 20
BOM = b"\xef\xbb\xbf"
_BLANK = " \t\r\n\v\f\0\u200b\u2060\ufeff"


def split_lines(path: Path, data: bytes) -> tuple[list[bytes], list[Finding]]:
    """The lines without their ends, and what is to be said about the ends."""
    found = []
    *lines, rest = data.split(b"\n")
    if b"\r" in data:
        ends = [number for number, line in enumerate(lines, 1) if line.endswith(b"\r")]
        lines = [line.removesuffix(b"\r") for line in lines]
        if ends:
            found.append(finding("crlf", path, ends[0], f"{len(ends)} of {len(lines)} lines end in CR LF"))
    if rest:
        lines.append(rest)
        if not blank_line(rest):
            found.append(finding("no-final-newline", path, len(lines), "no newline at the end of the file"))
    return lines, found


def parse_line(line: bytes, spec: DatasetSpec) -> tuple[object, Iterable[tuple[str, str]]]:
    """The value of one line without its line end, None when it has none, and (kind, detail) of all that is wrong."""
    blank = blank_line(line)
    if blank:
        return None, [("blank-line", blank)]
    problems: list[tuple[str, str]] = []
    if line.startswith(BOM):
        problems.append(("bom", "starts with a byte order mark"))
        line = without_bom(line)
    if len(line) > HUGE_LINE:
        problems.append(("huge-line", f"line of {len(line) / 2**20:.1f} MiB"))
    if b"\r" in line:
        problems.append(("lone-cr", "carriage return without line feed"))
    try:
        frame = strict_json.parse(line)
    except strict_json.JsonProblem as problem:
        return None, problems if b"\r" in line else [*problems, (problem.kind, problem.detail)]
    return frame, [*problems, *check_frame(frame, spec)]


def too_few_frames(path: Path | str, frames: int) -> list[Finding]:
    """The finding about an episode of no frames or one."""
    if frames == 0:
        return [finding("empty-episode", path, None, "has no frames")]
    if frames == 1:
        return [finding("one-frame", path, None, "has 1 frame where at least 2 are due")]
    return []


def blank_line(line: bytes) -> str | None:
    """What to say of a line that is blank or looks blank, None for any other."""
    if not line:
        return "blank line"
    if line[:1] == b"{" or line.decode("utf-8", "replace").strip().strip(_BLANK):
        return None
    return "line of white space only"


def without_bom(line: bytes) -> bytes:
    """The line without the byte order marks it starts with; files that were joined have them inside too."""
    while line.startswith(BOM):
        line = line[len(BOM) :]
    return line


def foreign_encoding(data: bytes) -> str | None:
    """``UTF-16`` or ``UTF-32`` when the bytes are text in it, with or without a byte order mark."""
    if data.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")) or data[:8].count(0) == 6:
        return "UTF-32"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or (len(data) >= 4 and data[:4].count(0) == 2):
        return "UTF-16"
    return None
