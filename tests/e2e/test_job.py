"""The main job through the real commands: parts -> layout -> index -> statistics -> training, and what it must show."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from dm05_schemas.checkpoint import expected_tensors, read_header
from dm05_schemas.registry import lookup
from dm05_schemas.sample import normalise
from dm05_schemas.stats import find_stats
from dm05_schemas.workspace import Workspace
from PIL import Image
from real_commands import BIN, call, losses, prep, prepare, rows, train, tree

STEPS = 200
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A finished job: where its things are."""

    parts: Path
    checkpoint: Path
    workspace: Path
    output: Path

    @property
    def dataset(self) -> Path:
        return self.workspace / "data" / "libero" / "libero_pi0_all"

    @property
    def trained(self) -> Path:
        return self.output / f"checkpoint-{STEPS:06d}"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    prep("demo", folder).succeeded()
    parts, checkpoint, output = folder / "parts", folder / "DM05", folder / "outputs"
    workspace = prepare(parts, checkpoint, folder / "dm05")
    train(
        *("--workspace", workspace, "--trainer-config.num-train-steps", str(STEPS)),
        *("--trainer-config.per-device-train-batch-size", "48", "--trainer-config.save-at-end"),
        *("--data-config.val-episodes", "2"),
        timeout=800,
    ).succeeded()
    return Job(parts=parts, checkpoint=checkpoint, workspace=workspace, output=output)


def test_only_the_chosen_subset_is_laid_out(job: Job) -> None:
    assert sorted(path.name for path in (job.workspace / "data" / "libero").iterdir()) == ["libero_pi0_all"]
    frames = {path.name: len(path.read_text().splitlines()) for path in (job.dataset / "jsonl").glob("*.jsonl")}
    assert len(frames) == 14
    assert sum(1 for _ in (job.dataset / "image").rglob("*.jpg")) == 2 * sum(frames.values())
    index = json.loads((job.dataset / "index_cache.json").read_text())
    prefix = "data/libero/libero_pi0_all/jsonl/"
    assert index["data"] == {prefix + name: count for name, count in sorted(frames.items())}
    assert (job.workspace / "index_cache.json").read_bytes() == (job.dataset / "index_cache.json").read_bytes()
    assert sorted(path.name for path in (job.workspace / "norm_stats").iterdir()) == [
        "libero_pi0_all_3577e2559f079b3e.json",
        "libero_pi0_all_3577e2559f079b3e.parquet",
    ]


def test_the_parts_are_the_users_own_and_stay(job: Job, tmp_path: Path) -> None:
    prep("demo", tmp_path).succeeded()
    assert tree(tmp_path / "parts") == tree(job.parts)


def test_a_second_run_does_nothing_and_says_so(job: Job) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in job.workspace.rglob("*") if path.is_file()}

    before = times()
    again = prep("dataset", "--source", "local", "--uri", job.parts, "--workspace", job.workspace).succeeded()
    assert "already" in again.out
    prep("model", "--source", "local", "--uri", job.checkpoint, "--workspace", job.workspace).succeeded()
    assert times() == before


def test_validation_has_nothing_to_say(job: Job, tmp_path: Path) -> None:
    found = prep("validate", "--deep", "--workspace", job.workspace, "--json", tmp_path / "found.json").succeeded()
    assert "Traceback" not in found.err
    assert json.loads((tmp_path / "found.json").read_text())["findings"] == []


def test_the_loss_falls_to_under_a_third(job: Job) -> None:
    steps = [row["step"] for row in rows(job.output)]
    assert steps == list(range(1, STEPS + 1))
    curve = losses(job.output)
    assert np.mean(curve[-10:]) < curve[0] / 3


def test_the_loss_curve_is_a_picture(job: Job, tmp_path: Path) -> None:
    call(BIN / "python", "-m", "dm05_train.plot", job.output, "--out", tmp_path / "loss.png").succeeded()
    with Image.open(tmp_path / "loss.png") as image:
        assert image.format == "PNG"


def test_the_checkpoint_has_the_released_names(job: Job) -> None:
    config = json.loads((job.trained / "config.json").read_text())
    header = read_header(job.trained / "model.safetensors")
    assert {name: entry.shape for name, entry in header.items()} == expected_tensors(config)
    assert (job.trained / "tokenizer.json").read_bytes() == (job.checkpoint / "tokenizer.json").read_bytes()


def test_sampled_actions_have_less_than_half_the_error_of_the_mean(job: Job) -> None:
    sampled, true, mean = sampled_true_and_mean(job, batches=4)
    for error in (root_mean_square, mean_absolute):
        assert error(sampled - true) < error(mean - true) / 2


def test_it_beats_the_mean_on_episodes_it_never_saw(job: Job, tmp_path: Path) -> None:
    line = ("eval", "--workspace", job.workspace, "--model-config.model-name-or-path", job.trained, "--out", tmp_path)
    said = call("dm05-train", *line).succeeded()
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["split"] == "val" and "val" in said.out
    assert found["ratio"] < 0.6
    with Image.open(tmp_path / "eval.png") as image:
        assert image.format == "PNG"


def root_mean_square(difference: np.ndarray) -> float:
    return float(np.sqrt(np.square(difference).mean()))


def mean_absolute(difference: np.ndarray) -> float:
    return float(np.abs(difference).mean())


def sampled_true_and_mean(job: Job, batches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Action chunks [n, H, A] drawn from the trained model and as done, and the mean action [A], all normalised."""
    from dm05_train.data.dataset import open_dataset
    from dm05_train.data.loader import Loader
    from dm05_train.model.config import DM05Config
    from dm05_train.model.dm05 import DM05
    from dm05_train.model.noise import draw
    from dm05_train.model.weights import load_weights
    from dm05_train.prompt import PromptBuilder

    workspace = Workspace.resolve(job.workspace)
    spec = lookup("libero_pi0_all", workspace)
    stats = find_stats(workspace.norm_stats_dir, spec.name, 10, "absolute")
    dataset = open_dataset(workspace, spec, stats, 10, "absolute")
    config = DM05Config.from_json(job.trained)
    model = DM05(config)
    load_weights(model, job.trained)
    model.eval()
    prompts = PromptBuilder(job.trained / "tokenizer.json", config, spec)
    loader = Loader(
        dataset,
        prompts,
        image_size=config.vision.image_size,
        world_size=1,
        rank=0,
        per_device_batch=32,
        workers=0,
        seed=7,
    )
    sampled, true = [], []
    for batch in itertools.islice(loader, batches):
        noise, _ = draw(0, batch["sample_ids"], 10, config.action_dim)
        sampled.append(model.sample(batch, noise)[..., : spec.action_dim].numpy())
        true.append(batch["action"][..., : spec.action_dim].numpy())
    mean = normalise(stats.action.mean, stats.action.q01, stats.action.q99)
    return np.concatenate(sampled), np.concatenate(true), mean
