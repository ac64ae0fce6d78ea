"""The table, JSON and bar chart of ``dm05-train bench``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dm05_train.bench import Result

HEAD = (
    "case",
    "step s",
    "samples/s",
    "speed-up",
    "fwd+bwd s",
    "clip+update s",
    "first step s",
    "peak GiB",
    "of matmul",
    "loss",
)


def rows(results: Sequence[Result], *, batch: int, flops: float, rate: float) -> list[tuple[str, ...]]:
    """The cells of the table; speed-up over the first case, share of the measured matmul rate."""
    base = results[0].step_seconds if results else 1.0
    return [
        (
            f"{r.name} ({r.mode})",
            f"{r.step_seconds:.4f}",
            f"{batch / r.step_seconds:.1f}",
            f"{base / r.step_seconds:.2f}x",
            f"{r.backward_seconds:.4f}",
            f"{r.update_seconds:.4f}",
            f"{r.first_step_seconds:.1f}",
            f"{r.peak_gib:.1f}",
            f"{flops / r.step_seconds / rate:.0%}",
            f"{r.loss:.5f}",
        )
        for r in results
    ]


def table(results: Sequence[Result], *, batch: int, flops: float, rate: float) -> str:
    """A Markdown table."""
    lines = [HEAD, tuple("---" for _ in HEAD), *rows(results, batch=batch, flops=flops, rate=rate)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def write(results: Sequence[Result], folder: Path, *, facts: dict[str, Any]) -> None:
    """bench.json and bench.png."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"facts": facts, "results": [asdict(r) for r in results]}
    (folder / "bench.json").write_text(json.dumps(body, indent=1) + "\n", "utf-8")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.32 * len(results)), layout="constrained")
    names = [f"{r.name} ({r.mode})" for r in results][::-1]
    backward, update = ([getattr(r, f"{part}_seconds") for r in results][::-1] for part in ("backward", "update"))
    axes.barh(names, backward, label="forward + backward")
    axes.barh(names, update, left=backward, label="clip + update")
    axes.set_xlabel(f"seconds a step, batch {facts['per_device_batch']}, {facts['device']}")
    axes.legend()
    figure.savefig(folder / "bench.png", dpi=120)
    pyplot.close(figure)
