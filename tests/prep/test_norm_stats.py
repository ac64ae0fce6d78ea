"""Statistics against the golden numbers and against a plain NumPy definition."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dm05_prep.index import build_index
from dm05_prep.norm_stats import compute
from dm05_schemas.episode import read_episode
from dm05_schemas.errors import DataError
from dm05_schemas.files import folder_lock
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.sample import action_chunk, normalise, relative
from dm05_schemas.stats import FIELDS, find_stats, narrow_dims, read_stats
from dm05_schemas.workspace import Workspace
from hypothesis import given, settings
from hypothesis import strategies as st
from workspaces import GOLDEN, make_spec, random_episodes, write_vectors

GOLDEN_SPECS = {
    "absolute": lookup("libero_pi0_all", Workspace(Path("."))),
    "relative": make_spec("demo", ((["joint"] * 6) + ["gripper"]) * 2, 14, action_mode="relative"),
}


def golden_workspace(tmp_path: Path, mode: str) -> tuple[Workspace, DatasetSpec, dict]:
    """A workspace with one of the golden datasets, and what is expected of it."""
    workspace, spec = Workspace(tmp_path), GOLDEN_SPECS[mode]
    shutil.copytree(GOLDEN / f"stats_{mode}" / "jsonl", spec.jsonl(workspace))
    return workspace, spec, json.loads((GOLDEN / f"stats_{mode}" / "expected.json").read_text())


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_golden_numbers_and_names(tmp_path: Path, mode: str) -> None:
    workspace, spec, expected = golden_workspace(tmp_path, mode)
    result = compute(workspace, spec, expected["chunk_size"], mode)
    assert result.json.name == expected["json_file_name"]
    assert result.parquet == result.json.with_suffix(".parquet")
    held = json.loads(result.json.read_text())
    assert list(held) == ["norm_stats"]
    for key in ("state", "action"):
        vector = getattr(result.stats, key)
        assert vector.count == expected["stats"][key]["count"]
        assert sorted(held["norm_stats"][key]) == ["mean", "q01", "q99", "std"]
        for field in FIELDS:
            np.testing.assert_allclose(getattr(vector, field), expected["stats"][key][field], rtol=1e-13, atol=1e-16)
        for field in ("q01", "q99", "min", "max"):
            assert getattr(vector, field).tolist() == expected["stats"][key][field]
    assert find_stats(workspace.norm_stats_dir, spec.name, expected["chunk_size"], mode).dataset == spec.name


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_golden_samples(tmp_path: Path, mode: str) -> None:
    workspace, spec, expected = golden_workspace(tmp_path, mode)
    stats = compute(workspace, spec, expected["chunk_size"], mode).stats
    files = sorted(spec.jsonl(workspace).iterdir())
    first, last = read_episode(files[0], spec), read_episode(files[-1], spec)
    for episode, t, name in ((first, 0, "first_sample"), (last, len(last) - 2, "last_sample")):
        chunk = action_chunk(episode.targets, t, expected["chunk_size"], episode.action is None)
        if mode == "relative":
            chunk = relative(chunk, episode.state[t], spec.gripper_dims)
        np.testing.assert_array_equal(episode.state[t], np.float32(expected[name]["state"]))
        np.testing.assert_array_equal(chunk, np.float32(expected[name]["action"]))
    normal = expected["last_sample_normalized"]
    np.testing.assert_array_equal(
        normalise(chunk, stats.action.q01, stats.action.q99), np.float32(normal["action"])
    )  # fmt: skip
    state = normalise(last.state[len(last) - 2], stats.state.q01, stats.state.q99)
    np.testing.assert_array_equal(state, np.float32(normal["state"]))


def plain_columns(episodes, spec: DatasetSpec, chunk_size: int, mode: str) -> dict[str, np.ndarray]:
    """Every row that statistics are of, built the long way."""
    states, rows = [], []
    for state, action in episodes:
        state = state.astype(np.float32)
        target = state if action is None else action.astype(np.float32)
        for t in range(len(state) - 1):
            states.append(state[t])
            first = t + 1 if action is None else t
            for step in range(first, first + chunk_size):
                row = target[min(step, len(state) - 1)].copy()
                if mode == "relative":
                    for dim in range(len(row)):
                        if dim not in spec.gripper_dims:
                            row[dim] -= state[t][dim]
                rows.append(row)
    return {"state": np.float64(states), "action": np.float64(rows)}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=5),
    chunk_size=st.integers(1, 40),
    mode=st.sampled_from(["absolute", "relative"]),
    with_action=st.sampled_from(["all", "none", "mixed"]),
    scale=st.sampled_from([1e-30, 1.0, 1e6]),
)
def test_equals_the_plain_definition(
    tmp_path_factory: pytest.TempPathFactory, seed, lengths, chunk_size, mode, with_action, scale
) -> None:
    workspace = Workspace(tmp_path_factory.mktemp("stats"))
    spec = make_spec(state_desc=("joint", "gripper"), action_dim=2)
    episodes = [
        (scale * state, scale * action if with_action == "all" or (with_action == "mixed" and number % 2) else None)
        for number, (state, action) in enumerate(random_episodes(seed, lengths, spec))
    ]
    write_vectors(workspace, spec, episodes)
    stats = compute(workspace, spec, chunk_size, mode).stats
    for key, rows in plain_columns(episodes, spec, chunk_size, mode).items():
        vector = getattr(stats, key)
        assert vector.count == len(rows)
        np.testing.assert_allclose(vector.mean, rows.mean(0), rtol=1e-9, atol=1e-13 * scale)
        np.testing.assert_allclose(vector.std, rows.std(0), rtol=1e-9)
        np.testing.assert_array_equal([vector.min, vector.max], [rows.min(0), rows.max(0)])
        np.testing.assert_array_equal([vector.q01, vector.q99], np.quantile(rows, [0.01, 0.99], axis=0))


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_any_number_of_processes_gives_the_same_bytes(tmp_path: Path, monkeypatch, mode: str) -> None:
    monkeypatch.setattr("dm05_prep.norm_stats._BATCH_BYTES", 20_000)
    monkeypatch.setattr("dm05_prep.norm_stats._PARALLEL_BYTES", 0)
    monkeypatch.setattr("dm05_prep.norm_stats._PARALLEL_VALUES", 0)
    workspace, spec = Workspace(tmp_path), make_spec(state_desc=("joint", "joint", "gripper"))
    write_vectors(workspace, spec, random_episodes(3, [40, 2, 77, 33, 150, 61, 9], spec))
    pairs = [compute(workspace, spec, 7, mode, jobs=jobs, out=tmp_path / str(jobs)) for jobs in (1, 2, 5)]
    for name in ("parquet", "json"):
        assert len({getattr(pair, name).read_bytes() for pair in pairs}) == 1


def test_runs_again_only_when_the_data_changed(tmp_path: Path) -> None:
    workspace, spec = Workspace(tmp_path), make_spec()
    write_vectors(workspace, spec, random_episodes(0, [5, 6], spec))
    first = compute(workspace, spec, 4, "absolute")
    again = compute(workspace, spec, 4, "absolute")
    assert (first.computed, again.computed) == (True, False)
    assert again.stats.source_fingerprint == first.stats.source_fingerprint
    assert compute(workspace, spec, 4, "absolute", force=True).computed
    first.json.unlink()
    assert compute(workspace, spec, 4, "absolute").computed
    write_vectors(workspace, spec, random_episodes(1, [5, 6], spec))
    changed = compute(workspace, spec, 4, "absolute")
    assert changed.computed and changed.stats.source_fingerprint != first.stats.source_fingerprint


def test_no_image_is_needed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    workspace, spec = Workspace(tmp_path), make_spec()
    write_vectors(workspace, spec, random_episodes(0, [5], spec))
    result = compute(workspace, spec, 4, "absolute")
    assert sorted(workspace.norm_stats_dir.iterdir()) == [result.json, result.parquet]


def test_provenance_is_in_the_parquet(tmp_path: Path) -> None:
    workspace, spec = Workspace(tmp_path), make_spec()
    write_vectors(workspace, spec, random_episodes(0, [5], spec))
    stats = read_stats(compute(workspace, spec, 4, "absolute").parquet)
    assert (stats.dataset, stats.chunk_size, stats.action_mode) == ("toy", 4, "absolute")
    assert len(stats.source_fingerprint) == 64 and stats.tool_version


def test_relative_mode_needs_equal_dims(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        compute(Workspace(tmp_path), make_spec(), 4, "relative")
    assert str(caught.value) == (
        "relative mode needs as many of both, toy has 3 action and 4 state dims. "
        "Use --action-mode absolute (dm05-train: --data-config.action-mode absolute)"
    )


def test_a_number_that_is_not_finite_is_named(tmp_path: Path) -> None:
    workspace, spec = Workspace(tmp_path), make_spec()
    episodes = random_episodes(0, [5, 5], spec)
    episodes[1][0][3, 2] = np.nan
    write_vectors(workspace, spec, episodes)
    with pytest.raises(DataError) as caught:
        compute(workspace, spec, 4, "absolute")
    place = spec.jsonl(workspace) / "episode_001.jsonl:4"
    assert str(caught.value).startswith(f"{place}: NaN is not a JSON number. Correct the frame")
    assert not workspace.norm_stats_dir.exists()


def test_a_near_constant_dim_is_named_with_its_gap(tmp_path: Path) -> None:
    workspace, spec = Workspace(tmp_path), make_spec()
    state, action = np.zeros((300, 4)), np.zeros((300, 3))
    state[:, 0] = np.linspace(-1, 1, 300)
    state[:, 1] = 0.5
    state[7, 1] = 0.6
    action[7, 2] = 4.0
    write_vectors(workspace, spec, [(state, action)])
    stats = compute(workspace, spec, 1, "absolute").stats
    assert [narrow.text for narrow in narrow_dims(stats)] == [
        "state[1]: q99 - q01 is 0, so that values reach 2e+05 when normalised",
        "action[2]: q01 and q99 are 0, so that it always trains as 0 though it moves",
    ]


@pytest.mark.parametrize("chunk_size", [0, -3, 1_000_001, 10**20])
def test_chunk_sizes_that_cannot_be(tmp_path: Path, chunk_size: int) -> None:
    with pytest.raises(DataError) as caught:
        compute(Workspace(tmp_path), make_spec(), chunk_size, "absolute")
    assert str(caught.value) == (
        f"a chunk cannot hold {chunk_size} actions. "
        "Give --chunk-size (dm05-train: --model-config.chunk-size) 1 to 1000000"
    )


def test_a_file_that_changed_behind_its_time_is_named_with_what_helps(tmp_path: Path) -> None:
    workspace, spec = Workspace(tmp_path), make_spec()
    write_vectors(workspace, spec, random_episodes(0, [5], spec))
    compute(workspace, spec, 4, "absolute")
    path = spec.jsonl(workspace) / "episode_000.jsonl"
    state = path.stat()
    path.write_bytes(path.read_bytes().replace(b"put", b"PUT"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(DataError) as caught:
        compute(workspace, spec, 5, "absolute")
    assert str(caught.value) == (
        f"{path}: is not what the index says, though its size and time are. "
        f"Run dm05-prep index --dataset-name toy {workspace.flag} --rebuild, then this command again"
    )
    build_index(workspace, spec, force=True)
    assert compute(workspace, spec, 5, "absolute").computed


def test_a_full_temporary_folder_is_named(tmp_path: Path) -> None:
    workspace, spec = Workspace(tmp_path), make_spec("libero_goal", ("joint",) * 6 + ("gripper",) * 2, 7)
    spec = replace(spec, folder=Path("data/libero/libero_goal"))
    write_vectors(workspace, spec, random_episodes(0, [200], spec))
    build_index(workspace, spec)
    # A limit on file sizes fails a write as a full disk does: without the file's name.
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from dm05_prep.cli import main; main()"
    )
    flags = ["norm-stats", "--dataset-name", "libero_goal", "--workspace", str(tmp_path)]
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
    )
    assert done.returncode == 1
    assert re.fullmatch(
        rf"dm05-prep: error: {tmp_path}/tmp/dm05-columns-\w+: the vectors cannot be written: File too large. "
        r"Set TMPDIR to a folder with 4 bytes free for each number of a frame's state and action\n",
        done.stderr,
    )
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not workspace.norm_stats_dir.exists()


def test_columns_of_a_killed_run_are_deleted_those_of_a_running_one_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    killed, running, new = (tmp_path / "tmp" / f"dm05-columns-{name}" for name in ("killed", "running", "new"))
    for folder in (killed, running, new):
        folder.mkdir(parents=True)
        (folder / "columns.f32").write_bytes(bytes(64))
    for folder in (killed, running):
        os.utime(folder, (1, 1))
    workspace, spec, _ = golden_workspace(tmp_path, "absolute")
    with folder_lock(running):
        compute(workspace, spec, 10, "absolute")
    assert sorted((tmp_path / "tmp").iterdir()) == [new, running]
