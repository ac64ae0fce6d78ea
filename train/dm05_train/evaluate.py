"""``dm05-train eval``: the loss on held-out episodes, and how far sampled actions are from the true ones in real units.

Writes into OUTPUT/eval (or --out)::

    eval.json      loss, and for each action dim: mean absolute error, root mean square error, the error of always
    predicting
                   the dataset's mean action, and their ratio
    eval.png       predicted chunks over the true actions of a few episodes
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from dm05_schemas.commands import aiming
from dm05_schemas.errors import UsageError
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.sample import denormalise
from dm05_schemas.stats import NormStats
from dm05_schemas.workspace import Workspace
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from dm05_train.build import load_model, precision_mode
from dm05_train.checkpoint import latest, read_state
from dm05_train.config import TrainConfig, is_run_checkpoint
from dm05_train.data.dataset import MemoryMappedDataset
from dm05_train.data.loader import Loader
from dm05_train.env import World
from dm05_train.inputs import prompt_builder, statistics, training_data
from dm05_train.model.dm05 import DM05
from dm05_train.model.noise import draw
from dm05_train.prompt import PromptBuilder
from dm05_train.start import Start, absolute, check_folder, output_folder

Float32 = NDArray[np.float32]
MOST_SAMPLE_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class EvalConfig(TrainConfig):
    """What to evaluate; the other flags are those of a training run."""

    split: Literal["val", "train", "all"] = "val"
    """Which episodes: held out (`--data-config.val-episodes`, by default as the checkpoint's run had it), trained on,
    or all. A run that held none out is evaluated on what it was trained on, and this is said."""
    samples: int = 256
    """How many samples, drawn evenly from the episodes."""
    sample_steps: int = 10
    """Euler steps from noise to actions."""
    out: Path | None = None
    """Where the report goes. Default: `eval` in the output folder."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything an evaluation needs, ready."""

    config: EvalConfig
    world: World
    model: DM05
    dataset: MemoryMappedDataset
    prompts: PromptBuilder
    stats: NormStats
    relative_dims: tuple[int, ...]
    """Action dims that are relative to the state."""

    def batches(self, *, size: int, start: int, shuffle: bool) -> Loader:
        """Batches from a position on."""
        return Loader(
            self.dataset,
            self.prompts,
            image_size=self.model.config.vision.image_size,
            device=self.world.device,
            per_device_batch=size,
            workers=self.config.trainer_config.dataloader_num_workers,
            seed=self.config.trainer_config.seed,
            start_position=start,
            shuffle=shuffle,
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured; arrays have one entry an action dim, in the dataset's units."""

    split: str
    samples: int
    loss: float
    mean_absolute_error: Float32
    root_mean_square_error: Float32
    mean_prediction_error: Float32
    """Mean absolute error of always predicting the mean action."""
    ratio: float
    """Mean over dims of error by that of predicting the mean; under 1 is better than knowing nothing."""

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in self.__dict__.items()}


def prepare(config: EvalConfig, workspace: Workspace) -> Setup:
    """Load model and data.

    Raises:
        DM05Error: a part is missing or wrong.
    """
    world = World.from_env({})
    folder = find_folder(config, workspace)
    config = settled(config, folder)
    spec = lookup(config.data_config.dataset_name, workspace)
    state = read_state(folder) if is_run_checkpoint(folder) else None
    stats = statistics(config, world, workspace, spec, Start(folder=folder, state=state, note="")).stats
    dataset = training_data(config, workspace, spec, stats, split=config.split)
    model = load_model(config, world, folder, precision_mode(config, folder)).eval().requires_grad_(False)
    return Setup(
        config=config,
        world=world,
        model=model,
        dataset=dataset,
        prompts=prompt_builder(config, folder, model.config, spec),
        stats=stats,
        relative_dims=_relative_dims(config, spec),
    )


def find_folder(config: EvalConfig, workspace: Workspace) -> Path:
    """The checkpoint to evaluate: the one named, else the newest of the output folder, else the released weights."""
    named = config.model_config.model_name_or_path
    folder = absolute(named) if named else latest(output_folder(config, workspace)) or workspace.checkpoint_dir
    check_folder(folder, workspace)
    return folder


def settled(config: EvalConfig, folder: Path) -> EvalConfig:
    """The config with what the checkpoint's run had where the flags leave it open, and a split that has episodes."""
    data, model = config.data_config, config.model_config
    if is_run_checkpoint(folder):
        run = read_state(folder).config
        if not data.val_episodes:
            data = replace(data, val_episodes=run["data_config"]["val_episodes"])
        data = replace(data, action_mode=data.action_mode or run["data_config"]["action_mode"])
        model = replace(model, chunk_size=run["model_config"]["chunk_size"])
    split = config.split if data.val_episodes or config.split != "val" else "train"
    return replace(config, data_config=data, model_config=model, split=split)


def _relative_dims(config: EvalConfig, spec: DatasetSpec) -> tuple[int, ...]:
    if (config.data_config.action_mode or spec.action_mode) != "relative":
        return ()
    return tuple(dim for dim in range(spec.action_dim) if dim not in spec.gripper_dims)


def evaluate(setup: Setup) -> Report:
    """Loss and action error over the samples asked for; noise and times depend on the seed and the sample alone."""
    wanted = min(setup.config.samples, len(setup.dataset))
    size = min(setup.config.trainer_config.per_device_train_batch_size, wanted)
    losses: list[float] = []
    predicted: list[Float32] = []
    true: list[Float32] = []
    mean: list[Float32] = []
    loader = setup.batches(size=size, start=0, shuffle=True)
    try:
        with tqdm(total=wanted, unit="sample", desc="eval", disable=None) as bar:
            while len(losses) < wanted:
                batch = next(loader)
                ids = batch["sample_ids"].numpy()
                losses += _losses(setup, batch).tolist()
                predicted.append(predict(setup, batch))
                true.append(truth(setup, ids))
                mean.append(usual(setup, ids))
                bar.update(len(ids))
    finally:
        loader.close()
    actual = np.concatenate(true)[:wanted]
    error = np.concatenate(predicted)[:wanted] - actual
    naive = np.abs(np.concatenate(mean)[:wanted] - actual).mean((0, 1))
    mae = np.abs(error).mean((0, 1))
    moving = naive > 0
    return Report(
        split=setup.config.split,
        samples=wanted,
        loss=float(np.mean(losses[:wanted])),
        mean_absolute_error=mae,
        root_mean_square_error=np.sqrt(np.square(error).mean((0, 1))),
        mean_prediction_error=naive,
        ratio=float((mae[moving] / naive[moving]).mean()) if moving.any() else float("nan"),
    )


def _noise(setup: Setup, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    ids = batch["sample_ids"].to(setup.world.device)
    return draw(setup.config.trainer_config.seed, ids, batch["action"].shape[1], setup.model.config.action_dim)


@torch.no_grad()
def _losses(setup: Setup, batch: Mapping[str, Tensor]) -> Tensor:
    return setup.model.loss(batch, *_noise(setup, batch), reduction="none").cpu()


def predict(setup: Setup, batch: Mapping[str, Tensor]) -> Float32:
    """Sampled actions [B, H, A], absolute, in the dataset's units."""
    noise, _ = _noise(setup, batch)
    sampled = setup.model.sample(batch, noise, steps=setup.config.sample_steps).float().cpu().numpy()
    stats = setup.stats.action
    actions = denormalise(sampled[..., : len(stats.q01)], stats.q01, stats.q99)
    return _absolute(setup, actions, batch["sample_ids"].numpy())


def truth(setup: Setup, ids: NDArray[np.int64]) -> Float32:
    """The dataset's own actions [B, H, A]."""
    return np.stack([setup.dataset.stored(int(i))[1] for i in ids])


def usual(setup: Setup, ids: NDArray[np.int64]) -> Float32:
    """The mean action for each sample [B, H, A]."""
    mean = setup.stats.action.mean.astype(np.float32)
    chunk = setup.config.model_config.chunk_size
    return _absolute(setup, np.broadcast_to(mean, (len(ids), chunk, len(mean))).copy(), ids)


def _absolute(setup: Setup, actions: Float32, ids: NDArray[np.int64]) -> Float32:
    dims = list(setup.relative_dims)
    if dims:
        states = np.stack([setup.dataset.stored(int(i))[0] for i in ids])
        actions[..., dims] += states[:, None, dims]
    return actions


def show(report: Report, folder: Path) -> str:
    """The report as lines for a person."""
    lines = [
        f"checkpoint  {folder}",
        f"episodes    {report.split}, {report.samples} samples",
        f"loss        {report.loss:.4f}",
    ]
    lines.append(f"{'dim':>4} {'abs error':>10} {'rms error':>10} {'of the mean':>12} {'ratio':>7}")
    rows = zip(report.mean_absolute_error, report.root_mean_square_error, report.mean_prediction_error, strict=True)
    for dim, (mae, rmse, naive) in enumerate(rows):
        ratio = f"{mae / naive:7.2f}" if naive > 0 else "      -"
        lines.append(f"{dim:4} {mae:10.4f} {rmse:10.4f} {naive:12.4f} {ratio}")
    lines.append(f"error by that of always predicting the mean action: {report.ratio:.2f}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    from dm05_train.cli import read_flags
    from dm05_train.evaluate_plot import plot

    text = """How good a checkpoint is: loss on held-out episodes, action error a dim in real units, and a plot.

Examples:
  dm05-train eval --workspace W                                   the newest checkpoint of the output folder
  dm05-train eval --model-config.model-name-or-path CHECKPOINT --samples 1000"""
    config = read_flags(EvalConfig, EvalConfig.defaults(os.environ), arguments, "dm05-train eval", text)
    workspace = Workspace.resolve(config.workspace)
    if config.samples < 1 or config.sample_steps < 1:
        raise UsageError("an evaluation needs a sample and a step", where="--samples", fix="Give 1 or more")
    if config.sample_steps > MOST_SAMPLE_STEPS:
        fix = f"Give {MOST_SAMPLE_STEPS} or less; 10 are usual"
        raise UsageError(f"{config.sample_steps} Euler steps are too many", where="--sample-steps", fix=fix)
    with aiming(workspace, config.data_config.dataset_name):
        folder = find_folder(config, workspace)
        setup = prepare(config, workspace)
    if setup.config.split != config.split:
        print("no episodes were held out (--data-config.val-episodes): these were trained on")
    report = evaluate(setup)
    out = absolute(config.out) if config.out else output_folder(config, workspace) / "eval"
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / ".eval.json"
    temporary.write_text(json.dumps({"checkpoint": str(folder), **report.as_json()}, indent=1) + "\n", "utf-8")
    temporary.replace(out / "eval.json")
    plot(setup, out / "eval.png")
    print(show(report, folder))
    print(f"written     {out / 'eval.json'} and eval.png")
    return 0
