"""Reading and writing statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from dm05_schemas.errors import DataError
from dm05_schemas.json_schemas import load_schema
from dm05_schemas.stats import FIELDS, NormStats, VectorStats, find_stats, read_stats, stats_stem, write_stats


def vector(dims: int, seed: int) -> VectorStats:
    rng = np.random.default_rng(seed)
    numbers = np.sort(rng.normal(size=(len(FIELDS), dims)), axis=0)
    order = {"min": 0, "q01": 1, "mean": 2, "std": 3, "q99": 4, "max": 5}
    return VectorStats(**{name: numbers[order[name]] for name in FIELDS}, count=7 + seed)


STATS = NormStats(
    dataset="toy",
    chunk_size=10,
    action_mode="absolute",
    state=vector(3, 0),
    action=vector(2, 1),
    source_fingerprint="f" * 64,
    tool_version="1.2",
)


def test_names() -> None:
    assert stats_stem("libero_pi0_all", 10, "absolute") == "libero_pi0_all_3577e2559f079b3e"
    assert stats_stem("demo", 50, "relative") == "demo_1b0496770e852d94"


def test_there_and_back(tmp_path: Path) -> None:
    parquet, plain = write_stats(tmp_path / "new", STATS)
    jsonschema.validate(json.loads(plain.read_text()), load_schema("norm_stats"))
    back = read_stats(parquet)
    assert (back.dataset, back.chunk_size, back.action_mode) == ("toy", 10, "absolute")
    assert (back.source_fingerprint, back.tool_version) == ("f" * 64, "1.2")
    for key in ("state", "action"):
        one, two = getattr(STATS, key), getattr(back, key)
        assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in FIELDS) and one.count == two.count
        three = getattr(read_stats(plain), key)
        assert all(np.array_equal(getattr(one, name), getattr(three, name)) for name in ("mean", "std", "q01", "q99"))
        assert np.isnan(three.min).all() and three.count == 0
    before = parquet.read_bytes()
    write_stats(tmp_path / "new", STATS)
    assert parquet.read_bytes() == before
    assert sorted(path.suffix for path in (tmp_path / "new").iterdir()) == [".json", ".parquet"]


def test_finding_them(tmp_path: Path) -> None:
    parquet, plain = write_stats(tmp_path, STATS)
    assert find_stats(tmp_path, "toy", 10, "absolute").tool_version == "1.2"
    parquet.unlink()
    assert find_stats(tmp_path, "toy", 10, "absolute").tool_version == ""
    plain.unlink()
    with pytest.raises(DataError) as caught:
        find_stats(tmp_path / "a b", "toy", 10, "absolute")
    assert str(caught.value) == (
        f"{tmp_path}/a b/{parquet.name}: no statistics of toy for chunk size 10, absolute actions. "
        "Run dm05-prep norm-stats --dataset-name toy --chunk-size 10 --action-mode absolute "
        f"--out '{tmp_path}/a b'"
    )


def test_a_renamed_file_is_not_taken(tmp_path: Path) -> None:
    parquet, _ = write_stats(tmp_path, STATS)
    parquet.rename(tmp_path / f"{stats_stem('toy', 11, 'absolute')}.parquet")
    with pytest.raises(DataError, match="holds statistics of toy, chunk size 10, absolute"):
        find_stats(tmp_path, "toy", 11, "absolute")


def profile(shift: float = 0) -> dict[str, Any]:
    one = {"mean": [shift, 1], "std": [1, 1], "q01": [-1, 0], "q99": [1, 2]}
    return {"state": one, "action": one}


def write(tmp_path: Path, document: object) -> Path:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(document))
    return path


def test_one_profile_a_robot(tmp_path: Path) -> None:
    document = {
        "norm_stats_by_robot": {"Franka": profile(1), "ALOHA": {"norm_stats": profile(2)}},
        "default_robot_type": "Franka",
    }
    jsonschema.validate(document, load_schema("norm_stats"))
    path = write(tmp_path, document)
    assert read_stats(path).state.mean[0] == 1
    assert read_stats(path, "ALOHA").state.mean[0] == 2
    with pytest.raises(DataError) as caught:
        read_stats(path, "franka")
    assert str(caught.value) == f"{path}: has no statistics of robot 'franka', only of ALOHA, Franka"
    del document["default_robot_type"]
    with pytest.raises(DataError) as caught:
        read_stats(write(tmp_path, document))
    assert str(caught.value) == f"{path}: has no default_robot_type. Name a robot type"


def changed(key: str, value: object) -> dict[str, Any]:
    document = {"norm_stats": json.loads(json.dumps(profile()))}
    document["norm_stats"]["action"][key] = value
    return document


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "must hold a JSON object"),
        ({}, "holds neither norm_stats nor norm_stats_by_robot"),
        ({"norm_stats": {"state": profile()["state"]}}, "action: is missing"),
        (changed("mean", None), "action: mean must be a list of numbers"),
        (changed("std", [1, "2"]), "action: std must be a list of numbers"),
        (changed("std", [1, True]), "action: std must be a list of numbers"),
        (changed("q01", [0]), "action: q01 has 1 numbers where mean has 2"),
        (changed("q01", [0, 9]), "action: q01 is above q99 in dim 1"),
        (changed("mean", [float("nan"), 1]), "NaN is not a JSON number"),
    ],
)
def test_what_is_refused(tmp_path: Path, document: object, text: str) -> None:
    path = write(tmp_path, document)
    with pytest.raises(DataError) as caught:
        read_stats(path)
    assert str(caught.value) == f"{path}: {text}"


def test_a_parquet_of_other_making(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(DataError, match="was not written by this version of dm05-prep"):
        read_stats(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match="is not a readable parquet file"):
        read_stats(path)
