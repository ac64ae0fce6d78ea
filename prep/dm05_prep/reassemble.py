"""The first stage of ``dm05-prep dataset``: find the archive, check what can be checked, run the engine under a bar."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace

from dm05_prep.console import human_bytes, progress, say, warn
from dm05_prep.durable import disk_bytes
from dm05_prep.errors import PrepError
from dm05_prep.extract import Extracted, ExtractOptions, extract
from dm05_prep.images import PackImages
from dm05_prep.journal import Journal, journal_path
from dm05_prep.parts import PartSet, order_parts
from dm05_prep.prefetch import held_at_most
from dm05_prep.preflight import check_parts, check_room, measure
from dm05_prep.sniff import check_head
from dm05_prep.sources.base import Source


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be reassembled, and where.

    Attributes:
        paths: the parts, when they are on this machine already.
        parts_folder: where they are copied to, when they are not.
        inside: the dataset's folder in the archive.
        resume_at: offset in the archive that this run has to read from.
    """

    source: Source
    parts: PartSet
    paths: list[Path] | None
    parts_folder: Path
    target: Path
    inside: tuple[str, ...]
    resume_at: int

    @property
    def title(self) -> str:
        """``libero.tar (9 parts, 34.9 GiB)``."""
        count = len(self.parts.parts)
        return f"{self.parts.archive} ({f'{count} parts, ' if count > 1 else ''}{human_bytes(self.parts.size)})"


def plan_of(source: Source, workspace: Workspace, spec: DatasetSpec, archive: str | None) -> Plan:
    """List the source and put the parts in order.

    Args:
        archive: the name of the archive, where there are several.

    Raises:
        PrepError: no such place, no archive, or parts that are not complete.
    """
    folder, target = spec.folder.parts, spec.root(workspace)
    inside = folder[1:] if folder[0] == "data" and len(folder) > 1 else folder
    prefer = [archive] if archive else [*inside[:1], inside[-1]]
    files, never = source.files(), threading.Event()
    try:
        parts = order_parts(files, prefer=prefer, place=source.description)
    except PrepError as error:
        for file in files:
            if file.name == error.where and file.size and not source.owns_parts:  # its content says more than its size
                check_head(source.fetch(file, target, progress=lambda count: None, stop=never), None)
        raise
    journal = Journal.load(journal_path(target))
    place = re.sub(r"[^\w.-]+", "-", source.description.partition(" (")[0]).strip("-.")
    plan = Plan(
        source=source,
        parts=parts,
        paths=None,
        parts_folder=workspace.root / "parts" / place[-120:],
        target=target,
        inside=inside,
        resume_at=journal.point.offset if journal and parts.kind == "tar" and not journal.differs(parts) else 0,
    )
    if source.owns_parts:
        return plan
    paths = [source.fetch(part.file, target, progress=lambda count: None, stop=never) for part in parts.parts]
    doomed = next((path for path in paths if path.resolve().is_relative_to(target.resolve())), None)
    if doomed:
        what = "lies in the folder that the dataset is written to and that is replaced"
        raise PrepError(what, where=doomed, fix="Move the parts elsewhere, and give that folder with --uri")
    return replace(plan, paths=paths)


def reassemble(plan: Plan, *, keep_parts: bool, images: PackImages | None, quiet: bool) -> Extracted:
    """Check, extract, and say what was done.

    Raises:
        PrepError: see :func:`dm05_prep.extract.extract`; also too little space or inodes.
    """
    if plan.paths:
        check_parts(plan.parts, plan.paths)
    _say_what_is_left(plan, quiet)
    if images is None or images.mode == "blobs":
        _check_room(plan, keep_parts)
    if plan.resume_at:
        say(f"resume     at {human_bytes(plan.resume_at)} of {plan.title}", quiet)
    total, done, copied = plan.parts.size, plan.resume_at, plan.source.owns_parts
    with (
        progress(total, "B", "download", quiet or not copied, done) as arrivals,
        progress(total, "B", "extract", quiet, done) as bar,
    ):

        def arrive(count: int) -> None:
            arrivals.update(count)

        def show(archive_bytes: int, files: int) -> None:
            bar.set_postfix_str(f"{files:,} files", refresh=False)
            bar.update(max(0, archive_bytes - bar.n))

        result = extract(
            plan.source,
            plan.parts,
            plan.target,
            plan.inside,
            parts_folder=plan.parts_folder,
            options=ExtractOptions(keep_parts=keep_parts),
            images=images,
            on_progress=show,
            on_arrival=arrive,
        )
    record = result.record
    if record.left_out:
        first = f", the first: {result.left_out_first}" if result.left_out_first else ""
        warn(f"{record.left_out} files of file browsers (._*, .DS_Store and the like) were left out{first}")
    say(f"extract    {record.files:,} files, {human_bytes(record.bytes)} of {plan.title}: {plan.target}", quiet)
    return result


def _say_what_is_left(plan: Plan, quiet: bool) -> None:
    """Name the folders of parts that this run does not use: what was fetched from a source that was then given up."""
    used = [path.resolve() for path in (plan.parts_folder, *(plan.paths or []))]
    for folder in sorted(plan.parts_folder.parent.glob("*")):
        size = sum(disk_bytes(path) for path in folder.rglob("*") if path.is_file())
        if size and not any(path.is_relative_to(folder.resolve()) for path in used):
            mend = "Delete them, unless you kept them on purpose or for a pack that reads them"
            say(f"left       {human_bytes(size)} of parts from elsewhere: {folder}. {mend}", quiet)


def _check_room(plan: Plan, keep_parts: bool) -> None:
    copied = 0
    if plan.source.owns_parts:
        all_at_once = keep_parts or plan.parts.kind != "tar"
        copied = plan.parts.size - plan.resume_at if all_at_once else held_at_most(plan.parts)
    here = plan.paths if plan.parts.kind == "tar" else None
    counted = partial(measure, plan.parts, here, plan.inside) if here else None
    check_room(
        plan.parts,
        folder=plan.target,
        parts_folder=plan.parts_folder,
        copied_bytes=copied,
        remaining_bytes=plan.parts.size - plan.resume_at,
        measure=counted,
    )
