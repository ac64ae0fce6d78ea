"""``dm05-prep dataset``: from the parts of an archive to a dataset that training can open.

::

    parts -> one stream -> jsonl/ + image/ -> index -> norm stats (-> pack)

Each stage does nothing when its output is current, so the command can be run again at any time.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.files import expanded
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.workspace import Workspace

from dm05_prep.console import human_bytes, say
from dm05_prep.extract import Extracted
from dm05_prep.index import IndexResult, build_index
from dm05_prep.index_scan import Counted
from dm05_prep.journal import Record, partial_folder, remove_partial, was_published
from dm05_prep.lock import WorkspaceLock
from dm05_prep.norm_stats import StatsResult, compute
from dm05_prep.pack import PackResult
from dm05_prep.pack_stage import images_of, make_pack
from dm05_prep.parts import Part
from dm05_prep.prefetch import READING, held_at_most
from dm05_prep.preflight import check_way
from dm05_prep.reassemble import Plan, plan_of, reassemble
from dm05_prep.room import room_at
from dm05_prep.signals import going_on
from dm05_prep.sources import SourceName, guess_source, open_source
from dm05_prep.sources.options import NO_OPTIONS, SourceOptions
from dm05_prep.summary import Summary, next_lines

Layout = Literal["jsonl", "pack", "both"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What :func:`prepare` is asked for; the fields are those of :class:`DatasetCommand`."""

    source: SourceName
    uri: str | None
    layout: Layout = "jsonl"
    archive: str | None = None
    chunk_size: int = 10
    action_mode: str | None = None
    jobs: int = 8
    keep_parts: bool = False
    force: bool = False
    options: SourceOptions = NO_OPTIONS

    @property
    def origin(self) -> str:
        """The flags that name the archive, for errors to repeat."""
        uri = self.uri
        if uri and self.source == "local":
            uri = str(expanded(uri.removeprefix("file://")).absolute())
        values = {"source": self.source, "uri": uri, "archive": self.archive, "revision": self.options.revision}
        flags = [f"--{name} {shlex.quote(value)}" for name, value in values.items() if value]
        return " ".join([*flags, "--keep-parts"] if self.keep_parts else flags)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What every stage gave; ``extracted`` and ``pack`` are None when there was nothing to extract or no pack asked."""

    extracted: Extracted | None
    index: IndexResult
    stats: StatsResult
    pack: PackResult | None

    @property
    def did_something(self) -> bool:
        """False when everything was there and current."""
        return bool(self.extracted or self.index.computed or self.stats.computed or (self.pack and self.pack.computed))


def prepare(workspace: Workspace, spec: DatasetSpec, request: Request, *, quiet: bool = False) -> Prepared:
    """Bring the dataset to completion, doing only what is missing, and say what was done stage by stage.

    Raises:
        PrepError: the source or the archive is at fault, another run holds the workspace, or the disk is too small.
        DataError: a frame is at fault.
    """
    target = spec.root(workspace)
    must_extract = request.force or _must_extract(target, request.layout)
    for folder in (workspace.root, target, partial_folder(target)):
        check_way(folder, writes=must_extract)
    plan = None
    if must_extract:
        if not request.force:
            _refuse_foreign(target, workspace, spec)
        source = open_source(request.source, request.uri, kind="dataset", jobs=request.jobs, options=request.options)
        plan = plan_of(source, workspace, spec, request.archive)
    with _locked(workspace), going_on(not request.force):
        if plan and not request.force and not _must_extract(target, request.layout):
            plan = None  # another run has completed it meanwhile
        extracted = _extract(plan, workspace, spec, request, quiet) if plan else None
        remove_partial(target)
        return _stages(extracted, workspace, spec, request, quiet)


def _must_extract(target: Path, layout: Layout) -> bool:
    record = Record.load(target)
    return record is None or was_published(target) or (record.mode != "files" and layout != "pack")


def _refuse_foreign(target: Path, workspace: Workspace, spec: DatasetSpec) -> None:
    """A folder that this tool did not complete is not written to, and not taken for complete."""
    if target.exists() and Record.load(target) is None and any(target.iterdir()):
        place = f"--dataset-name {spec.name} --workspace {workspace.root}"
        raise DataError(
            "is not empty and was not completed by this tool",
            where=target,
            fix=f"Replace it with --force, move it away, or use it as it is: dm05-prep norm-stats {place}",
        )


def _extract(plan: Plan, workspace: Workspace, spec: DatasetSpec, request: Request, quiet: bool) -> Extracted:
    if request.force:
        remove_partial(plan.target)
        plan = replace(plan, resume_at=0)
    images = None
    if request.layout == "pack":
        images = images_of(plan, workspace, spec, request.keep_parts, request.origin)
    return reassemble(plan, keep_parts=request.keep_parts, images=images, quiet=quiet)


def _stages(
    extracted: Extracted | None, workspace: Workspace, spec: DatasetSpec, request: Request, quiet: bool
) -> Prepared:
    """Everything that follows extraction."""
    mode = request.action_mode or spec.action_mode
    index = build_index(workspace, spec, known=_known(extracted, workspace, spec), progress=not quiet)
    if index.computed:
        say(f"index      {index.episodes:,} episodes, {index.frames:,} frames: {index.path}", quiet)
    stats = compute(workspace, spec, request.chunk_size, mode, progress=not quiet)
    if stats.computed:
        what = f"{stats.stats.state.count:,} samples, chunk size {request.chunk_size}, {mode}"
        say(f"norm-stats {what}: {stats.json}", quiet)
    pack = None
    if request.layout != "jsonl":
        pack = make_pack(workspace, spec, Record.load(spec.root(workspace)), force=request.force, quiet=quiet)
        if pack.computed:
            say(
                f"pack       {pack.info.frames:,} frames, {human_bytes(pack.image_bytes)} of images: {pack.folder}",
                quiet,
            )
    return Prepared(extracted=extracted, index=index, stats=stats, pack=pack)


def _known(extracted: Extracted | None, workspace: Workspace, spec: DatasetSpec) -> dict[Path, Counted]:
    """What was counted of episode files while they were written."""
    folder, prefix = spec.jsonl(workspace), f"{spec.jsonl_dir}/"
    counted = extracted.counted if extracted else {}
    return {folder / path.removeprefix(prefix): found for path, found in counted.items() if path.startswith(prefix)}


def _peak_bytes(done: Prepared, request: Request) -> int:
    """Most disk space that this run took: extracted files, parts that were copied, and images copied to a pack."""
    if not done.extracted:
        return 0
    record = done.extracted.record
    parts = done.extracted.peak_part_bytes
    if request.keep_parts and request.source != "local":
        parts = record.archive_bytes
    if record.mode == "parts":  # images stay where they are; what else was written is small
        return parts
    packed = done.pack.image_bytes if done.pack and done.pack.computed and record.mode == "files" else 0
    return max(record.bytes + parts, record.bytes + packed + (parts if request.keep_parts else 0))


def describe(workspace: Workspace, spec: DatasetSpec, request: Request) -> list[str]:
    """What :func:`prepare` would do, a line a stage; looks at the source, writes nothing."""
    target = spec.root(workspace)
    then = "index, norm stats" + (", pack" if request.layout != "jsonl" else "")
    if not request.force and not _must_extract(target, request.layout):
        return [
            f"dataset    {spec.name} is already extracted: {target}",
            f"then       {then}, each only if not current",
        ]
    source = open_source(request.source, request.uri, kind="dataset", jobs=request.jobs, options=request.options)
    plan = plan_of(source, workspace, spec, request.archive)
    lines = [f"source     {source.description}: {plan.title}"]
    lines += [f"           {part.name}  {human_bytes(part.file.size)}" for part in plan.parts.parts]
    held = 0
    if source.owns_parts:
        held = held_at_most(plan.parts)
        held = plan.parts.size if request.keep_parts else held
        kept = "all of them, kept" if request.keep_parts else "at most one at a time and the start of the next"
        needed = [part for part in plan.parts.parts if request.force or part.end > plan.resume_at]
        size, here = sum(part.file.size for part in needed), sum(_bytes_here(plan, part) for part in needed)
        there = f"{human_bytes(here)} of it are there, " if here else ""
        lines.append(f"download   {human_bytes(size)} to {plan.parts_folder}, {there}{kept}")
    begun = f", going on at {human_bytes(plan.resume_at)}" if plan.resume_at and not request.force else ""
    lines.append(f"extract    {spec.name} to {target}{begun}")
    left = held + plan.parts.size - plan.resume_at
    peak = f"{human_bytes(held + plan.parts.size)} (dataset {human_bytes(plan.parts.size)}, parts {human_bytes(held)})"
    lines.append(f"disk       {human_bytes(room_at(target).bytes)} are free now; taken at peak: up to {peak}")
    if left > (free := room_at(target).bytes):
        lines.append(f"           perhaps not enough: up to {human_bytes(left - free)} are missing")
    return [*lines, f"then       {then}"]


def _bytes_here(plan: Plan, part: Part) -> int:
    """How much of a part that has to be copied is on this machine already."""
    path = plan.parts_folder / part.name
    if path.is_file() or path.with_name(path.name + READING).is_file():
        return part.file.size
    from dm05_prep.sources.partfile import arrived  # with all of HTTP and TLS behind it

    return arrived(path)


@contextlib.contextmanager
def _locked(workspace: Workspace) -> Iterator[None]:
    """Hold the workspace and its data folder, which another workspace may share; leaves no empty folders behind."""
    homes = dict.fromkeys([workspace.root, workspace.data])
    made = [folder for home in homes for folder in (home, *home.parents) if not folder.exists()]
    try:
        with contextlib.ExitStack() as stack:
            for home in homes:
                home.mkdir(parents=True, exist_ok=True)
                stack.enter_context(WorkspaceLock(home))
            yield
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True, kw_only=True)
class DatasetCommand:
    """Fetch a dataset, reassemble and lay it out, then index it and compute its statistics.

    The parts of the archive are read as one stream while later ones still arrive, and (unless kept) deleted as soon as
    their content is safe on disk. Killed at any moment, the same command goes on from where it was; when everything is
    there, it does nothing. Parts in a local folder are never changed.

    Examples:
      dm05-prep dataset --source hf --workspace dm05
      dm05-prep dataset --source bos --subset libero_goal --keep-parts
      dm05-prep dataset --source local --uri PARTS --workspace dm05
      dm05-prep dataset --uri hf://Dexmal/libero --dry-run
    """

    source: SourceName | None = None
    """Where from: Baidu BOS, the Hugging Face hub or a local folder (default: what --uri looks like, else bos)."""
    uri: str | None = None
    """bos://bucket/prefix/, a hub repository, or a folder with parts (default: the released LIBERO)."""
    subset: Annotated[str, tyro.conf.arg(aliases=["--dataset-name"])] = "libero_pi0_all"
    """Name of the dataset to lay out (dm05-prep datasets lists them)."""
    archive: str | None = None
    """Which archive to read, where the source holds several."""
    layout: Layout = "jsonl"
    """Files for each image, a pack without them (from local or kept parts: images stay in the parts), or both."""
    chunk_size: int = 10
    """Chunk size H that the statistics are for."""
    action_mode: Literal["absolute", "relative"] | None = None
    """Mode that the statistics are for (default: the dataset's own)."""
    jobs: int = 8
    """Connections at once."""
    keep_parts: bool = False
    """Keep downloaded parts in WORKSPACE/parts."""
    dry_run: bool = False
    """Say what would be done; write nothing."""
    force: bool = False
    """Start over, also when the dataset is complete; what is there stays until the new one is."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """No progress bar, no lines but errors."""
    access: Annotated[SourceOptions, tyro.conf.OmitArgPrefixes] = NO_OPTIONS

    def run(self) -> None:
        """Do it."""
        started = time.monotonic()
        if self.jobs < 1 or self.chunk_size < 1:
            raise UsageError("--jobs and --chunk-size must be 1 or more")
        workspace = Workspace.resolve(self.workspace)
        spec = lookup(self.subset, workspace)
        if self.action_mode == "relative" and spec.state_dim != spec.action_dim:
            dims = f"{spec.action_dim} action and {spec.state_dim} state dims"
            what = f"relative mode needs as many of both, {spec.name} has {dims}"
            raise UsageError(what, where="--action-mode", fix="Use --action-mode absolute")
        request = Request(
            source=self.source or guess_source(self.uri),
            uri=self.uri,
            layout=self.layout,
            archive=self.archive,
            chunk_size=self.chunk_size,
            action_mode=self.action_mode,
            jobs=self.jobs,
            keep_parts=self.keep_parts,
            force=self.force,
            options=self.access,
        )
        if self.dry_run:
            for line in describe(workspace, spec, request):
                say(line)
            return
        done = prepare(workspace, spec, request, quiet=self.quiet)
        extracted = done.extracted
        summary = Summary(
            dataset=spec.name,
            episodes=done.index.episodes,
            frames=done.index.frames,
            files=extracted.record.files if extracted else 0,
            bytes=extracted.record.bytes if extracted else 0,
            peak_bytes=_peak_bytes(done, request),
            seconds=time.monotonic() - started,
            did_something=done.did_something,
        )
        for line in [*summary.lines(), *next_lines(workspace, request.source, spec.name)]:
            say(line, self.quiet)
