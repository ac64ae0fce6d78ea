"""One frame: which JSON objects are acceptable, and why another is not.

::

    {"images_1": {"type": "image", "url": "./episode_000/camera_0/000000.jpg"},
     "images_2": {"type": "video", "url": "episode_000/wrist.mp4", "frame_idx": 0},
     "state": [8 numbers], "action": [7 numbers], "prompt": "...", "is_robot": true}

Which image keys and how many dims are due is for the dataset's entry in the registry to say. ``action`` and
``is_robot`` (true when absent) may be left out, unknown keys are allowed.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import NamedTuple

import numpy as np

from dm05_schemas.registry import DatasetSpec

# A quarter of float32's range: differences to the state, and the gap between their quantiles, then stay finite too.
LARGEST = float(np.finfo(np.float32).max) / 4
LONG_PROMPT = 1000
_ABSOLUTE = re.compile(r"[/\\]|[A-Za-z]:[/\\]|[A-Za-z][A-Za-z0-9+.\-]+://")


class Problem(NamedTuple):
    """Why a frame is refused (or warned about): a kind of :mod:`dm05_schemas.findings` and a text."""

    kind: str
    detail: str


class UrlProblem(ValueError):
    """Why a url is refused."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(detail)


def check_frame(frame: object, spec: DatasetSpec) -> list[Problem]:
    """Everything that is wrong with one parsed line, in the order of the layout above; empty when it is acceptable."""
    if not isinstance(frame, dict):
        return [Problem("not-an-object", f"a frame must be an object, not {json_kind(frame)}")]
    found: list[Problem] = []
    for key in spec.image_keys:
        found += _check_image(frame, key)
    found += _check_vector(frame, "state", spec.state_dim)
    if "action" in frame:
        found += _check_vector(frame, "action", spec.action_dim)
    found += _check_prompt(frame)
    if "is_robot" in frame and type(frame["is_robot"]) is not bool:
        found.append(Problem("bad-is-robot", f"is_robot must be true or false, not {json_kind(frame['is_robot'])}"))
    return found


def clean_url(url: str) -> str:
    """``url`` as a relative path without ``.``, ``..`` and empty parts.

    Raises:
        UrlProblem: absolute (``url-absolute``), outside its folder (``url-outside``), or no file name (``bad-url``).
    """
    if _ABSOLUTE.match(url):
        raise UrlProblem("url-absolute", f"url {shown(url)} is absolute")
    if "\0" in url or url.endswith("/"):
        raise UrlProblem("bad-url", f"url {shown(url)} names no file")
    parts: list[str] = []
    for part in url.split("/"):
        if part == "..":
            if not parts:
                raise UrlProblem("url-outside", f"url {shown(url)} leaves the image folder")
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    if not parts or url.endswith(("/.", "/..")):
        raise UrlProblem("bad-url", f"url {shown(url)} names no file")
    return "/".join(parts)


def prompt_problems(prompt: str) -> list[Problem]:
    """Warnings about a task text; none of them makes a frame unacceptable."""
    found = []
    if not prompt.strip():
        found.append(Problem("empty-prompt", "prompt is empty"))
    if len(prompt) > LONG_PROMPT:
        found.append(Problem("long-prompt", f"prompt has {len(prompt)} characters and may not fit the model's input"))
    odd = sorted({char for char in prompt if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp")})
    if odd:
        names = ", ".join(f"U+{ord(char):04X}" for char in odd[:5])
        found.append(Problem("odd-prompt", f"prompt holds {names}"))
    return found


def json_kind(value: object) -> str:
    """A JSON value's kind in words: ``null``, ``a string``, ``a list``, ..."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names: dict[type, str] = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def shown(text: str, limit: int = 80) -> str:
    """``text`` quoted for a message, cut in the middle when long."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 3 :]}"
    return json.dumps(text, ensure_ascii=False)


def _check_vector(frame: dict[str, object], key: str, dims: int) -> list[Problem]:
    if key not in frame:
        return [Problem("missing-key", f'no "{key}"')]
    vector = frame[key]
    if not isinstance(vector, list):
        return [Problem("bad-vector", f"{key} must be a list of {dims} numbers, not {json_kind(vector)}")]
    found = []
    for position, value in enumerate(vector):
        if type(value) not in (int, float):
            found.append(Problem("bad-vector", f"{key}[{position}] is {json_kind(value)}, not a number"))
        elif not abs(value) <= LARGEST:
            found.append(Problem("not-finite", f"{key}[{position}] is {value}, beyond what float32 can calculate with"))
    if len(vector) != dims:
        found.append(Problem("wrong-dims", f"{key} has {len(vector)} numbers where {dims} are due"))
    return found[:3]


def _check_image(frame: dict[str, object], key: str) -> list[Problem]:
    if key not in frame:
        return [Problem("missing-key", f'no "{key}"')]
    entry = frame[key]
    if not isinstance(entry, dict):
        return [Problem("bad-image-entry", f"{key} must be an object with type and url, not {json_kind(entry)}")]
    found = []
    kind, url = entry.get("type"), entry.get("url")
    if kind not in ("image", "video"):
        given = shown(kind) if isinstance(kind, str) else "missing" if kind is None else json_kind(kind)
        found.append(Problem("bad-image-entry", f"type of {key} must be image or video, it is {given}"))
    if not isinstance(url, str):
        given = "missing" if url is None else json_kind(url)
        found.append(Problem("bad-image-entry", f"url of {key} must be a string, it is {given}"))
    else:
        try:
            clean_url(url)
        except UrlProblem as problem:
            found.append(Problem(problem.kind, f"{key}: {problem.detail}"))
    if kind == "video":
        index = entry.get("frame_idx")
        if type(index) is not int or not 0 <= index < 2**31:
            given = "missing" if "frame_idx" not in entry else str(index) if type(index) is int else json_kind(index)
            found.append(Problem("bad-frame-idx", f"frame_idx of {key} must be a whole number from 0, it is {given}"))
    return found


def _check_prompt(frame: dict[str, object]) -> list[Problem]:
    if "prompt" not in frame:
        return [Problem("missing-key", 'no "prompt"')]
    prompt = frame["prompt"]
    if not isinstance(prompt, str):
        return [Problem("bad-prompt", f"prompt must be a string, not {json_kind(prompt)}")]
    return prompt_problems(prompt)
