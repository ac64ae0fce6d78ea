"""What is wrong is said once, before any process of a run is started."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from training_runs import flags, run, start

TWO = {"NPROC_PER_NODE": "2"}


@pytest.mark.parametrize(
    ("environ", "words", "code", "said"),
    [
        ({"DM05_PERF_ENABLE": "maybe"}, {}, 2, "DM05_PERF_ENABLE: 'maybe' is neither 1 nor 0"),
        ({"DM05_PERF_R10_MATMUL_PRECISION": "low"}, {}, 2, "DM05_PERF_R10_MATMUL_PRECISION"),
        ({"DM05_DDP_BUCKET_CAP_MB": "x"}, {}, 2, "DM05_DDP_BUCKET_CAP_MB"),
        ({"DM05_DATASETS": "/none.toml"}, {}, 1, "DM05_DATASETS"),
        ({"DATA_PATH": "/none"}, {}, 1, "/none"),
        ({}, {"workspace": "/etc/hostname"}, 2, "the workspace is not a folder"),
        ({}, {"data_config__dataset_name": "libero_pi0_al"}, 1, "libero_pi0_all"),
        ({}, {"data_config__layout": "pack"}, 1, "pack"),
        ({}, {"model_config__model_name_or_path": "/none"}, 1, "no such folder"),
        ({}, {"output_dir": "/dev/null/x"}, 1, "this is no folder"),
        ({}, {"dataloader_num_workers": 5000}, 2, "5000 workers a rank"),
    ],
)
def test_said_once_by_the_process_that_would_start_the_others(
    workspace: Path, tmp_path: Path, environ: dict[str, str], words: dict[str, str], code: int, said: str
) -> None:
    done = run(flags(workspace, tmp_path / "out", **words), **TWO, **environ)
    assert done.returncode == code, done.stderr
    assert said in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_an_index_that_is_stale(workspace: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(workspace, tmp_path / "workspace")
    next(copy.glob("data/libero/libero_pi0_all/jsonl/**/*.jsonl")).unlink()
    done = run(flags(copy, tmp_path / "out"), **TWO)
    assert done.returncode == 1 and "the index is stale" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["eval"]])
def test_the_command_that_fetches_weights_names_the_workspace(
    workspace: Path, tmp_path: Path, command: list[str]
) -> None:
    copy = shutil.copytree(workspace, tmp_path / "workspace")
    (copy / "checkpoints/DM05/model.safetensors").unlink()
    done = run([*command, *flags(copy, tmp_path / "out")])
    assert done.returncode == 1 and f"Run dm05-prep model --workspace {copy}, or name" in done.stderr


def test_a_chunk_longer_than_any_episode_is_refused_before_statistics(workspace: Path, tmp_path: Path) -> None:
    more = {"model_config__chunk_size": 100_000, "data_config__norm_stats_root": tmp_path / "stats"}
    done = run(flags(workspace, tmp_path / "out", **more))
    assert done.returncode == 1
    assert "a chunk of 100,000 actions is longer than any episode of libero_pi0_all" in done.stderr
    assert "--model-config.chunk-size" in done.stderr
    assert not (tmp_path / "stats").exists()


def test_of_torchruns_ranks_the_first_speaks(workspace: Path, tmp_path: Path) -> None:
    """A rank with another number waits to be ended; rank 0 says it at once."""
    facts = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "DM05_PERF_ENABLE": "maybe"}
    other = start(flags(workspace, tmp_path), RANK="1", LOCAL_RANK="1", **facts)
    first = start(flags(workspace, tmp_path), RANK="0", LOCAL_RANK="0", **facts)
    assert "neither 1 nor 0" in first.communicate(timeout=100)[1] and first.returncode == 2
    assert other.poll() is None
    other.terminate()
    assert other.communicate(timeout=100)[1] == ""
