"""Draws the loss curves of one or several runs: ``python -m dm05_train.plot RUN [RUN ...] --out loss.png``.

A run is a ``metrics.jsonl``, or the output folder that holds one.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from dm05_schemas.cli import run as run_command
from dm05_schemas.flags import parse_flags

from dm05_train.errors import TrainError

PROG = "dm05-train-plot"
SMOOTHING_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The loss of one run, step by step; skipped steps are left out."""

    label: str
    steps: list[int]
    losses: list[float]


def read_curve(path: Path) -> Curve:
    """The rows of a run's ``metrics.jsonl`` (``path``: the file, or its folder) that hold a finite loss.

    Raises:
        TrainError: no such file, a line that is no row, or not one loss in it.
    """
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise TrainError("no such file", where=path, fix="dm05-train writes it into its output folder")
    steps: list[int] = []
    losses: list[float] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            if row.get("loss") is not None:
                losses.append(float(row["loss"]))
                steps.append(int(row["step"]))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise TrainError(f"not a row of metrics: {error!r}", where=f"{path}:{number}") from None
    if not steps:
        raise TrainError("holds no loss yet", where=path)
    return Curve(label=path.parent.name, steps=steps, losses=losses)


def smoothed(losses: Sequence[float], width: int = SMOOTHING_STEPS) -> list[float]:
    """The mean of each value with up to ``width // 2`` on either side."""
    reach = width // 2
    windows = (losses[max(0, middle - reach) : middle + reach + 1] for middle in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def last_mean(curve: Curve) -> float:
    """The mean of the last SMOOTHING_STEPS losses."""
    last = curve.losses[-SMOOTHING_STEPS:]
    return sum(last) / len(last)


def plot_curves(curves: Sequence[Curve], out: Path) -> Path:
    """Draw the curves, faint as measured and strong as averaged, into the picture ``out`` (by rename)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    for number, curve in enumerate(curves):
        colour = f"C{number}"
        axes.plot(curve.steps, curve.losses, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(curve.steps, smoothed(curve.losses), color=colour, linewidth=2, label=curve.label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("flow-matching loss")
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    else:
        start, end = curves[0].losses[0], last_mean(curves[0])
        axes.set_title(
            f"loss {start:.3f} at step {curves[0].steps[0]}, {end:.3f} over the last {SMOOTHING_STEPS} steps"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    figure.savefig(temporary, format=out.suffix.lstrip(".") or "png")
    pyplot.close(figure)
    os.replace(temporary, out)
    return out


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Draw the loss curves of one or several runs into one picture.

    Examples:
      python -m dm05_train.plot outputs --out loss.png
      python -m dm05_train.plot run_a run_b/metrics.jsonl
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Output folders of runs, or their metrics.jsonl."""
    out: Path = Path("loss.png")
    """The picture: .png, .svg or .pdf."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, draw, and say where the picture is."""
    words = sys.argv[1:] if arguments is None else arguments
    config = parse_flags(PlotConfig, words, prog=PROG, description=inspect.getdoc(PlotConfig))
    if not config.runs:
        raise TrainError("no run given", fix="Name the output folder of a run")
    curves = [read_curve(path) for path in config.runs]
    print(f"plot       {', '.join(f'{c.label}: loss {c.losses[0]:.3f} -> {last_mean(c):.3f}' for c in curves)}")
    print(f"plot       {plot_curves(curves, config.out)}")
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]), PROG)
