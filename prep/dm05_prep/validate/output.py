"""A report of a validation for people, for programs and for GitHub."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

import orjson
from dm05_schemas.files import replace_file
from dm05_schemas.findings import KINDS, Finding
from dm05_schemas.report import Report

from dm05_prep.console import human_time

FIRST_PLACES = 3
# GitHub shows ten annotations of a kind and a step.
FIRST_ANNOTATIONS = 10


def human(report: Report, everything: bool = False) -> str:
    """The table: one line a kind with its count, first finding and next places; with ``everything`` every finding."""
    lines = [_headline(report)]
    groups = report.groups()
    width = max(map(len, groups), default=0)
    for kind, items in groups.items():
        head = f"{KINDS[kind].severity:<8} {kind:<{width}} {len(items):>7,}  "
        if everything:
            lines.append(f"{head}{KINDS[kind].title}")
            lines += [f"         {_line(report, item)}" for item in items]
        else:
            lines.append(f"{head}{_line(report, items[0])}{_more(items)}")
    mends: dict[str, list[str]] = {}
    for kind in groups:
        mends.setdefault(report.fix(kind) or "", []).append(kind)
    lines += [f"mend     {', '.join(kinds)}: {fix}" for fix, kinds in mends.items() if fix]
    lines.append(_verdict(report))
    return "\n".join(_printable(line) for line in lines)


def github(report: Report, everything: bool = False) -> str:
    """Workflow commands that GitHub shows beside the files, the first ten of a kind, and the table's last line."""
    lines = []
    for kind, items in report.groups().items():
        fix = report.fix(kind)
        for item in items if everything else items[:FIRST_ANNOTATIONS]:
            text = f"{item.detail}. {fix}" if fix else item.detail
            place = {"file": _below_here(item.path), "line": item.line, "title": kind}
            fields = ",".join(f"{key}={_escape(str(value), ':,')}" for key, value in place.items() if value is not None)
            lines.append(f"::{item.severity} {fields}::{_escape(text)}")
        if not everything and len(items) > FIRST_ANNOTATIONS:
            lines.append(f"::notice title={kind}::{len(items) - FIRST_ANNOTATIONS:,} more of this kind")
    return "\n".join([*lines, _verdict(report)])


def size_of(report: Report) -> str:
    """``2 episodes, 7 frames``; what nothing tells is not said to be 0."""
    counts = ((report.episodes, "episodes"), (report.frames, "frames"))
    return ", ".join(f"{what} not counted" if count is None else f"{count:,} {what}" for count, what in counts)


def write_json(report: Report, path: Path | None) -> None:
    """The report as JSON, to ``path`` or to stdout."""
    data = orjson.dumps(report.document(), option=orjson.OPT_INDENT_2) + b"\n"
    if path is not None:
        replace_file(path, data)
    else:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _headline(report: Report) -> str:
    depth = f"deep, {report.images:,} images" if report.deep else "fast"
    return f"validate {report.dataset}: {size_of(report)} ({depth}) in {human_time(report.seconds)}"


def _verdict(report: Report) -> str:
    if not report.findings:
        return f"good     {report.dataset} is as the contract says"
    parts = [
        f"{count:,} {word}{'s' if count != 1 else ''}"
        for count, word in ((report.errors, "error"), (report.warnings, "warning"))
        if count
    ]
    return f"{'bad' if report.errors else 'good':<8} {report.dataset} has {' and '.join(parts)}"


def _line(report: Report, item: Finding) -> str:
    line = "" if item.line is None else f":{item.line}"
    return f"{report.relative(item.path)}{line}: {item.detail}"


def _more(items: list[Finding]) -> str:
    """The places after the first, short: the file's name, or the line alone when the file is the same."""
    distinct = list({item.place: item for item in items}.values())
    places = []
    for before, item in pairwise(distinct[:FIRST_PLACES]):
        line = "" if item.line is None else f":{item.line}"
        places.append(line if item.path == before.path else f"{os.path.basename(item.path)}{line}")
    rest = len(distinct) - FIRST_PLACES
    return f" (also {', '.join(places)}{f', {rest:,} more' if rest > 0 else ''})" if places else ""


def _below_here(path: str) -> str:
    """GitHub finds files by their path below the checkout, where the command runs."""
    here = os.getcwd() + os.sep
    return path.removeprefix(here)


def _escape(text: str, more: str = "") -> str:
    for char in "%\r\n" + more:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def _printable(line: str) -> str:
    """A line without characters that would end it or move the cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
