"""The last lines of ``dm05-prep dataset``: what there is now, what it took, what to run next."""

from __future__ import annotations

from dataclasses import dataclass

from dm05_schemas.workspace import Workspace

from dm05_prep.console import human_bytes, human_time


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Numbers of a finished run; ``peak_bytes`` counts the dataset and copied parts, not parts of the user's own."""

    dataset: str
    episodes: int
    frames: int
    files: int
    bytes: int
    peak_bytes: int
    seconds: float
    did_something: bool

    def lines(self) -> list[str]:
        """What to print."""
        counts = f"{self.episodes:,} episodes, {self.frames:,} frames"
        if not self.did_something:
            return [f"dataset    {self.dataset} is already complete ({counts}): nothing to do"]
        data = f"{self.files:,} files, {human_bytes(self.bytes)}, " if self.files else ""
        peak = f"peak disk {human_bytes(self.peak_bytes)}, " if self.peak_bytes else ""
        return [f"summary    {counts}, {data}{peak}{human_time(self.seconds)}"]


def next_lines(workspace: Workspace, source: str, dataset: str) -> list[str]:
    """The commands that come after this one."""
    name = "" if dataset == "libero_pi0_all" else f" --data-config.dataset-name {dataset}"
    commands = [f"dm05-train{name} {workspace.flag}"]
    if not (workspace.checkpoint_dir / "config.json").is_file():
        commands.insert(0, f"dm05-prep model{f' --source {source}' if source != 'local' else ''} {workspace.flag}")
    return [f"{'next' if index == 0 else '':<10} {command}" for index, command in enumerate(commands)]
