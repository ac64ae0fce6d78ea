"""Reading a whole dataset once for the report: every frame's vectors and prompts, no images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import crc32c
import numpy as np
from dm05_schemas.episode import Episode, scan_episode
from dm05_schemas.findings import Finding, finding
from dm05_schemas.index import FileState, require_episodes
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace
from numpy.typing import NDArray

from dm05_prep.console import progress as progress_bar
from dm05_prep.parallel import batches, default_jobs, ordered_map

BATCH_BYTES = 1 << 24
# Starting processes takes longer than reading less than this much.
PARALLEL_BYTES = 1 << 26

Float32 = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class EpisodeFacts:
    """One acceptable episode. ``start`` is its first row in the dataset's arrays, ``task`` indexes its prompts."""

    name: str
    frames: int
    start: int
    task: int
    prompts: int
    human_frames: int
    checksum: int

    @property
    def rows(self) -> slice:
        """Its rows in the dataset's arrays."""
        return slice(self.start, self.start + self.frames)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt and what is said with it: the number of episodes it leads in, and of frames that carry it."""

    text: str
    episodes: int
    frames: int


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A dataset as read. Letters: N frames of all acceptable episodes, S state dims, A action dims.

    state float32 [N, S]; action float32 [N, A], NaN in rows of episodes without actions; has_action counts episodes;
    refused counts episode files that the loader would refuse.
    """

    episodes: tuple[EpisodeFacts, ...]
    tasks: tuple[Task, ...]
    state: Float32
    action: Float32
    has_action: int
    refused: int
    jsonl_bytes: int
    findings: tuple[Finding, ...]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [E], frames of each episode."""
        return np.array([episode.frames for episode in self.episodes], dtype=np.int64)

    @property
    def frames(self) -> int:
        """Frames of all acceptable episodes."""
        return len(self.state)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What a worker hands back of one file; ``episode`` is None when it was refused."""

    name: str
    size: int
    checksum: int
    episode: Episode | None
    findings: list[Finding]


def gather(workspace: Workspace, spec: DatasetSpec, *, jobs: int | None = None, progress: bool = False) -> Facts:
    """Read every episode of a dataset; some 100 bytes a frame are held.

    Args:
        workspace: where the dataset lies.
        spec: the dataset.
        jobs: processes, all cores when None.
        progress: show a bar.

    Raises:
        DataError: there is no folder of episodes, or none in it.
    """
    folder = spec.jsonl(workspace)
    present = require_episodes(workspace, spec)
    total = sum(max(state.size, 0) for state in present.values())
    workers = (jobs or default_jobs()) if total >= PARALLEL_BYTES else 1
    work = ([(folder, name, spec) for name in names] for names in _batches(present))
    reads: list[_Read] = []
    with progress_bar(len(present), "episodes", "report", quiet=not progress) as bar:
        for batch in ordered_map(_read_files, work, workers):
            reads += batch
            bar.update(len(batch))
    return _join(reads, spec)


def _batches(present: dict[str, FileState]) -> list[list[str]]:
    return list(batches(present, lambda name: max(present[name].size, 1), BATCH_BYTES))


def _read_files(work: Sequence[tuple[Path, str, DatasetSpec]]) -> list[_Read]:
    return [_read_file(*item) for item in work]


def _read_file(folder: Path, name: str, spec: DatasetSpec) -> _Read:
    path = folder / name
    try:
        data = path.read_bytes()
    except OSError as error:
        lost = finding("unreadable", path, None, f"cannot be read: {error.strerror or error}")
        return _Read(name=name, size=0, checksum=0, episode=None, findings=[lost])
    episode, findings = scan_episode(path, spec, data=data)
    if episode is not None:
        episode = replace(episode, urls=[])  # most of what would go through the pipe, and read again for the few shown
    return _Read(name=name, size=len(data), checksum=crc32c.crc32c(data), episode=episode, findings=findings)


def _join(reads: list[_Read], spec: DatasetSpec) -> Facts:
    """Number prompts in the order they turn up, and put all frames one after the other."""
    numbers: dict[str, int] = {}
    leads: list[int] = []
    spoken: list[int] = []
    episodes: list[EpisodeFacts] = []
    kept = [(read, read.episode) for read in reads if read.episode is not None]
    start = 0
    for read, episode in kept:
        counts = np.bincount(episode.prompt_ids, minlength=len(episode.prompts))
        ids = [numbers.setdefault(prompt, len(numbers)) for prompt in episode.prompts]
        leads += [0] * (len(numbers) - len(leads))
        spoken += [0] * (len(numbers) - len(spoken))
        for number, frames in zip(ids, counts.tolist(), strict=True):
            spoken[number] += frames
        task = ids[int(counts.argmax())]
        leads[task] += 1
        episodes.append(
            EpisodeFacts(
                name=read.name,
                frames=len(episode),
                start=start,
                task=task,
                prompts=len(ids),
                human_frames=int((~episode.is_robot).sum()),
                checksum=read.checksum,
            )
        )
        start += len(episode)
    action = np.full((start, spec.action_dim), np.nan, dtype=np.float32)
    for facts, (_, episode) in zip(episodes, kept, strict=True):
        if episode.action is not None:
            action[facts.rows] = episode.action
    return Facts(
        episodes=tuple(episodes),
        tasks=tuple(Task(text=text, episodes=leads[number], frames=spoken[number]) for text, number in numbers.items()),
        state=np.concatenate([episode.state for _, episode in kept])
        if kept
        else np.empty((0, spec.state_dim), dtype=np.float32),
        action=action,
        has_action=sum(episode.action is not None for _, episode in kept),
        refused=len(reads) - len(kept),
        jsonl_bytes=sum(read.size for read in reads),
        findings=tuple(found for read in reads for found in read.findings),
    )
