"""The benchmark over several processes, its table, and the model that predicts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dm05_train.bench import generated_batch
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.noise import draw
from dm05_train.model.weights import freeze_untrained, generate_weights
from dm05_train.perf.restructure import restructure
from torch import nn

from tools import bench_multi_gpu as bench
from tools import communication_model as communication

ROOT = Path(__file__).parents[2]
TINY, RELEASED = ROOT / "tests/golden/tiny_dm05/config.json", ROOT / "tests/golden/dm05_config.json"
LINKS = communication.Links(nvlink=450e9, network=200e9, efficiency=0.8, hop=5e-6, contention=0.15, memory=4.25e12)


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command, or torchrun, on the tiny model."""
    small = ["--model-config", TINY, "--batches", "2", "--prefix", "24", "--padded", "32", "--precision", "fp32"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environ = {key: value for key, value in os.environ.items() if key not in names} | {"OMP_NUM_THREADS": "1"}
    command = [str(word) for word in (sys.executable, *arguments, *small)]
    return subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=280)


def result(name: str, gpus: int, batch: int, seconds: float) -> dict[str, object]:
    return {"gpus": gpus, "case": name, "batch": batch, "step_seconds": seconds, "peak_gib": 60.0, "last_loss": 0.5}


@pytest.mark.slow
def test_all_cases_under_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start(*torchrun, bench.__file__, "--steps", "3", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    found = {r["case"]: r for r in bench.read_results(tmp_path)}
    assert list(found) == list(bench.CASES)
    for name, r in found.items():
        assert r["gpus"] == 2 and r["step_seconds"] > 0, name
        assert r["first_loss"] == pytest.approx(found["baseline"]["first_loss"], rel=1e-5), name
        assert r["last_loss"] != r["first_loss"], name
    assert found["baseline"]["fallbacks"] == {}
    assert "restructure" in found["fsdp"]["fallbacks"] and "restructure" not in found["all"]["fallbacks"]


@pytest.mark.slow
def test_alone_it_starts_torchrun_for_each_case_and_keeps_results(tmp_path: Path) -> None:
    command = [bench.__file__, "--gpus", "2", "--cases", "all", "--steps", "2", "--out", tmp_path]
    done = start(*command)
    assert done.returncode == 0, done.stderr
    assert "| 2 | 2 | all |" in done.stdout
    path = bench.result_path(tmp_path, 2, "all", 2)
    before = path.read_bytes()
    assert start(*command).returncode == 0
    assert path.read_bytes() == before


def test_a_case_that_ends_badly_is_a_result(tmp_path: Path) -> None:
    settings = bench.Settings(model_config=str(TINY), prefix=24, padded=32, precision="fp32", steps=2)
    bench.start_case(2, "all", 2, settings, tmp_path, minutes=0.01)
    [body] = bench.read_results(tmp_path)
    assert "took over 0.01 minutes" in body["failed"]
    assert not bench.is_measured(bench.result_path(tmp_path, 2, "all", 2), settings)


def test_table(tmp_path: Path) -> None:
    made = [
        *(result("baseline", n, 8, s) for n, s in ((8, 0.6), (1, 0.5))),
        *(result("all", n, 8, s) for n, s in ((1, 0.25), (8, 0.3))),
        result("bucket-25", 8, 8, 0.4),
        result("all", 8, 4, 0.2),
        {"gpus": 8, "case": "fsdp", "batch": 8, "failed": "exit code 1 after 9 s"},
    ]
    for body in made:
        bench.write(bench.result_path(tmp_path, body["gpus"], body["case"], body["batch"]), body)  # type: ignore[arg-type]
    lines = bench.table(bench.read_results(tmp_path)).splitlines()
    assert lines[2:9] == [
        "| 4 | 8 | all | 0.2000 | 160.0 | – | – | 60.0 | 0.50000 |",
        "| 8 | 1 | baseline | 0.5000 | 16.0 | 1.000x | 100.0% | 60.0 | 0.50000 |",
        "| 8 | 1 | all | 0.2500 | 32.0 | 2.000x | 100.0% | 60.0 | 0.50000 |",
        "| 8 | 8 | baseline | 0.6000 | 106.7 | 1.000x | 83.3% | 60.0 | 0.50000 |",
        "| 8 | 8 | all | 0.3000 | 213.3 | 2.000x | 83.3% | 60.0 | 0.50000 |",
        "| 8 | 8 | bucket-25 | 0.4000 | 160.0 | 1.500x | 62.5% | 60.0 | 0.50000 |",
        "| 8 | 8 | fsdp | exit code 1 after 9 s | – | – | – | – | – |",
    ]
    assert "1.140x at batch 8" in lines[-1]


def test_unknown_case() -> None:
    done = start(bench.__file__, "--cases", "al")
    assert done.returncode == 2 and "no case is called 'al'" in done.stderr


def test_gradients_are_the_trained_parameters() -> None:
    for packed in (True, False):
        found = communication.gradients(RELEASED, packed=packed)
        assert sum(g.bytes for g in found) == 2 * 4_397_397_136


def test_gradients_come_in_the_order_of_the_backward_pass() -> None:
    config = DM05Config.from_json(TINY)
    model = DM05(config)
    generate_weights(model)
    freeze_untrained(model)
    restructure(model)
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    batch = generated_batch(config, 2, 24, 24, torch.device("cpu"))
    model.loss(batch, *draw(0, torch.arange(2), config.chunk_size, config.action_dim)).backward()

    def layers(names: list[str]) -> list[str]:
        return list(dict.fromkeys(name.rsplit(".layers.", 1)[0] + name.partition("layers.")[2][:2] for name in names))

    expected = [g.name for g in communication.gradients(TINY, packed=True)]
    assert set(arrived) == set(expected)
    large = [n for n in expected if "layers." in n]
    assert layers([n for n in arrived if n in large]) == layers(large)


@pytest.mark.parametrize("cap", [1, 1000, 100_000, 10**9])
def test_buckets_are_those_of_ddp(cap: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [nn.Parameter(torch.empty(int(torch.randint(1, 5000, (), generator=generator)))) for _ in range(50)]
    assigned, _ = dist._compute_bucket_assignment_by_size([t.data for t in tensors], [cap])
    expected = [sum(4 * tensors[i].numel() for i in bucket) for bucket in assigned]
    assert communication.buckets([4 * t.numel() for t in tensors], cap) == expected


def test_prediction_has_no_free_lunch() -> None:
    found = communication.gradients(RELEASED, packed=True)
    timing = communication.timing_of(8, 0.27, 0.02)
    by_gpus = [communication.predict(found, timing, LINKS, gpus=n, mb=512, copies=1).step for n in (2, 4, 8, 16)]
    assert by_gpus == sorted(by_gpus) and by_gpus[0] > 0.29
    whole = communication.predict(found, timing, LINKS, gpus=8, mb=1 << 20, copies=1)
    assert whole.exposed == pytest.approx(whole.communication)  # one bucket cannot overlap
