"""The pack as a stage of ``dm05-prep dataset``: from the laid out images, or from images that never became files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from dm05_schemas.errors import DataError
from dm05_schemas.files import replace_file
from dm05_schemas.pack import ANY_WORKSPACE, PACK_DIR, SAME_SOURCE, FileRecord
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace

from dm05_prep.images import STAGING, ImageSink, ImageState, PackImages
from dm05_prep.index import build_index
from dm05_prep.journal import Record
from dm05_prep.pack import PackResult, build_pack, current_pack, publish_archive_pack
from dm05_prep.pack_images import ArchiveImages, ArchiveState, part_records
from dm05_prep.reassemble import Plan

_PARTS_NAME = "parts.json"  # in the staging folder: the files that the pack will name, and where they are from


def images_of(plan: Plan, workspace: Workspace, spec: DatasetSpec, keep_parts: bool, origin: str) -> PackImages:
    """How the engine hands images to a pack: in the parts where those stay and are plain tar, else copied.

    ``origin`` are the flags that say where the archive is from, for errors to repeat.
    """
    stay = plan.parts.kind == "tar" and (keep_parts or not plan.source.owns_parts)
    records = _part_records(plan, workspace, spec) if stay else []

    def make(folder: Path, state: ImageState | None) -> ImageSink:
        held = {"origin": origin, "parts": [asdict(record) for record in records]}
        replace_file(folder / _PARTS_NAME, json.dumps(held).encode())
        return ArchiveImages(folder, records, ArchiveState(*state) if state else None)

    return PackImages(mode="parts" if stay else "blobs", image_dir=spec.image_dir, jsonl_dir=spec.jsonl_dir, make=make)


def make_pack(
    workspace: Workspace, spec: DatasetSpec, record: Record | None, *, force: bool, quiet: bool
) -> PackResult:
    """The pack of a dataset whose episode files are in place, unless the one on disk is current.

    Raises:
        DataError: an unacceptable frame or image; or images that are nowhere any more.
    """
    root = spec.root(workspace)
    staging = root / STAGING
    if record is None or record.mode == "files":
        return build_pack(workspace, spec, force=force, progress=not quiet)
    command = f"Run dm05-prep dataset --subset {spec.name} --layout pack --force"
    if record.images is None or not staging.is_dir():
        held = current_pack(root / PACK_DIR, spec, build_index(workspace, spec, progress=not quiet).fingerprint)
        if held is None:
            what = "not current, and its images were never files"
            raise DataError(what, where=root / PACK_DIR, fix=f"{command} {workspace.flag} {SAME_SOURCE}")
        return held
    held = json.loads((staging / _PARTS_NAME).read_bytes())
    images = ArchiveImages(staging, [FileRecord(**part) for part in held["parts"]], ArchiveState(*record.images))
    rebuild = f"{command} {held['origin']} {ANY_WORKSPACE}"
    pack = publish_archive_pack(workspace, spec, images, staging, rebuild=rebuild, progress=not quiet)
    (pack.folder / _PARTS_NAME).unlink(missing_ok=True)
    return pack


def _part_records(plan: Plan, workspace: Workspace, spec: DatasetSpec) -> list[FileRecord]:
    paths = plan.paths or [plan.parts_folder / part.name for part in plan.parts.parts]
    sizes = [part.file.size for part in plan.parts.parts]
    return part_records(list(zip(paths, sizes, strict=True)), spec.root(workspace) / PACK_DIR, workspace)
