"""Flags: defaults, environment, spelling, and combinations that are refused with the mend."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from dm05_schemas.errors import UsageError
from dm05_schemas.version import tool_version
from dm05_train.cli import read_flags
from dm05_train.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig, as_plain


def read(*arguments: str, environ: dict[str, str] | None = None) -> TrainConfig:
    return read_flags(TrainConfig, TrainConfig.defaults(environ or {}), arguments, "dm05-train", "")


def test_defaults() -> None:
    config = read()
    assert config.data_config.dataset_name == "libero_pi0_all"
    assert (config.model_config.chunk_size, config.trainer_config.model_max_length) == (10, 1024)
    assert (config.optimizer_config.optim, config.optimizer_config.base_lr, config.optimizer_config.warmup_steps) == (
        "adamw",
        2.5e-5,
        1000,
    )
    trainer = config.trainer_config
    assert (trainer.per_device_train_batch_size, trainer.gradient_accumulation_steps, trainer.num_train_steps) == (
        10,
        1,
        300,
    )
    assert (trainer.save_strategy, trainer.save_steps, trainer.save_total_limit) == ("no", 100, None)
    assert trainer.dataloader_num_workers == 4


def test_flag_beats_environment_beats_default() -> None:
    environ = {"PER_DEVICE_BATCH": "4", "TRAIN_STEPS": "7", "WORKSPACE_DIR": "/w", "NORM_STATS_PATH": "/n"}
    config = read(environ=environ)
    assert config.trainer_config.per_device_train_batch_size == 4 and config.trainer_config.num_train_steps == 7
    assert config.workspace == Path("/w") and config.data_config.norm_stats_root == Path("/n")
    config = read("--trainer-config.num-train-steps", "9", "--workspace", "/v", environ=environ)
    assert config.trainer_config.num_train_steps == 9 and config.workspace == Path("/v")
    assert read(environ={"PER_DEVICE_BATCH": "", "WORKSPACE_DIR": ""}) == read()


@pytest.mark.parametrize(
    "flag",
    [
        "--trainer-config.num-train-steps",
        "--trainer_config.num_train_steps",
        "--trainer-config.num_train_steps",
        "--trainer_config.num-train-steps",
    ],
)
def test_dashes_and_underscores_mean_the_same(flag: str) -> None:
    assert read(flag, "12").trainer_config.num_train_steps == 12
    assert read(f"{flag}=12").trainer_config.num_train_steps == 12


@pytest.mark.parametrize("text", ["many", "0", "-3", "1.5", "²", "9" * 5000])
def test_a_variable_that_is_no_count(text: str) -> None:
    with pytest.raises(UsageError, match=r"\$PER_DEVICE_BATCH: .* is no count"):
        TrainConfig.defaults({"PER_DEVICE_BATCH": text})


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: TrainerConfig(save_total_limit=0), "--trainer-config.save-total-limit"),
        (lambda: TrainerConfig(per_device_train_batch_size=0), "--trainer-config.per-device-train-batch-size"),
        (lambda: TrainerConfig(gradient_accumulation_steps=0), "--trainer-config.gradient-accumulation-steps"),
        (lambda: TrainerConfig(num_train_steps=0), "--trainer-config.num-train-steps"),
        (lambda: TrainerConfig(dataloader_num_workers=-1), "--trainer-config.dataloader-num-workers"),
        (lambda: TrainerConfig(max_grad_norm=0.0), "--trainer-config.max-grad-norm"),
        (lambda: TrainerConfig(seed=2**64), "--trainer-config.seed"),
        (lambda: TrainerConfig(seed=-1), "--trainer-config.seed"),
        (lambda: OptimizerConfig(base_lr=0.0), "--optimizer-config.base-lr"),
        (lambda: OptimizerConfig(beta2=1.0), "--optimizer-config.beta2"),
        (lambda: OptimizerConfig(min_lr_ratio=2.0), "--optimizer-config.min-lr-ratio"),
        (lambda: ModelConfig(chunk_size=0), "--model-config.chunk-size"),
        (lambda: DataConfig(val_episodes=1.5), "--data-config.val-episodes"),
        (lambda: DataConfig(val_episodes=math.inf), "--data-config.val-episodes"),
        (lambda: DataConfig(val_episodes=math.nan), "--data-config.val-episodes"),
        (lambda: TrainerConfig(timeout_minutes=math.inf), "--trainer-config.timeout-minutes"),
        (lambda: TrainerConfig(max_grad_norm=math.inf), "--trainer-config.max-grad-norm"),
        (lambda: OptimizerConfig(eps=0.0), "--optimizer-config.eps"),
        (lambda: OptimizerConfig(muon_ns_steps=0), "--optimizer-config.muon-ns-steps"),
        (lambda: OptimizerConfig(muon_ns_steps=10**9), "--optimizer-config.muon-ns-steps"),
        (lambda: TrainerConfig(model_max_length=10**8), "--trainer-config.model-max-length"),
        (lambda: TrainerConfig(dataloader_num_workers=5000), "--trainer-config.dataloader-num-workers"),
    ],
)
def test_refused_with_the_flag_and_a_mend(make: object, flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()  # type: ignore[operator]
    assert caught.value.where == flag and caught.value.fix
    assert caught.value.exit_code == 2


RATES = ("base_lr", "eps", "weight_decay", "min_lr_ratio", "beta1", "beta2")
MUON = ("muon_momentum", "muon_lr_scale", "muon_coefficient")


@pytest.mark.parametrize("name", [*RATES, *MUON])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_no_optimizer_setting_is_negative_or_not_finite(name: str, value: float) -> None:
    with pytest.raises(UsageError) as caught:
        OptimizerConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.where == f"--optimizer-config.{name.replace('_', '-')}" and caught.value.fix


def test_latest_and_a_checkpoint_to_continue_contradict(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "state.json").write_text("{}")
    with pytest.raises(UsageError, match="a checkpoint to continue from"):
        TrainConfig(
            model_config=ModelConfig(model_name_or_path=tmp_path), trainer_config=TrainerConfig(resume="latest")
        )


def test_plain_form_is_json(tmp_path: Path) -> None:
    plain = as_plain(TrainConfig(workspace=tmp_path))
    assert plain["workspace"] == str(tmp_path) and plain["trainer_config"]["seed"] == 42


def dm05_train(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dm05_train", *arguments], capture_output=True, text=True)


def test_what_tools_and_scripts_start_is_made_to_be_started() -> None:
    root = Path(__file__).parents[2]
    files = [
        path for name in ("tools", "tests", "scripts", "docs") for path in (root / name).rglob("*") if path.is_file()
    ]
    started = {
        module
        for path in [*files, root / "README.md", root / "Makefile"]
        for module in re.findall(r"-m[\", ]+(dm05_\w+(?:\.\w+)*)", path.read_text("utf-8", errors="replace"))
    }
    assert "dm05_train" in started
    for module in started:
        place = root / ("train" if module.startswith("dm05_train") else "prep") / module.replace(".", "/")
        code = (place / "__main__.py" if place.is_dir() else place.with_suffix(".py")).read_text("utf-8")
        assert 'if __name__ == "__main__":' in code, module


@pytest.mark.parametrize("word", ["--version", "-V"])
@pytest.mark.parametrize("program", ["dm05_prep", "dm05_train"])
def test_both_commands_say_their_version(program: str, word: str) -> None:
    done = subprocess.run([sys.executable, "-m", program, word], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{program.replace('_', '-')} {tool_version()}\n"


def test_help_is_a_page_a_person_can_use() -> None:
    done = dm05_train("--help")
    assert done.returncode == 0
    for word in (
        "\nExamples:\n  ",
        "--data-config.dataset-name",
        "checkpoint",
        "DM05_PERF_ENABLE",
        "A flag beats an environment variable",
        "eval",
    ):
        assert word in done.stdout
    every = [line for line in done.stdout.splitlines() if "--trainer-config." in line and "usage" not in line]
    assert len(every) >= 18


@pytest.mark.parametrize("module", ["evaluate", "memory", "bench", "plot"])
def test_every_help_page_has_examples_and_says_what_each_flag_does(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        import_module(f"dm05_train.{module}").main(["--help"])
    assert not stop.value.code
    out = capsys.readouterr().out
    assert "\nExamples:\n  " in out
    untold = re.findall(r"(--\S+) [A-Z|{}]+[ │\n]+\(default", out)
    assert not untold


@pytest.mark.parametrize(
    "flag",
    [
        "--workspace",
        "--data-config.norm-stats-root",
        "--model-config.model-name-or-path",
        "--trainer-config.output-dir",
    ],
)
def test_no_path_may_be_empty(flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag}: an empty value"):
        read(flag, "")


def test_a_wrong_flag_ends_with_2_and_offers_the_right_one() -> None:
    done = dm05_train("--trainer-config.num-train-step", "3")
    assert done.returncode == 2 and "num-train-steps" in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_value_offers_no_flag_instead_of_itself() -> None:
    with pytest.raises(UsageError, match="1e3") as caught:
        read("--optimizer-config.warmup-steps", "1e3")
    assert "Did you mean" not in str(caught.value)
    done = dm05_train("--trainer-config.save-total-limit", "0")
    assert done.returncode == 2 and "last good one" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["memory"]])
def test_packages_of_training_that_are_not_installed(words: list[str]) -> None:
    body = "import sys; sys.modules['torch'] = None; from dm05_train.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", body, *words], capture_output=True, text=True)
    line = "dm05-train: error: training needs torch, which is not installed. Run pip install -e '.[train]'\n"
    assert (done.returncode, done.stderr) == (1, line)
