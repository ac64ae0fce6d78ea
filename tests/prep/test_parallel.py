"""Work in processes: order, errors, a process that dies, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.parallel import batches, chosen_jobs, ordered_map
from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.index import list_episodes
from dm05_schemas.workspace import Workspace
from workspaces import make_spec, random_episodes, write_vectors


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_come_in_order(jobs: int) -> None:
    assert list(ordered_map(len, ["x" * n for n in range(40)], jobs)) == list(range(40))


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_come_through_with_their_mend(jobs: int, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(ordered_map(list_episodes, [tmp_path, tmp_path / "gone"], jobs))
    assert str(caught.value) == f"{tmp_path}/gone: there is no such folder. dm05-prep dataset lays a dataset out"
    assert caught.value.fix == "dm05-prep dataset lays a dataset out"


def test_a_process_that_dies() -> None:
    with pytest.raises(PrepError) as caught:
        list(ordered_map(os._exit, [1, 1], 2))
    assert str(caught.value) == "a worker process died, perhaps for lack of memory. Lower --jobs"


def test_batches_are_cut_by_weight() -> None:
    assert list(batches([3, 3, 3, 9, 1], int, 5)) == [[3, 3], [3, 9], [1]]
    assert list(batches([], int, 5)) == []


def test_jobs() -> None:
    assert (chosen_jobs(None), chosen_jobs(4)) == (None, 4)
    with pytest.raises(UsageError):
        chosen_jobs(0)


INTERRUPTED = """
import sys, threading
import dm05_prep.norm_stats as module
import dm05_schemas.sample as sample
from dm05_prep.cli import main
sample.ALWAYS_ALLOWED = 99000  # long enough to be interrupted
module._BATCH_BYTES, module._PARALLEL_BYTES, module._PARALLEL_VALUES = 1, 0, 0
print("up", flush=True)
sys.argv[1:] = "norm-stats --dataset-name toy --chunk-size 99000 --action-mode relative --jobs 2".split()
main()
"""  # fmt: skip


def test_a_long_name_of_the_temporary_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("t" * 100)
    folder.mkdir()
    program = tmp_path / "program.py"
    program.write_text(
        "from dm05_prep.parallel import ordered_map\n"
        "if __name__ == '__main__':\n"
        "    print(list(ordered_map(len, ['a', 'bb'], 2)))\n"
    )
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder)}, check=False
    )
    assert (done.stdout, done.returncode) == ("[1, 2]\n", 0), done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(tmp_path: Path, sent: signal.Signals) -> None:
    spec = make_spec(state_desc=("joint",) * 3)
    workspace = Workspace(tmp_path / "w")
    write_vectors(workspace, spec, random_episodes(0, [200] * 20, spec))
    (workspace.root / "datasets.toml").write_text(
        '[toy]\nfolder = "data/toy"\nimage_keys = ["images_1", "images_2"]\nimage_prompts = ["a", "b"]\n'
        'state_desc = ["joint", "joint", "joint"]\naction_dim = 3\n'
    )
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "WORKSPACE_DIR": str(workspace.root)}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    deadline = time.monotonic() + 30
    while not any(temporary.glob("dm05-columns-*/columns.f32")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    if sent == signal.SIGINT:  # a terminal sends it to all
        os.killpg(process.pid, sent)
    else:
        process.kill()
    _, errors = process.communicate(timeout=60)
    if sent == signal.SIGINT:
        assert (process.returncode, errors) == (130, "dm05-prep: interrupted\n")
        assert not list(temporary.glob("dm05-*"))
    assert not workspace.norm_stats_dir.exists()
    deadline = time.monotonic() + 10
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(process.pid)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
