"""Normalisation statistics: their names, their two files, reading and writing.

::

    norm_stats/
      libero_pi0_all_3577e2559f079b3e.json      what the public code reads: mean, std, q01, q99 of state and action
      libero_pi0_all_3577e2559f079b3e.parquet   one row a key and dim: key, dim, mean, std, q01, q99, min, max, count;
                                                where they come from in the schema's metadata (``dm05.*`` keys)

The digest is of the dataset's name, the chunk size and the action mode, so one folder holds any number of pairs.
"""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dm05_schemas import strict_json
from dm05_schemas.errors import DataError
from dm05_schemas.files import replace_file
from dm05_schemas.registry import ACTION_MODES
from dm05_schemas.sample import RANGE_EPS
from dm05_schemas.version import tool_version as tool_version

Float64 = NDArray[np.float64]

FORMAT = "1"
NARROW_REACH = 10
KEYS = ("state", "action")
JSON_FIELDS = ("mean", "std", "q01", "q99")
FIELDS = (*JSON_FIELDS, "min", "max")
ARROW_SCHEMA = pa.schema(
    [("key", pa.string()), ("dim", pa.int32()), *((name, pa.float64()) for name in FIELDS), ("count", pa.int64())]
)


@dataclass(frozen=True, kw_only=True)
class VectorStats:
    """Statistics of one vector over ``count`` rows, float64 [D] each.

    ``min``, ``max`` are NaN and ``count`` is 0 when read from a JSON file, which does not hold them.
    """

    mean: Float64
    std: Float64
    q01: Float64
    q99: Float64
    min: Float64
    max: Float64
    count: int


@dataclass(frozen=True, kw_only=True)
class NormStats:
    """Statistics of one dataset for one chunk size and action mode, and where they come from.

    ``dataset`` and the fields below it are empty or 0 when read from a JSON file, which does not hold them.
    """

    dataset: str
    chunk_size: int
    action_mode: str
    state: VectorStats
    action: VectorStats
    source_fingerprint: str
    tool_version: str


def stats_stem(dataset: str, chunk_size: int, action_mode: str) -> str:
    """File name without suffix: ``libero_pi0_all_3577e2559f079b3e``."""
    steps = f"BuildActionChunk(action_horizon={chunk_size})"
    if action_mode == "relative":
        steps += ", ActionRelative(non_delta_ids=['gripper'])"
    digest = hashlib.sha256(f"{dataset}|BuildAction(Pipeline([{steps}]))".encode()).hexdigest()
    return f"{dataset}_{digest[:16]}"


@dataclass(frozen=True, kw_only=True)
class NarrowDim:
    """A dim whose quantiles lie so close together that values outside them become huge when normalised."""

    key: str
    dim: int
    gap: float
    reach: float

    @property
    def text(self) -> str:
        """``action[3]: q99 - q01 is 1.2e-05, so that values reach 57 when normalised``."""
        if not math.isfinite(self.reach):
            return f"{self.key}[{self.dim}]: q01 and q99 are 0, so that it always trains as 0 though it moves"
        name = f"{self.key}[{self.dim}]"
        return f"{name}: q99 - q01 is {self.gap:.2g}, so that values reach {self.reach:.3g} when normalised"


def narrow_dims(stats: NormStats) -> list[NarrowDim]:
    """Dims with values that would exceed 10 after normalisation without the clip (needs min and max)."""
    found = []
    for key, vector in (("state", stats.state), ("action", stats.action)):
        gap = vector.q99 - vector.q01
        scale = 2 / (gap + float(RANGE_EPS))
        reach = np.maximum((vector.max - vector.q01) * scale - 1, 1 - (vector.min - vector.q01) * scale)
        dead = (vector.q01 == 0) & (vector.q99 == 0)
        reach = np.where(dead, np.where((vector.min != 0) | (vector.max != 0), np.inf, 0), reach)
        for dim in np.flatnonzero(reach > NARROW_REACH):
            found.append(NarrowDim(key=key, dim=int(dim), gap=float(gap[dim]), reach=float(reach[dim])))
    return found


def compute_command(root: Path, dataset: str, chunk_size: int, action_mode: str) -> str:
    """The command that writes these statistics to ``root``."""
    flags = f"--dataset-name {dataset} --chunk-size {chunk_size} --action-mode {action_mode}"
    return f"dm05-prep norm-stats {flags} --out {shlex.quote(str(root))}"


def write_stats(folder: Path, stats: NormStats) -> tuple[Path, Path]:
    """Write the pair and return (parquet, json); the JSON last, each through a temporary name."""
    stem = stats_stem(stats.dataset, stats.chunk_size, stats.action_mode)
    parquet, json = folder / f"{stem}.parquet", folder / f"{stem}.json"
    folder.mkdir(parents=True, exist_ok=True)
    sink = pa.BufferOutputStream()
    pq.write_table(_to_table(stats), sink, compression="none")
    replace_file(parquet, sink.getvalue().to_pybytes())
    profile = {
        key: {name: getattr(vector, name).tolist() for name in JSON_FIELDS}
        for key, vector in (("state", stats.state), ("action", stats.action))
    }
    replace_file(json, orjson.dumps({"norm_stats": profile}, option=orjson.OPT_INDENT_2) + b"\n")
    return parquet, json


def read_stats(path: Path, robot_type: str | None = None) -> NormStats:
    """Statistics from a parquet or JSON file.

    Args:
        path: by suffix ``.parquet`` (ours, with provenance) or ``.json`` (also ``norm_stats_by_robot``).
        robot_type: which profile of a JSON by robot; None takes its ``default_robot_type``.

    Raises:
        DataError: unreadable, not strict JSON, a number that is not finite, lengths that differ, q01 above q99, or a
            robot that the file has no profile of.
    """
    if path.suffix == ".parquet":
        return _from_parquet(path)
    document = strict_json.read_object(path)
    profile = _profile(document, path, robot_type)
    vectors = {key: _vector(profile.get(key), f"{path}: {key}") for key in KEYS}
    return NormStats(
        dataset="", chunk_size=0, action_mode="", **vectors, source_fingerprint="", tool_version=""
    )  # fmt: skip


def find_stats(root: Path, dataset: str, chunk_size: int, action_mode: str, robot_type: str | None = None) -> NormStats:
    """The statistics of a dataset, chunk size and mode under ``root``: the parquet, else the JSON of that name.

    Raises:
        DataError: neither is there, or the file is not right; the text names the command that computes them.
    """
    if action_mode not in ACTION_MODES:
        raise DataError(f"action mode must be absolute or relative, not {action_mode!r}")
    stem = stats_stem(dataset, chunk_size, action_mode)
    command = compute_command(root, dataset, chunk_size, action_mode)
    for path in (root / f"{stem}.parquet", root / f"{stem}.json"):
        if not path.is_file():
            continue
        stats = read_stats(path, robot_type)
        if stats.dataset and (stats.dataset, stats.chunk_size, stats.action_mode) != (dataset, chunk_size, action_mode):
            held = f"{stats.dataset}, chunk size {stats.chunk_size}, {stats.action_mode}"
            raise DataError(f"holds statistics of {held}", where=path, fix=f"Run {command} --force")
        return stats
    what = f"no statistics of {dataset} for chunk size {chunk_size}, {action_mode} actions"
    raise DataError(what, where=root / f"{stem}.parquet", fix=f"Run {command}")


def _to_table(stats: NormStats) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in ARROW_SCHEMA.names}
    for key, vector in (("state", stats.state), ("action", stats.action)):
        dims = len(vector.mean)
        columns["key"] += [key] * dims
        columns["dim"] += range(dims)
        columns["count"] += [vector.count] * dims
        for name in FIELDS:
            columns[name] += getattr(vector, name).tolist()
    provenance = {
        "dm05.format": FORMAT,
        "dm05.dataset": stats.dataset,
        "dm05.chunk_size": str(stats.chunk_size),
        "dm05.action_mode": stats.action_mode,
        "dm05.source_fingerprint": stats.source_fingerprint,
        "dm05.tool_version": stats.tool_version,
    }
    return pa.table(columns, schema=ARROW_SCHEMA.with_metadata(provenance))


def _from_parquet(path: Path) -> NormStats:
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            "is not a readable parquet file", where=path, fix="Remove it and run norm-stats again"
        ) from error
    notes = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if notes.get("dm05.format") != FORMAT or not table.schema.equals(ARROW_SCHEMA):
        raise DataError(
            "was not written by this version of dm05-prep", where=path, fix="Remove it and run norm-stats again"
        )
    rows = table.to_pydict()
    vectors = {}
    for key in KEYS:
        picked = [row for row, name in enumerate(rows["key"]) if name == key]
        if not picked or [rows["dim"][row] for row in picked] != list(range(len(picked))):
            raise DataError(f"does not number the dims of {key} from 0", where=path)
        values = {name: [rows[name][row] for row in picked] for name in FIELDS}
        vectors[key] = _vector({**values, "count": rows["count"][picked[0]]}, f"{path}: {key}")
    return NormStats(
        dataset=notes["dm05.dataset"],
        chunk_size=int(notes["dm05.chunk_size"]),
        action_mode=notes["dm05.action_mode"],
        **vectors,
        source_fingerprint=notes["dm05.source_fingerprint"],
        tool_version=notes["dm05.tool_version"],
    )


def _profile(document: Mapping[str, Any], path: Path, robot_type: str | None) -> Mapping[str, Any]:
    by_robot = document.get("norm_stats_by_robot")
    if by_robot is None:
        profile = document.get("norm_stats")
        if not isinstance(profile, dict):
            raise DataError("holds neither norm_stats nor norm_stats_by_robot", where=path)
        return profile
    if not isinstance(by_robot, dict) or not by_robot:
        raise DataError("norm_stats_by_robot must hold a profile for each robot", where=path)
    robot = robot_type if robot_type is not None else document.get("default_robot_type")
    if not isinstance(robot, str):
        raise DataError("has no default_robot_type", where=path, fix="Name a robot type")
    profile = by_robot.get(robot)
    if not isinstance(profile, dict):
        raise DataError(f"has no statistics of robot {robot!r}, only of {', '.join(sorted(by_robot))}", where=path)
    inner = profile.get("norm_stats", profile)
    return inner if isinstance(inner, dict) else profile


def _vector(values: object, where: str) -> VectorStats:
    if not isinstance(values, dict):
        raise DataError("is missing", where=where)
    arrays: dict[str, Float64] = {}
    for name in FIELDS:
        given = values.get(name)
        if given is None and name not in JSON_FIELDS:
            given = [float("nan")] * len(arrays["mean"])
        elif not isinstance(given, list) or not all(type(number) in (int, float) for number in given):
            raise DataError(f"{name} must be a list of numbers", where=where)
        elif not np.isfinite(given).all():
            raise DataError(f"{name} holds a number that is not finite", where=where)
        arrays[name] = np.asarray(given, dtype=np.float64)
        if arrays[name].shape != arrays["mean"].shape or not len(given):
            raise DataError(f"{name} has {len(given)} numbers where mean has {len(arrays['mean'])}", where=where)
    if (arrays["q01"] > arrays["q99"]).any():
        dim = int(np.argmax(arrays["q01"] > arrays["q99"]))
        raise DataError(f"q01 is above q99 in dim {dim}", where=where)
    count = values.get("count", 0)
    return VectorStats(**arrays, count=count if type(count) is int else 0)
