"""Deep validation: every frame of every episode and every image they name, spread over all cores."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import crc32c
import numpy as np
from dm05_schemas.episode import Episode, scan_episode
from dm05_schemas.findings import Finding, finding
from dm05_schemas.index import FileState, Index
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.video import VideoReader

from dm05_prep.parallel import batches, default_jobs, ordered_map
from dm05_prep.validate.image_checks import NamedFile, check_image, read_frame, read_image

# Bytes of JSON a task; the images of its frames are some forty times as much.
_BATCH_BYTES = 1 << 21

Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class EpisodeTask:
    """One episode file to check; ``rows`` chooses the frames whose images are opened, None all.

    The numbers are those of the index, None without one.
    """

    path: Path
    due_frames: int | None
    due_crc32c: int | None
    rows: Sequence[int] | None


@dataclass(frozen=True, kw_only=True)
class Task:
    """Some episodes, and how deep to look; ``images`` None leaves images alone."""

    episodes: Sequence[EpisodeTask]
    spec: DatasetSpec
    images: Path | None
    decode: bool


@dataclass(kw_only=True)
class Outcome:
    """What a task found. ``sizes`` counts (width, height) by camera and episode file."""

    findings: list[Finding] = field(default_factory=list)
    frames: int = 0
    images: int = 0
    sizes: dict[tuple[str, str], Counter[Size]] = field(default_factory=dict)


def check_episodes(
    spec: DatasetSpec,
    jsonl: Path,
    files: Mapping[str, FileState],
    index: Index | None,
    *,
    images: Path | None,
    sample: int | None,
    decode: bool,
    jobs: int | None,
) -> Iterator[tuple[int, Outcome]]:
    """Outcomes of all episodes in order, each with the number of bytes of JSON that it covers."""
    entries = index.entries if index is not None else {}
    counts = {name: entry.frames for name, entry in entries.items()}
    sums = {name: entry.crc32c for name, entry in entries.items()}
    chosen = _sampled_rows(files, counts, sample)
    work = list(batches(files, lambda name: max(files[name].size, 0), _BATCH_BYTES))
    tasks = [
        Task(
            episodes=[
                EpisodeTask(
                    path=jsonl / name,
                    due_frames=counts.get(name),
                    due_crc32c=sums.get(name),
                    rows=chosen.get(name),
                )
                for name in names
            ],
            spec=spec,
            images=images,
            decode=decode,
        )
        for names in work
    ]
    workers = (jobs or default_jobs()) if len(tasks) > 1 else 1
    for names, outcome in zip(work, ordered_map(check_task, tasks, workers), strict=True):
        yield sum(max(files[name].size, 0) for name in names), outcome


def odd_sizes(outcomes: Sequence[Outcome]) -> list[Finding]:
    """Warnings about images whose size differs from that of most images of their camera."""
    totals: dict[str, Counter[Size]] = {}
    for outcome in outcomes:
        for (_, camera), counter in outcome.sizes.items():
            totals.setdefault(camera, Counter()).update(counter)
    usual = {camera: max(sorted(counter), key=counter.__getitem__) for camera, counter in totals.items()}
    found = []
    for outcome in outcomes:
        for (path, camera), counter in outcome.sizes.items():
            for (width, height), count in sorted(counter.items()):
                if (width, height) != usual[camera]:
                    most = "{}x{}".format(*usual[camera])
                    which = f"{count} image{'s' if count > 1 else ''} of {camera}"
                    detail = f"{which} {'are' if count > 1 else 'is'} {width}x{height}, most are {most}"
                    found.append(finding("image-size", path, None, detail))
    return found


def check_task(task: Task) -> Outcome:
    """Check some episodes (in a process of its own)."""
    outcome = Outcome()
    for item in task.episodes:
        episode, findings = _scan(item, task.spec)
        outcome.findings += findings
        if episode is None:
            continue
        outcome.frames += len(episode)
        if item.due_frames is not None and item.due_frames != len(episode):
            detail = f"has {len(episode)} frames, the index says {item.due_frames}"
            outcome.findings.append(finding("index-count", item.path, None, detail))
        if task.images is not None:
            rows = range(len(episode)) if item.rows is None else [row for row in item.rows if row < len(episode)]
            _check_pictures(outcome, episode, rows, task, task.images)
    return outcome


def _scan(item: EpisodeTask, spec: DatasetSpec) -> tuple[Episode | None, list[Finding]]:
    """An episode and what is wrong with it, also that its content is not what the index was made from."""
    try:
        data = item.path.read_bytes()
    except OSError as error:
        return None, [finding("unreadable", item.path, None, f"cannot be read: {error.strerror or error}")]
    episode, findings = scan_episode(item.path, spec, data=data)
    if item.due_crc32c is not None and item.due_crc32c != crc32c.crc32c(data):
        findings.append(finding("index-content", item.path, None, "is not what the index says, though its time is"))
    return episode, findings


def _check_pictures(outcome: Outcome, episode: Episode, rows: Sequence[int], task: Task, root: Path) -> None:
    seen: set[str] = set()
    videos: dict[str, tuple[int, NamedFile]] = {}
    for row in rows:
        for view, camera in enumerate(task.spec.image_keys):
            url, number = episode.urls[row][view], int(episode.frame_idx[row, view])
            named = NamedFile(root, url, episode.path, row, camera)
            if number >= 0:
                if url not in videos or number > videos[url][0]:
                    videos[url] = number, named
            elif url not in seen:
                seen.add(url)
                _check_picture(outcome, named, task.decode)
    outcome.images += len(seen) + len(videos)
    for number, named in videos.values():
        with contextlib.closing(VideoReader()) as reader:
            frame = read_frame(reader, named, number)
        if isinstance(frame, Finding):
            outcome.findings.append(frame)


def _check_picture(outcome: Outcome, named: NamedFile, decode: bool) -> None:
    data = read_image(named)
    if isinstance(data, Finding):
        outcome.findings.append(data)
        return
    header, problems = check_image(data, named.url, decode)
    outcome.findings += map(named.at_file, problems)
    if header is not None:
        counter = outcome.sizes.setdefault((str(named.episode), named.camera), Counter())
        counter[header.width, header.height] += 1


def _sampled_rows(
    files: Mapping[str, FileState], counts: Mapping[str, int], sample: int | None
) -> dict[str, list[int]]:
    """Rows by file of ``sample`` frames of the whole dataset, the same ones every time; empty for all frames."""
    if sample is None:
        return {}
    lengths = [counts.get(name, 0) for name in files]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if lengths else 0
    picked = np.sort(np.random.default_rng(0).choice(total, min(sample, total), replace=False))
    rows: dict[str, list[int]] = {name: [] for name in files}
    names = list(files)
    for place, number in zip(picked, np.searchsorted(ends, picked, side="right"), strict=True):
        rows[names[number]].append(int(place - ends[number] + lengths[number]))
    return rows
