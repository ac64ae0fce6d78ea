"""JSON as the contract means it: UTF-8 without a byte order mark, every key once, every number finite."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import orjson

from dm05_schemas.errors import DataError


class JsonProblem(ValueError):
    """Why a text is refused: ``kind`` is one of those in :mod:`dm05_schemas.findings`."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(detail)


def parse(raw: bytes) -> Any:
    """The value of one JSON text.

    Raises:
        JsonProblem: not UTF-8 (``bad-utf8``), a key twice (``duplicate-key``), NaN, Infinity or a number beyond
            float64 (``not-finite``), or no JSON (``bad-json``).
    """
    try:
        value = orjson.loads(raw)
        # orjson takes what is meant here, and keys that stand twice.
        if has_no_doubles(raw, raw.count(b":"), count_colons(value)):
            return value
    except (orjson.JSONDecodeError, RecursionError):
        pass
    return _parse_carefully(raw)


def has_no_doubles(raw: bytes, written: int, due: int) -> bool:
    """True when no key of a JSON text stands twice; False when that cannot be told from colons.

    Every key is followed by one colon and orjson keeps one of two equal keys. So a text has as many colons as the keys
    and strings of its value account for only when there are no doubles, unless a colon is escaped.

    Args:
        raw: the text.
        written: colons in it.
        due: what :func:`count_colons` says of its value.
    """
    return written == due and b"\\u003" not in raw


def count_colons(value: Any) -> int:
    """Colons in the text of a JSON value without doubled keys."""
    if isinstance(value, str):
        return value.count(":")
    if isinstance(value, list):
        return sum(map(count_colons, value))
    inner: dict[str, Any] = value if isinstance(value, dict) else {}
    return len(inner) + sum(key.count(":") + count_colons(item) for key, item in inner.items())


def _parse_carefully(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonProblem("bad-utf8", f"byte {error.start + 1} is not UTF-8 (0x{raw[error.start]:02x})") from None
    try:
        value = json.loads(
            text, object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_number, parse_int=_integer
        )
    except RecursionError:
        raise JsonProblem("bad-json", "not JSON: nested too deep") from None
    except json.JSONDecodeError as error:
        raise JsonProblem("bad-json", f"not JSON at column {error.colno}: {error.msg}") from None
    try:
        orjson.loads(raw)
    except orjson.JSONDecodeError as error:  # it refuses two things that json lets pass
        if "memory" in error.msg:
            raise MemoryError(error.msg) from None
        why = "nested too deep" if "depth" in error.msg else "half a surrogate pair"
        raise JsonProblem("bad-json", f"not JSON: {why}") from None
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a small file (an index, statistics, a pack's description) holds.

    Raises:
        DataError: it holds none, or it is not strict JSON.
    """
    try:
        value = parse(path.read_bytes())
    except JsonProblem as problem:
        raise DataError(problem.detail, where=path) from None
    if not isinstance(value, dict):
        raise DataError("must hold a JSON object", where=path)
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise JsonProblem("duplicate-key", f"key {json.dumps(key, ensure_ascii=False)} stands twice")
        result[key] = value
    return result


def _constant(word: str) -> float:
    raise JsonProblem("not-finite", f"{word} is not a JSON number")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise JsonProblem("not-finite", f"{text[:40]} is not finite in float64")
    return value


def _integer(text: str) -> int | float:
    value = _number(text)
    exact = int(text) if len(text) <= 20 else None
    return exact if exact is not None and -(2**63) <= exact < 2**64 else value
