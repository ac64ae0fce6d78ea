"""The image: its steps run in a clean folder and prefix, and its job templates fit the image and the launch rules."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from dm05_train.cli import read_train_config
from dm05_train.launch import plan
from training_runs import environment

IMAGE = Path(__file__).parents[2] / "tools" / "image"
WORK_DIR = "/root/workspace/dm05"


@pytest.mark.slow
def test_the_steps_in_a_clean_folder_and_prefix(tmp_path: Path) -> None:
    """What pip would download is what runs this test; everything else is made from nothing."""
    work, prefix = tmp_path / "root" / "workspace" / "dm05", tmp_path / "env"
    made = subprocess.run([sys.executable, "-m", "venv", str(prefix)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    here = sysconfig.get_paths()["purelib"]
    site = next((prefix / "lib").glob("python*")) / "site-packages"
    # The dependencies alone: the .pth file that makes this checkout importable must not be seen.
    (site / "dependencies.pth").write_text(f"import sys; sys.path.append({here!r})\n")
    environ = environment(WORK_DIR=str(work), PREFIX=str(prefix), DEPENDENCIES="0", HOME=str(tmp_path))
    environ.pop("PYTHON")
    done = subprocess.run(["bash", str(IMAGE / "steps.sh")], env=environ, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"jobs run from {work}" in done.stdout and "torchrun" in done.stdout
    found = subprocess.run(
        [str(prefix / "bin" / "python"), "-c", "import dm05_train; print(dm05_train.__path__[0])"],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert found.stdout.startswith(str(prefix)), found.stderr
    assert (work / "scripts" / "run_full_sft_distributed.sh").is_file() and (work.parent / "outputs").is_dir()


def templates() -> list[tuple[str, dict[str, Any]]]:
    """(file, pod) of every pod in the job templates."""
    job = yaml.safe_load((IMAGE / "pytorchjob.yaml").read_text())
    pods = [("pytorchjob.yaml", r["template"]["spec"]) for r in job["spec"]["pytorchReplicaSpecs"].values()]
    single = yaml.safe_load((IMAGE / "torchrun-job.yaml").read_text())
    return [*pods, ("torchrun-job.yaml", single["spec"]["template"]["spec"])]


def test_templates_mount_what_the_published_guide_mounts_and_nothing_to_install() -> None:
    dockerfile = (IMAGE / "Dockerfile").read_text()
    assert f"WORKDIR {WORK_DIR}" in dockerfile and "steps.sh" in dockerfile
    for name, pod in templates():
        container = pod["containers"][0]
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        wanted = {f"{WORK_DIR}/data", f"{WORK_DIR}/checkpoints", f"{WORK_DIR}/norm_stats", "/root/workspace/outputs"}
        assert wanted <= set(mounts), name
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        assert container["workingDir"] == WORK_DIR
        assert not re.search(r"\bpip\b|apt-get", str(container["command"]))


def test_template_flags_and_variables_are_real() -> None:
    for name, pod in templates():
        container = pod["containers"][0]
        config = read_train_config(container["args"])
        assert config.trainer_config.resume == "latest" and config.trainer_config.save_strategy == "steps", name
        given = {entry["name"] for entry in container["env"]} - {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
        assert given <= {"WORKSPACE_DIR", "NPROC_PER_NODE", "PER_DEVICE_BATCH", "TRAIN_STEPS", "DM05_PERF_ENABLE"}


def test_what_the_operator_injects_makes_a_plan() -> None:
    pod = templates()[0][1]
    given = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    injected = {"MASTER_ADDR": "dm05-full-sft-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
    chosen = plan(given | injected | {"PET_NNODES": "2", "PET_NODE_RANK": "1"}, gpus=8)
    assert (chosen.nodes, chosen.node, chosen.per_node, chosen.address) == (2, 1, 8, "dm05-full-sft-master-0")


def test_steps_script_is_valid_shell() -> None:
    for script in (IMAGE / "steps.sh", IMAGE.parents[1] / "scripts" / "run_full_sft_distributed.sh"):
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
        assert os.access(script, os.X_OK)
