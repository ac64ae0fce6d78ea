"""Whole runs with ``--optimizer-config.optim muon_adamw``: they learn, go on to the bit, and take over from AdamW."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from dm05_train.config import OptimizerConfig
from dm05_train.loop import train_step
from dm05_train.optim.muon_adamw import MuonAdamW
from golden_run import config, golden_run
from safetensors import safe_open
from training_runs import flags, losses, run

MUON = {"optimizer_config__optim": "muon_adamw"}
BATCHED = {"DM05_PERF_ENABLE": "1"}
SAVING = {"save_strategy": "steps", "save_steps": 2, "steps": 4}


@pytest.fixture(scope="module")
def unbroken(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("muon") / "outputs"
    done = run(flags(workspace, output, **SAVING, **MUON), **BATCHED)
    assert done.returncode == 0, done.stderr
    return output


def kinds(checkpoint: Path) -> dict[str, set[str]]:
    """The kinds of optimizer state in a checkpoint, by released parameter name."""
    found: dict[str, set[str]] = {}
    for path in (checkpoint / "training").glob("optimizer-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                kind, _, name = key.partition(":")
                found.setdefault(name, set()).add(kind)
    return found


def test_it_learns() -> None:
    """Thirty steps on the golden batch, accumulated and clipped, bring the loss down; batched or not, alike."""
    curves = []
    for batched, steps in ((True, 30), (False, 10)):
        settings = OptimizerConfig(optim="muon_adamw", base_lr=1e-3, warmup_steps=0, lr_scheduler="constant")
        session = golden_run(config(steps=30, batch=3, accumulation=2, optimizer=settings))
        assert isinstance(session.optimizer, MuonAdamW)
        session.optimizer.muon.batched = batched
        curves.append([train_step(session)[0].item() for _ in range(steps)])
    assert sum(curves[0][-5:]) < 0.8 * sum(curves[0][:5])
    assert curves[0][:10] == pytest.approx(curves[1], rel=0.01)


def test_checkpoints_hold_what_each_optimizer_needs(unbroken: Path) -> None:
    found = kinds(unbroken / "checkpoint-000004")
    assert found["model.action_expert.layers.0.self_attn.q_proj.weight"] == {"momentum_buffer"}
    assert found["model.action_expert.layers.0.mlp.down_proj.weight"] == {"momentum_buffer"}
    assert found["model.action_out_proj.weight"] == {"exp_avg", "exp_avg_sq"}


def test_resumed_to_the_bit(workspace: Path, unbroken: Path, tmp_path: Path) -> None:
    output = shutil.copytree(unbroken, tmp_path / "outputs")
    path = output / "checkpoint-000002"
    done = run(flags(workspace, output, model_config__model_name_or_path=path, **SAVING, **MUON), **BATCHED)
    assert done.returncode == 0, done.stderr
    assert losses(output) == losses(unbroken)
    again, first = (
        (folder / "checkpoint-000004" / "training" / "optimizer-00000-of-00001.safetensors").read_bytes()
        for folder in (output, unbroken)
    )
    assert again == first


@pytest.mark.parametrize("to", ["muon_adamw", "adamw"])
def test_one_optimizer_takes_over_from_the_other(workspace: Path, unbroken: Path, tmp_path: Path, to: str) -> None:
    """It is said aloud; what both have is kept, the rest starts from zero, and the run goes on sanely."""
    output = shutil.copytree(unbroken, tmp_path / "outputs")
    if to == "muon_adamw":
        shutil.rmtree(output)
        assert run(flags(workspace, output, **(SAVING | {"steps": 2}))).returncode == 0
    path = output / "checkpoint-000002"
    change = flags(workspace, output, model_config__model_name_or_path=path, optimizer_config__optim=to, **SAVING)
    done = run(change)
    assert done.returncode == 0, done.stderr
    assert f"the optimizer changes from {'adamw' if to == 'muon_adamw' else 'muon_adamw'} to {to}" in done.stdout
    found = losses(output)
    assert [step for step, _, _ in found] == [1, 2, 3, 4]
    assert all(loss < 2 * found[0][1] for _, loss, _ in found)
    kept = kinds(output / "checkpoint-000004")["model.action_expert.layers.0.self_attn.q_proj.weight"]
    assert kept == ({"momentum_buffer"} if to == "muon_adamw" else {"exp_avg", "exp_avg_sq"})
