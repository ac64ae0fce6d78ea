"""The picture of an evaluation shows whole episodes, chunk after chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from dm05_schemas.workspace import Workspace
from dm05_train.config import DataConfig, TrainerConfig
from dm05_train.evaluate import EvalConfig, prepare
from dm05_train.evaluate_plot import plot, traces


def test_chunks_follow_each_other_through_an_episode(workspace: Path, tmp_path: Path) -> None:
    config = EvalConfig(
        workspace=workspace,
        data_config=DataConfig(val_episodes=1),
        trainer_config=TrainerConfig(output_dir=tmp_path, dataloader_num_workers=0),
        sample_steps=1,
    )
    setup = prepare(config, Workspace(workspace))
    (trace,) = traces(setup)
    assert len(trace.true) == len(setup.dataset) and list(trace.chunks) == list(range(0, len(trace.true), 10))
    stored = np.stack([setup.dataset.stored(i)[1][0] for i in range(len(setup.dataset))])
    np.testing.assert_array_equal(trace.true, stored)
    plot(setup, tmp_path / "eval.png")
    assert (tmp_path / "eval.png").stat().st_size > 10_000 and len(list(tmp_path.iterdir())) == 1
