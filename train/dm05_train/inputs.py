"""What a run reads: normalisation statistics, samples, prompts, batches."""

from __future__ import annotations

from pathlib import Path

from dm05_schemas.registry import DatasetSpec
from dm05_schemas.stats import NormStats, find_stats, stats_stem
from dm05_schemas.workspace import Workspace

from dm05_train.config import TrainConfig
from dm05_train.data.dataset import MemoryMappedDataset, Split, open_dataset
from dm05_train.data.loader import Loader
from dm05_train.env import World, broadcast, together
from dm05_train.model.config import DM05Config
from dm05_train.prompt import PromptBuilder


def statistics(config: TrainConfig, world: World, workspace: Workspace, spec: DatasetSpec) -> NormStats:
    """The normalisation statistics on every rank; rank 0 reads them, or computes and stores missing ones.

    Raises:
        DataError: they cannot be read or computed.
    """
    root = config.data_config.norm_stats_root or workspace.norm_stats_dir
    mode = config.data_config.action_mode or spec.action_mode
    key = (spec.name, config.model_config.chunk_size, mode)

    def read_or_compute() -> NormStats | None:
        if not world.is_main:
            return None
        stem = root / stats_stem(*key)
        if not any(stem.with_suffix(suffix).is_file() for suffix in (".parquet", ".json")):
            from dm05_prep.norm_stats import compute

            print(f"no normalisation statistics in {root} for {spec.name}, chunk {key[1]}, {mode}: computing them")
            compute(workspace, spec, key[1], mode, out=root)
        return find_stats(root, *key, spec.robot_type)

    stats = broadcast(world, together(world, read_or_compute))
    assert stats is not None
    return stats


def training_data(
    config: TrainConfig, workspace: Workspace, spec: DatasetSpec, stats: NormStats, *, split: Split = "train"
) -> MemoryMappedDataset:
    """The samples of a run."""
    data = config.data_config
    return open_dataset(
        workspace,
        spec,
        stats,
        config.model_config.chunk_size,
        data.action_mode or spec.action_mode,
        data.layout,
        val_episodes=data.val_episodes,
        split=split,
    )


def prompt_builder(config: TrainConfig, folder: Path, model: DM05Config, spec: DatasetSpec) -> PromptBuilder:
    """Turns tasks into tokens with the checkpoint's own tokenizer."""
    return PromptBuilder(
        folder / "tokenizer.json", model, spec, model_max_length=config.trainer_config.model_max_length
    )


def training_loader(
    config: TrainConfig,
    world: World,
    model: DM05Config,
    dataset: MemoryMappedDataset,
    prompts: PromptBuilder,
    *,
    seed: int,
    position: int,
    trimmed: bool,
) -> Loader:
    """This rank's batches from a global data position on.

    ``trimmed`` pads prompts to the dataset's longest; else to ``--trainer-config.model-max-length``, as the plain
    recipe does.
    """
    trainer = config.trainer_config
    return Loader(
        dataset,
        prompts,
        image_size=model.vision.image_size,
        device=world.device,
        prefix_length=None if trimmed else trainer.model_max_length,
        augment_images=config.data_config.augment_images,
        world_size=world.size,
        rank=world.rank,
        per_device_batch=trainer.per_device_train_batch_size,
        accumulation=trainer.gradient_accumulation_steps,
        workers=trainer.dataloader_num_workers,
        seed=seed,
        start_position=position,
    )
