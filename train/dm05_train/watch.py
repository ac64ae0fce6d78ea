"""What the numbers of finished steps lead to: rows of metrics, the report of a skipped step, the end of a run that only
skips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dm05_train.env import give_way, together
from dm05_train.errors import TrainError
from dm05_train.metrics import Metrics, StepResult
from dm05_train.saver import Saver

if TYPE_CHECKING:
    from dm05_train.loop import Run

MAX_SKIPS = 3


class Watch:
    """Turns the numbers of finished steps into rows, and ends a run that only skips."""

    def __init__(self, run: Run, saver: Saver, metrics: Metrics) -> None:
        self.run, self.saver, self.metrics = run, saver, metrics
        self.skips = 0

    def account(self, results: list[StepResult]) -> None:
        """Write the rows of some steps, oldest first; the same steps on every rank.

        Raises:
            TrainError: three steps in a row were skipped.
        """
        if not results:
            return
        run = self.run
        batch = run.config.global_batch(run.world.size)
        for result in results:
            self.skips = self.skips + 1 if result.skipped else 0
            samples = run.samples - (run.step - result.step) * batch
            row: dict[str, Any] = {
                "step": result.step,
                "loss": result.loss,
                "lr": result.lr,
                "grad_norm": result.grad_norm,
                "samples": samples,
                "epoch": samples / run.dataset_size,
                "step_seconds": round(result.seconds, 6),
                "samples_per_second": round(batch / result.seconds, 3) if result.seconds > 0 else None,
            }
            if result.skipped:
                row |= {"skipped": True, "sample_ids": self._sample_ids(result.step)}
                self.metrics.say(f"step {result.step} skipped: gradients not finite; samples {row['sample_ids']}")
            self.metrics.write(row)
            if self.skips >= MAX_SKIPS:
                self._give_up(result.step)
        shown = results[-1]
        trainer = run.config.trainer_config
        if shown.step % trainer.logging_steps == 0 or len(results) > 1 or shown.step == trainer.num_train_steps:
            self.metrics.show(shown.step, loss=f"{shown.loss:.4f}", lr=f"{shown.lr:.2e}", s=f"{shown.seconds:.3f}")
            if times := self.run.timer.read():
                parts = ", ".join(f"{part} {1000 * seconds:.1f}" for part, seconds in times.items())
                self.metrics.say(f"ms a step: {parts}, together {1000 * sum(times.values()):.1f}")

    def _sample_ids(self, step: int) -> list[int]:
        """The global batch of a recent step: every rank's samples (a collective; all ranks skip together)."""
        mine = next((ids for number, ids in self.run.recent if number == step), [])
        if self.run.world.size == 1:
            return mine
        everyone: list[list[int]] = [[] for _ in range(self.run.world.size)]
        dist.all_gather_object(everyone, mine)
        return [i for ids in everyone for i in ids]

    def _give_up(self, step: int) -> None:
        together(self.run.world, self.saver.wait)
        if not self.run.world.is_main:
            give_way()
        good, lower = self.saver.last, "a lower --optimizer-config.base-lr"
        if good is None:
            fix = f"No checkpoint was written yet: start again with {lower}"
        else:
            fix = f"The last good checkpoint is {good}: continue with --model-config.model-name-or-path and {lower}"
        what = f"{MAX_SKIPS} steps in a row, up to step {step}, had gradients that are not finite"
        raise TrainError(what, where=self.metrics.output / "metrics.jsonl", fix=fix)
