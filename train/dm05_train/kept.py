"""What a run that fails had saved, and how to go on from that."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from dm05_train.checkpoint import complete_checkpoints
from dm05_train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What an output folder held when a run began; what is there later and was not then is the run's own."""

    output: Path
    resume: str
    before: tuple[Path, float] | None

    @classmethod
    def now(cls, config: TrainConfig, output: Path) -> Kept:
        """To be made when a run begins."""
        return cls(output=output, resume=config.trainer_config.resume, before=_newest(output))

    def advice(self) -> str:
        """How to go on after a failure, true of this moment."""
        newest = _newest(self.output)
        if newest is None or newest == self.before:
            return (
                f"No checkpoint of this run is in {self.output} on {socket.gethostname()}: when that is mended, start "
                "again with the same command"
            )
        if self.resume == "latest":
            return f"{newest[0]} was saved: the same command goes on from there"
        instead = " in place of --trainer-config.resume never" if self.resume == "never" else ""
        return f"{newest[0]} was saved: go on from there with --model-config.model-name-or-path {newest[0]}{instead}"


def _newest(output: Path) -> tuple[Path, float] | None:
    """The checkpoint saved last, and when."""
    found = complete_checkpoints(output)
    return (found[-1][0], found[-1][1].saved) if found else None
