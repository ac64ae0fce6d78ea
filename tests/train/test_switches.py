"""The switches: read from the environment, and what becomes of them on a machine."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from dm05_schemas.errors import UsageError
from dm05_train.bench import BenchConfig, cases, main
from dm05_train.env import World
from dm05_train.errors import TrainError
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.optim.adamw import AdamW
from dm05_train.perf.accelerate import Acceleration
from dm05_train.perf.switches import Switches
from dm05_train.table import switch_line

GOLDEN = Path(__file__).parent.parent / "golden"
ON = {"DM05_PERF_ENABLE": "1"}


def test_the_master_is_off_and_then_nothing_counts() -> None:
    for environ in ({}, dict.fromkeys(Switches.variables().values(), "1") | {"DM05_PERF_ENABLE": "0"}):
        off = Switches.from_env(environ)
        assert not any(off.on(name) for name in Switches.variables() if name != "log")


def test_each_switch_can_be_turned_off_alone() -> None:
    for name, variable in Switches.variables().items():
        if name not in ("enable", "log"):
            switches = Switches.from_env(ON | {variable: "0"})
            assert not switches.on(name)
            assert switches.on("restructure") or name == "restructure"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DM05_PERF_ENABLE", "2"),
        ("DM05_DDP_BUCKET_CAP_MB", "0"),
        ("DM05_DDP_BUCKET_CAP_MB", "²"),
        ("DM05_DDP_BUCKET_CAP_MB", "9" * 400),
        ("DM05_PERF_R10_MATMUL_PRECISION", "fast"),
    ],
)
def test_a_value_that_means_nothing_is_refused(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=variable):
        Switches.from_env({variable: value})


def test_an_unknown_switch_is_a_warning_with_the_nearest_real_one() -> None:
    with pytest.warns(UserWarning, match="DM05_PERF_R18_CUDAGRAPH .* did you mean DM05_PERF_R18_CUDA_GRAPH"):
        Switches.from_env({"DM05_PERF_R18_CUDAGRAPH": "1"})
    with pytest.warns(UserWarning, match="did you mean DM05_PERF_R8_COMPILE_SUFFIX_LOOP"):
        Switches.from_env({"DM05_PERF_R8": "1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Switches.from_env(ON | {"DM05_DATASETS": "x.toml", "DM05_DDP_BUCKET_CAP_MB": "25", "DM05_PREP_STALL_S": "5"})


def test_the_matmul_precision_is_a_switch_too() -> None:
    for value, meant in {"1": "high", "0": "highest", "medium": "medium"}.items():
        assert Switches.from_env(ON | {"DM05_PERF_R10_MATMUL_PRECISION": value}).matmul_precision == meant


def test_a_precision_that_does_nothing_is_said() -> None:
    name, off = "DM05_PERF_R10_MATMUL_PRECISION", {"DM05_PERF_R10_TF32_MATMUL": "0"}
    with pytest.warns(UserWarning, match=f"{name} does nothing while DM05_PERF_R10_TF32_MATMUL is 0"):
        Switches.from_env(ON | off | {name: "1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for quiet in (ON | off | {name: "0"}, ON | off, ON | {name: "1"}, off | {name: "1"}):
            Switches.from_env(quiet)


def acceleration(*, size: int = 1, parallel: str = "ddp", optim: str = "adamw", **environ: str) -> Acceleration:
    switches = Switches.from_env(ON | environ)
    return Acceleration(switches=switches, world=World(size=size), parallel=parallel, mode="fp32", optim=optim)


def test_what_cannot_apply_says_why() -> None:
    here = acceleration()
    assert here.fallbacks["cuda_graph"] == here.fallbacks["fused_adamw"] == "no GPU"
    assert "no DDP" in here.fallbacks["ddp_bucket"]
    assert here.on("restructure")
    assert here.adamw() is AdamW
    assert "DM05_PERF_R18_CUDA_GRAPH: off (no GPU)" in here.report()
    assert "DM05_PERF_R10_MATMUL_PRECISION: highest" in here.report()
    assert "DM05_MUON_BATCHED_GATHER: off (the optimizer is adamw)" in here.report()
    assert acceleration(optim="muon_adamw").on("muon_batched_gather")
    sharded = acceleration(size=2, parallel="fsdp")
    assert "FSDP" in sharded.fallbacks["restructure"] and sharded.trims and not sharded.on("restructure")
    assert any("R16_MODULE_REORDER: in part (FSDP" in line for line in sharded.report())
    assert "in part, FSDP" in switch_line(sharded)
    assert not acceleration(size=2, parallel="fsdp", DM05_PERF_R16_MODULE_REORDER="0").trims
    assert acceleration(size=2).on("ddp_bucket")


def test_the_model_changes_only_as_the_switches_say() -> None:
    config = DM05Config.from_json(GOLDEN / "tiny_dm05")
    whole, some = DM05(config), DM05(config)
    acceleration().prepare(whole)
    acceleration(DM05_PERF_R16_MODULE_REORDER="0").prepare(some)
    assert whole.packed
    assert not some.packed


def test_bench_times_plain_and_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--per-device-batch 2 --prefix 24 --padded 32 --precision fp32 --steps 1 --cases plain,all"
    where = ["--model-config", str(GOLDEN / "tiny_dm05" / "config.json"), "--out", str(tmp_path)]
    assert main([*flags.split(), *where]) == 0
    printed = capsys.readouterr().out
    assert "(off: R1, no GPU; " in printed
    losses = {line.rsplit("|", 2)[1].strip() for line in printed.splitlines() if "(fp32)" in line}
    assert len(losses) == 1
    assert (tmp_path / "bench.json").is_file()
    assert (tmp_path / "bench.png").is_file()


@pytest.mark.parametrize("words", ["--steps 0", "--prefix 9", "--padded 8", "--chunk-size -1"])
def test_bench_refuses_what_it_cannot_time(words: str) -> None:
    with pytest.raises(UsageError, match=words.split()[0]):
        main(["--model-config", str(GOLDEN / "tiny_dm05" / "config.json"), *words.split()])


@pytest.mark.parametrize("content", [None, "[]", '{"chunk_size": 10}'])
def test_bench_names_its_own_flag_for_a_config_that_is_none(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TrainError) as caught:
        main(["--model-config", str(path)])
    assert str(caught.value).startswith(f"{path}: ")
    assert caught.value.fix and "--model-config," in caught.value.fix and "--model-config." not in caught.value.fix


def test_bench_refuses_cases_it_does_not_know() -> None:
    with pytest.raises(UsageError, match="everything"):
        list(cases(BenchConfig(cases="everything")))
    assert len({case.name for case in cases(BenchConfig())}) == len(list(cases(BenchConfig())))
