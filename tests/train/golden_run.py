"""A run over the golden tiny model, built by hand: what the trainer's tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from dm05_train.build import load_model
from dm05_train.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig
from dm05_train.env import World
from dm05_train.loop import Run
from dm05_train.optim import build_optimizer
from dm05_train.optim.precision import Mode
from dm05_train.parallel import wrap
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parent.parent / "golden" / "tiny_dm05"


def config(
    *,
    steps: int = 5,
    batch: int = 1,
    accumulation: int = 1,
    optimizer: OptimizerConfig | None = None,
    **trainer: object,
) -> TrainConfig:
    return TrainConfig(
        data_config=DataConfig(),
        model_config=ModelConfig(model_name_or_path=GOLDEN),
        optimizer_config=optimizer or OptimizerConfig(base_lr=1e-3, warmup_steps=0, lr_scheduler="constant"),
        trainer_config=TrainerConfig(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            num_train_steps=steps,
            **trainer,  # type: ignore[arg-type]
        ),
    )


def batches(batch: int, *, world: World, accumulation: int = 1, start: int = 0) -> Iterator[dict[str, Tensor]]:
    """Endless micro-batches of this rank: sample p of the run is golden sample p % 3, its action shifted by p."""
    golden = load_file(GOLDEN / "batch.safetensors")
    pixels = golden["pixel_values"].unflatten(0, (3, 2))
    for micro in itertools.count():
        step, part = divmod(micro, accumulation)
        first = start + (step * accumulation + part) * world.size * batch + world.rank * batch
        ids = torch.arange(first, first + batch)
        pick = ids % 3
        names = ("input_ids", "token_type_ids", "attention_mask", "action_mask")
        shift = torch.sin(ids.float())[:, None, None]
        yield {
            **{name: golden[name][pick] for name in names},
            "action": golden["action"][pick] + 0.1 * shift * golden["action_mask"][pick],
            "pixel_values": pixels[pick].flatten(0, 1),
            "sample_ids": ids,
            "position": torch.tensor(first),
        }


def golden_run(
    settings: TrainConfig,
    world: World | None = None,
    *,
    mode: Mode = "fp32",
    start: int = 0,
    bucket_mb: int | None = None,
    static_graph: bool = False,
) -> Run:
    """A run over the golden model and batch, ready for its first step."""
    world = world or World()
    trainer = settings.trainer_config
    model = load_model(settings, world, GOLDEN, mode)
    wrapped = wrap(model, world, trainer.parallel, bucket_mb=bucket_mb, static_graph=static_graph)
    return Run(
        config=settings,
        world=world,
        model=model,
        wrapped=wrapped,
        optimizer=build_optimizer(model.named_parameters(), settings.optimizer_config, mode),
        batches=batches(
            trainer.per_device_train_batch_size,
            world=world,
            accumulation=trainer.gradient_accumulation_steps,
            start=start,
        ),
        dataset_size=3,
        seed=trainer.seed,
        name="golden",
        precision=mode,
    )
