"""A workspace on a disk that can only be read: what has nothing to write works, all else says what it would write."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from dm05_prep.lock import WorkspaceLock
from tars import write_parts
from test_dataset import PARTS, PREP, dataset


def read_only(tmp_path: Path, *arguments: object) -> tuple[int, str, str]:
    """Run a command in a namespace where tmp_path/w cannot be written to: exit code, stdout, stderr."""
    workspace = tmp_path / "w"
    command = " ".join(shlex.quote(str(word)) for word in (PREP, *arguments, "--workspace", workspace))
    script = f"mount --bind {workspace} {workspace} && mount -o remount,ro,bind {workspace} || exit 77; {command}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no private file systems here: {done.stderr.strip()}")
    return done.returncode, done.stdout, done.stderr


def test_a_complete_dataset_that_can_only_be_read(tmp_path: Path) -> None:
    write_parts(tmp_path / "p", PARTS)
    dataset(tmp_path / "p", tmp_path / "w")
    said = [("dataset", "nothing to do"), ("index", "current"), ("norm-stats", "current"), ("validate", "good ")]
    for command, words in said:
        code, out, err = read_only(tmp_path, command)
        assert (code, err) == (0, "") and words in out
    code, _, err = read_only(tmp_path, "dataset", "--chunk-size", "7")
    assert code == 1 and f"{tmp_path}/w/norm_stats/" in err and "Read-only file system. Choose a folder" in err
    code, _, err = read_only(tmp_path, "dataset", "--force")
    assert code == 1 and f"{tmp_path}/w: cannot be written to" in err
    with WorkspaceLock(tmp_path / "w"):
        code, _, err = read_only(tmp_path, "dataset")
    assert code == 0, "what another run is about to write does not matter to one that writes nothing"
