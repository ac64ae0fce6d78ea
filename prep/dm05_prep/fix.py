"""Mending episode files without loss: the text of every frame stays as it is, only what lies between them changes.

The new file is written beside the old one and renamed over it.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import orjson
from dm05_schemas.episode_lines import BOM, blank_line, foreign_encoding, without_bom
from dm05_schemas.errors import DataError
from dm05_schemas.files import replace_file
from dm05_schemas.index import check_fresh, index_path, list_episodes, read_index
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace

from dm05_prep.index import build_index
from dm05_prep.parallel import batches, default_jobs, ordered_map

_BATCH_BYTES = 1 << 25
# Least amount of JSON that is worth starting processes for.
_PARALLEL_BYTES = 1 << 28


def fix_dataset(
    workspace: Workspace, spec: DatasetSpec, *, jobs: int | None = None, progress: bool = False
) -> list[str]:
    """Mend every episode file that can be mended, then the index; returns one line for each thing done.

    What cannot be read is left for the validation that follows to tell.
    """
    folder = spec.jsonl(workspace)
    try:
        files = {name: state for name, state in list_episodes(folder).items() if state.size > 0}
    except (DataError, OSError):
        return []
    total = sum(state.size for state in files.values())
    work = [[folder / name for name in names] for names in batches(files, lambda name: files[name].size, _BATCH_BYTES)]
    workers = (jobs or default_jobs()) if total >= _PARALLEL_BYTES else 1
    done: list[str] = []
    for lines in ordered_map(_fix_files, work, workers):
        done += lines
    return done + _fix_index(workspace, spec, jobs, progress)


def mend(data: bytes) -> tuple[bytes, Counter[str]]:
    """The mended bytes of an episode file and what was done, counted; unchanged bytes when there is nothing to do.

    Mends a byte order mark, UTF-16 and UTF-32, CR LF and lone CR line ends, blank lines, and a missing last newline.
    """
    done: Counter[str] = Counter()
    text = _as_utf8(data, done)
    frames: list[bytes] = []
    *lines, rest = text.split(b"\n")
    for line in lines:
        if line.endswith(b"\r"):
            done["CR LF made LF"] += 1
        frames += _frames_of(line.rstrip(b"\r"), done)
    if rest:
        last = _frames_of(rest, done)
        if last and not _is_object(last[-1]):
            return data, Counter()  # cut off in the middle of a frame: that is not ours to mend
        done["last newline added"] += bool(last)
        frames += last
    done = +done
    if not done or not frames:
        return data, Counter()
    return b"".join(frame + b"\n" for frame in frames), done


def _as_utf8(data: bytes, done: Counter[str]) -> bytes:
    encoding = foreign_encoding(data)
    if encoding:
        marked = data.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff"))
        name = encoding if marked else encoding + ("-LE" if data[:1] != b"\0" else "-BE")
        try:
            data = data.decode(name).encode()
        except UnicodeError:
            return data
        done[f"{encoding} made UTF-8"] += 1
    return data


def _frames_of(line: bytes, done: Counter[str]) -> list[bytes]:
    """The frames of one line: itself, none when it is blank, or several that carriage returns keep apart."""
    if line.startswith(BOM):
        done["byte order mark removed"] += 1
        line = without_bom(line)
        if not line:
            return []
    if b"\r" in line and all(_is_object(piece) for piece in line.split(b"\r") if not blank_line(piece)):
        pieces = line.split(b"\r")
        done["lone CR made LF"] += len(pieces) - 1
        return [piece for piece in pieces if not blank_line(piece)]
    done["blank lines removed"] += blank_line(line) is not None
    return [] if blank_line(line) else [line]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _fix_files(paths: list[Path]) -> list[str]:
    lines = []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError:
            continue
        new, done = mend(data)
        if done:
            replace_file(path, new)
            lines.append(f"{path}: {', '.join(f'{what} ({count})' for what, count in done.items())}")
    return lines


def _fix_index(workspace: Workspace, spec: DatasetSpec, jobs: int | None, progress: bool) -> list[str]:
    path = index_path(workspace, spec)
    try:
        reasons = check_fresh(read_index(path, workspace, spec))
    except DataError as error:
        reasons = [error.what]
    try:
        result = build_index(workspace, spec, jobs=jobs, progress=progress)
    except DataError:
        return []  # the validation that follows says why
    except OSError as error:
        if error.filename and Path(os.fsdecode(error.filename)).is_relative_to(spec.jsonl(workspace)):
            return []
        raise
    return [f"{path}: index written ({'; '.join(reasons) or 'its copy differed'})"] if result.computed else []
