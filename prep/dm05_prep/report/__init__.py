"""``dm05-prep report``: a dataset as one HTML file to look at, with no network and nothing beside it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from dm05_schemas.errors import UsageError
from dm05_schemas.files import expanded, replace_file
from dm05_schemas.findings import Finding, finding
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.report import Report
from dm05_schemas.workspace import Workspace

from dm05_prep.console import human_bytes, say
from dm05_prep.parallel import chosen_jobs
from dm05_prep.report import sections
from dm05_prep.report.dims import Vectors, find_norm_stats, measure
from dm05_prep.report.facts import EpisodeFacts, Facts, gather
from dm05_prep.report.layout import look
from dm05_prep.report.markup import plural
from dm05_prep.report.outliers import find_outliers
from dm05_prep.report.page import MOSAIC_ROWS, Head, document
from dm05_prep.report.pictures import Camera, Picture, varied
from dm05_prep.validate.output import size_of

MOSAIC_COLUMNS = 16
STRIP_FRAMES = 12
STRIP_PIXELS, TILE_PIXELS = 128, 96


@dataclass(frozen=True, kw_only=True)
class ReportResult:
    """Where the page is, and what was looked at and found."""

    path: Path
    checks: Report


def write_report(
    workspace: Workspace,
    spec: DatasetSpec,
    out: Path,
    *,
    strips: int = 6,
    jobs: int | None = None,
    progress: bool = False,
) -> ReportResult:
    """Read a dataset and write its page.

    Args:
        workspace: where the dataset lies.
        spec: the dataset.
        out: the HTML file.
        strips: how many episodes to show as film.
        jobs: processes, all cores when None.
        progress: show a bar.

    Raises:
        DataError: there are no episode files.
    """
    begin = time.monotonic()
    facts = gather(workspace, spec, jobs=jobs, progress=progress)
    stats = find_norm_stats(workspace, spec)
    layout = look(workspace, spec, facts, stats)
    found = [*facts.findings, *layout.findings]
    parts = [sections.layout(layout.entries, spec, str(spec.root(workspace)))]
    mosaic: list[Picture] = []
    if facts.episodes:
        vectors = measure(facts, spec, stats)
        camera = Camera(workspace, spec)
        try:
            mosaic = _moments(camera, varied(facts, MOSAIC_COLUMNS * MOSAIC_ROWS))
            parts += _about_frames(facts, spec, vectors, camera, strips)
        finally:
            camera.close()
        found += camera.findings if stats else [*camera.findings, *_narrow(workspace, spec, vectors)]
    checks = Report(
        dataset=spec.name,
        workspace=str(workspace.root),
        deep=False,
        episodes=len(facts.episodes),
        frames=facts.frames,
        images=0,
        seconds=time.monotonic() - begin,
        findings=tuple(dict.fromkeys(found)),
    )
    parts.append(sections.findings(checks))
    text = document(Head(spec=spec, facts=facts, checks=checks, mosaic=mosaic), parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, text.encode())
    return ReportResult(path=out, checks=checks)


def _about_frames(facts: Facts, spec: DatasetSpec, vectors: Vectors, camera: Camera, strips: int) -> list[str]:
    """The sections that need at least one episode."""
    low, high = (np.array([getattr(dim, end) for dim in vectors.state]) for end in ("low", "high"))
    odd = find_outliers(facts, low, high)
    colours = sections.task_colours(facts)
    thumbs = _thumbs(camera, facts)
    films = [camera.strip(episode, STRIP_FRAMES, STRIP_PIXELS) for episode in varied(facts, strips)]
    shown = [outlier.episode for outlier in odd[: sections.OUTLIERS_SHOWN]]
    odd_films = {episode.name: camera.strip(episode, 6, TILE_PIXELS, cameras=1) for episode in shown}
    return [
        sections.episodes(facts, colours),
        sections.tasks(facts, colours, thumbs),
        *([sections.strips(films, facts, spec, vectors, colours)] if films else []),
        sections.vectors(vectors),
        sections.outliers(odd, facts, odd_films),
    ]


def _moments(camera: Camera, episodes: list[EpisodeFacts]) -> list[Picture]:
    """A frame of each episode, from all stages of a task."""
    return [camera.glance(episode, i * 0.618 % 1.0, TILE_PIXELS) for i, episode in enumerate(episodes)]


def _narrow(workspace: Workspace, spec: DatasetSpec, vectors: Vectors) -> list[Finding]:
    """What the check of the statistics would say of dims that stand still, while there are none."""
    dims = [(f"{dim.key} {dim.number}", dim.oddity) for dim in (*vectors.state, *vectors.action)]
    return [finding("stats-narrow", spec.root(workspace), None, f"{name}: {odd}") for name, odd in dims if odd]


def _thumbs(camera: Camera, facts: Facts) -> dict[int, Picture]:
    """The first frame of a typical episode of each task that a card is shown for."""
    typical = varied(facts, min(len({e.task for e in facts.episodes}), 4 * sections.TASKS_SHOWN))
    return {episode.task: camera.glance(episode, 0.0, TILE_PIXELS) for episode in typical}


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write an HTML report of a dataset: episodes, tasks, distributions, pictures, outliers, warnings.

    One file without links to anything else, to open in any browser or to send to somebody.

    Examples:
      dm05-prep report                                  libero_pi0_all, to WORKSPACE/reports/libero_pi0_all.html
      dm05-prep report --dataset-name my_robot --out my_robot.html
    """

    dataset_name: str = "libero_pi0_all"
    """Name of the dataset (dm05-prep datasets lists them)."""
    out: Path | None = None
    """The file to write (default: WORKSPACE/reports/NAME.html)."""
    strips: int = 6
    """How many episodes to show as film strips."""
    jobs: int | None = None
    """Processes (default: all cores)."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """No progress bar, no lines but errors."""

    def run(self) -> None:
        """Do it."""
        if self.strips < 0:
            raise UsageError(f"--strips must be 0 or more, not {self.strips}")
        workspace = Workspace.resolve(self.workspace)
        spec = lookup(self.dataset_name, workspace)
        out = expanded(self.out or workspace.root / "reports" / f"{spec.name}.html").absolute()
        if out.is_dir():
            raise UsageError("is a folder", where=out, fix="Give --out the name of a file")
        result = write_report(
            workspace, spec, out, strips=self.strips, jobs=chosen_jobs(self.jobs), progress=not self.quiet
        )
        checks = result.checks
        counts = ((checks.errors, "error"), (checks.warnings, "warning"))
        told = ", ".join(plural(count, noun) for count, noun in counts if count) or "nothing to warn about"
        size = human_bytes(out.stat().st_size)
        say(f"report     {size_of(checks)}, {told}, {size}: {out}", self.quiet)
