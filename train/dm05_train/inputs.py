"""What a run reads: normalisation statistics, samples, prompts, batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dm05_schemas.files import expanded
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.stats import NormStats, find_stats, stats_stem
from dm05_schemas.workspace import Workspace

from dm05_train.config import TrainConfig
from dm05_train.data.dataset import MemoryMappedDataset, Split, open_dataset
from dm05_train.data.loader import Loader
from dm05_train.env import World, broadcast, together
from dm05_train.model.config import DM05Config
from dm05_train.prompt import PromptBuilder
from dm05_train.start import Start


def stats_key(config: TrainConfig, spec: DatasetSpec) -> tuple[str, int, str]:
    """Dataset, chunk size and action mode: what statistics belong to."""
    return spec.name, config.model_config.chunk_size, config.data_config.action_mode or spec.action_mode


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Normalisation statistics, and the files they were read from by their place in a checkpoint."""

    stats: NormStats
    files: dict[str, bytes]


def statistics(config: TrainConfig, world: World, workspace: Workspace, spec: DatasetSpec, start: Start) -> Statistics:
    """The normalisation statistics on every rank; rank 0 reads them, or computes and stores missing ones.

    A continued run keeps those in its checkpoint.

    Raises:
        DataError: they cannot be read or computed.
    """
    key = stats_key(config, spec)

    def read_or_compute() -> Statistics | None:
        if not world.is_main:
            return None
        root = expanded(config.data_config.norm_stats_root or workspace.norm_stats_dir)
        if start.state is not None and stats_files(start.folder / "norm_stats", key):
            root = start.folder / "norm_stats"
        elif not stats_files(root, key):
            from dm05_prep.norm_stats import compute

            print(f"no normalisation statistics in {root} for {key[0]}, chunk {key[1]}, {key[2]}: computing them")
            compute(workspace, spec, key[1], key[2], out=root)
        files = {f"norm_stats/{path.name}": path.read_bytes() for path in stats_files(root, key)}
        return Statistics(stats=find_stats(root, *key, spec.robot_type), files=files)

    found = broadcast(world, together(world, read_or_compute))
    assert found is not None
    return found


def stats_files(root: Path, key: tuple[str, int, str]) -> list[Path]:
    """The files a folder holds of the statistics of a dataset, chunk size and action mode."""
    paths = [root / f"{stats_stem(*key)}{suffix}" for suffix in (".parquet", ".json")]
    return [path for path in paths if path.is_file()]


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
