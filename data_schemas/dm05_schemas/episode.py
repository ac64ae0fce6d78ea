"""One episode file: the only definition of what is acceptable, for validation and for every reader.

::

    jsonl/<episode>.jsonl    UTF-8, one frame (see :mod:`dm05_schemas.frame`) a line, no blank lines, 2 lines or more

:func:`scan_episode` parses a file in which all is well at the speed of orjson; only when a cheap check finds something
odd does it go through the lines one by one to name each problem with its line.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from dm05_schemas import strict_json
from dm05_schemas.episode_lines import HUGE_LINE, foreign_encoding, parse_line, split_lines, too_few_frames
from dm05_schemas.findings import Finding, finding
from dm05_schemas.frame import LARGEST, UrlProblem, clean_url, prompt_problems
from dm05_schemas.registry import DatasetSpec

__all__ = ["Episode", "Finding", "read_episode", "scan_episode"]

_VIEW_TYPES = frozenset({"image", "video"})
# Keys whose values hold no colons once they are known to be acceptable, or whose colons are counted apart.
_VIEW_KEYS = frozenset({"type", "frame_idx"})
_FRAME_KEYS = frozenset({"state", "action", "prompt", "is_robot"})


@dataclass(frozen=True, kw_only=True)
class Episode:
    """The frames of one episode. Letters: n frames, S state dims, A action dims, V cameras.

    state float32 [n, S]; action float32 [n, A] or None; prompts: each text once; prompt_ids int32 [n] into them;
    urls [n][V] relative to the image folder, checked to stay inside; frame_idx int32 [n, V], -1 for an image;
    is_robot bool [n].
    """

    path: Path
    state: NDArray[np.float32]
    action: NDArray[np.float32] | None
    prompts: list[str]
    prompt_ids: NDArray[np.int32]
    urls: list[list[str]]
    frame_idx: NDArray[np.int32]
    is_robot: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.state)

    @property
    def targets(self) -> NDArray[np.float32]:
        """[n, A] what action chunks are cut from: the actions, or the states when there are none."""
        return self.state if self.action is None else self.action


class _Odd(Exception):
    """Something that the fast way does not judge."""


def read_episode(path: Path, spec: DatasetSpec) -> Episode:
    """The episode in ``path``.

    Raises:
        DataError: the first thing that makes it unacceptable, with file and line.
    """
    episode, findings = scan_episode(path, spec)
    for found in findings:
        if found.severity == "error":
            raise found.error()
    assert episode is not None
    return episode


def scan_episode(path: Path, spec: DatasetSpec, *, data: bytes | None = None) -> tuple[Episode | None, list[Finding]]:
    """The episode, or None when a finding is an error, and everything found, in the order of lines.

    Args:
        path: the file; names it in findings, and is read when ``data`` is None.
        spec: says which cameras and how many dims are due.
        data: the file's bytes, if they are at hand.
    """
    if data is None:
        try:
            data = path.read_bytes()
        except OSError as error:
            return None, [finding("unreadable", path, None, f"cannot be read: {error.strerror or error}")]
    try:
        return _fast(path, data, spec)
    except _Odd:
        pass
    frames, findings = _careful(path, data, spec)
    if any(found.severity == "error" for found in findings):
        return None, findings
    return _assemble(path, frames, spec), findings


def _fast(path: Path, data: bytes, spec: DatasetSpec) -> tuple[Episode, list[Finding]]:
    """The episode of a file without errors, and the warnings that concern line ends and prompts."""
    lines, findings = split_lines(path, data)
    if len(lines) < 2 or data.count(b"\r") != data.count(b"\r\n"):
        raise _Odd
    if len(data) > HUGE_LINE and max(map(len, lines)) > HUGE_LINE:
        raise _Odd
    try:
        frames = list(map(orjson.loads, lines))
    except orjson.JSONDecodeError:
        raise _Odd from None
    if set(map(type, frames)) != {dict}:
        raise _Odd
    episode = _assemble(path, frames, spec, data)
    for number, prompt in enumerate(episode.prompts):
        problems = prompt_problems(prompt)
        rows = np.flatnonzero(episode.prompt_ids == number).tolist() if problems else []
        findings += [finding(kind, path, row + 1, detail) for row in rows for kind, detail in problems]
    return episode, sorted(findings, key=lambda item: item.line or 0)


def _assemble(path: Path, frames: list[dict[str, Any]], spec: DatasetSpec, data: bytes | None = None) -> Episode:
    """Arrays of acceptable frames; _Odd when :func:`check_frame` would have something to say.

    ``data`` is the file's text, in which no key may stand twice; None when the lines were looked at one by one.
    """
    try:
        has_action = {"action" in frame for frame in frames}
        if len(has_action) != 1 or (has_action == {False} and spec.action_dim != spec.state_dim):
            raise _Odd
        prompts: dict[str, int] = {}
        prompt_ids = np.array([prompts.setdefault(frame["prompt"], len(prompts)) for frame in frames], dtype=np.int32)
        is_robot = [frame.get("is_robot", True) for frame in frames]
        if set(map(type, prompts)) != {str} or set(map(type, is_robot)) != {bool}:
            raise _Odd
        entries = {key: [frame[key] for frame in frames] for key in spec.image_keys}
        views = [_view(column) for column in entries.values()]
        if data is not None:
            expected = sum(_colons_of(column, _VIEW_KEYS) for column in entries.values())
            expected += _colons_of(frames, _FRAME_KEYS.union(entries))
            expected += int(np.array([prompt.count(":") for prompt in prompts])[prompt_ids].sum())
            if not strict_json.has_no_doubles(data, data.count(b":"), expected):
                raise _Odd
        return Episode(
            path=path,
            state=_matrix([frame["state"] for frame in frames], spec.state_dim),
            action=_matrix([frame["action"] for frame in frames], spec.action_dim) if has_action == {True} else None,
            prompts=list(prompts),
            prompt_ids=prompt_ids,
            urls=[list(urls) for urls in zip(*(urls for urls, _ in views), strict=True)],
            frame_idx=np.array([index for _, index in views], dtype=np.int32).T.copy(),
            is_robot=np.array(is_robot, dtype=np.bool_),
        )
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise _Odd from None


def _colons_of(objects: list[dict[str, Any]], plain: frozenset[str]) -> int:
    """Colons in the text of objects without doubled keys, those inside the values of ``plain`` keys left out."""
    total = sum(map(len, objects))
    for key in set(chain.from_iterable(objects)) - plain:
        held = [item[key] for item in objects if key in item]
        total += key.count(":") * len(held) + sum(map(strict_json.count_colons, held))
    return total


def _matrix(vectors: list[Any], dims: int) -> NDArray[np.float32]:
    """Lists of finite numbers as float32 [n, dims]."""
    if set(map(type, vectors)) != {list} or set(map(len, vectors)) != {dims}:
        raise _Odd
    if not set(map(type, chain.from_iterable(vectors))) <= {float, int}:
        raise _Odd
    values = np.fromiter(chain.from_iterable(vectors), dtype=np.float64, count=len(vectors) * dims)
    if not np.abs(values).max() <= LARGEST:
        raise _Odd
    return values.astype(np.float32).reshape(-1, dims)


def _view(entries: list[Any]) -> tuple[list[str], list[int]]:
    """Checked urls and frame numbers (-1 for images) of one camera."""
    kinds = {entry["type"] for entry in entries}
    raw = [entry["url"] for entry in entries]
    if not kinds <= _VIEW_TYPES or set(map(type, entries)) != {dict} or set(map(type, raw)) != {str}:
        raise _Odd
    index = [-1] * len(entries)
    if "video" in kinds:
        index = [entry["frame_idx"] if entry["type"] == "video" else -1 for entry in entries]
        if set(map(type, index)) != {int} or not -1 <= min(index) <= max(index) < 2**31:
            raise _Odd
        if any(number < 0 and entry["type"] == "video" for number, entry in zip(index, entries, strict=True)):
            raise _Odd
    return _clean_urls(raw), index


def _clean_urls(raw: list[str]) -> list[str]:
    urls = [url[2:] if url.startswith("./") else url for url in raw]
    text = "\n".join(["", *urls, ""])
    if not any(mark in text for mark in ("/.", "\n.", "//", "\n/", "/\n", "\n\n", "\0", ":", "\\")):
        return urls
    try:
        return [clean_url(url) for url in raw]
    except UrlProblem:
        raise _Odd from None


def _careful(path: Path, data: bytes, spec: DatasetSpec) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Every frame that can be parsed and everything that is wrong, line by line."""
    encoding = foreign_encoding(data)
    if encoding:
        return [], [finding("utf16", path, None, f"is {encoding}, not UTF-8")]
    lines, found = split_lines(path, data)
    frames, numbers = [], []
    for number, line in enumerate(lines, 1):
        frame, problems = parse_line(line, spec)
        found += [finding(kind, path, number, detail) for kind, detail in problems]
        if isinstance(frame, dict):
            frames.append(frame)
            numbers.append(number)
    if not any(item.kind == "lone-cr" for item in found):  # each may end a frame
        blank = sum(item.kind == "blank-line" for item in found)
        found += _whole(path, frames, numbers, len(lines) - blank, spec)
    return frames, sorted(found, key=lambda item: item.line or 0)


def _whole(
    path: Path, frames: list[dict[str, Any]], numbers: list[int], lines: int, spec: DatasetSpec
) -> list[Finding]:
    """What only the episode as a whole shows: too few frames, action in some of them."""
    found = too_few_frames(path, lines)
    without = [number for number, frame in zip(numbers, frames, strict=True) if "action" not in frame]
    if 0 < len(without) < len(frames):
        detail = f"action in {len(frames) - len(without)} of {len(frames)} frames, not in this one"
        found.append(finding("mixed-action", path, without[0], detail))
    elif without and spec.action_dim != spec.state_dim:
        detail = f"no action, and states of {spec.state_dim} dims cannot stand in for {spec.action_dim}"
        found.append(finding("no-action", path, without[0], detail))
    return found
