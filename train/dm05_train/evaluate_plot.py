"""The picture of an evaluation: predicted chunks over the true actions of a few episodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dm05_train.evaluate import Float32, Setup, predict, truth

PLOTTED_EPISODES = 3
PLOTTED_FRAMES = 80


@dataclass(kw_only=True)
class Trace:
    """One episode's true actions [N, A], and predicted chunks by the frame they start at."""

    episode: str
    true: Float32
    chunks: dict[int, Float32] = field(default_factory=dict)


def traces(setup: Setup) -> Iterator[Trace]:
    """Predicted chunks, one after the other, over the first frames of some episodes."""
    chunk = setup.config.model_config.chunk_size
    at, drawn = 0, 0
    while at < len(setup.dataset) and drawn < PLOTTED_EPISODES:
        _, episode, _ = setup.dataset.locate(at)
        end = at
        while end < len(setup.dataset) and setup.dataset.locate(end)[1] == episode:
            end += 1
        ids = np.arange(at, min(end, at + PLOTTED_FRAMES))
        trace = Trace(episode=episode, true=truth(setup, ids)[:, 0])
        for first in range(0, len(ids), chunk):
            loader = setup.batches(size=1, start=int(ids[first]), shuffle=False)
            trace.chunks[first] = predict(setup, next(loader))[0]
            loader.close()
        yield trace
        at, drawn = end, drawn + 1


def plot(setup: Setup, path: Path) -> None:
    """Draw true actions as lines and predicted chunks as short lines over them, one row a dim, one column an
    episode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = list(traces(setup))
    dims = found[0].true.shape[1]
    figure, axes = pyplot.subplots(
        dims, len(found), figsize=(5 * len(found), 1.4 * dims + 1), sharex="col", squeeze=False, layout="constrained"
    )
    for column, trace in enumerate(found):
        axes[0, column].set_title(trace.episode, fontsize=9)
        axes[-1, column].set_xlabel("frame")
        for dim in range(dims):
            axis = axes[dim, column]
            axis.plot(trace.true[:, dim], color="0.3", linewidth=1.2, label="true")
            for first, actions in trace.chunks.items():
                shown = actions[: len(trace.true) - first, dim]
                axis.plot(
                    np.arange(first, first + len(shown)),
                    shown,
                    color="C1",
                    linewidth=1,
                    label="predicted" if not first else None,
                )
            axis.set_ylabel(f"action {dim}", fontsize=8)
            axis.tick_params(labelsize=7)
    axes[0, 0].legend(fontsize=7, loc="best")
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, dpi=110, format="png")
    pyplot.close(figure)
    temporary.replace(path)
