"""``dm05-prep pack``: the memory-mapped form of a dataset (its layout: :mod:`dm05_schemas.pack`).

The images are copied into blobs, or stay where they are in the parts of a tar archive: then
:class:`~dm05_prep.pack_images.ArchiveImages` was told of every member while the archive was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dm05_schemas.commands import aiming
from dm05_schemas.episode import Episode, read_episode
from dm05_schemas.errors import DataError, mending
from dm05_schemas.files import naming
from dm05_schemas.frame_table import CameraColumns
from dm05_schemas.index import index_path, read_index
from dm05_schemas.pack import (
    ANY_WORKSPACE,
    PACK_DIR,
    SAME_SOURCE,
    FileRecord,
    PackInfo,
    check_files,
    check_matches,
    read_info,
)
from dm05_schemas.pack_writer import PackWriter, put_in_place, replaced_folder
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.workspace import Workspace

from dm05_prep.console import human_bytes, say
from dm05_prep.console import progress as progress_bar
from dm05_prep.index import build_index
from dm05_prep.pack_images import ArchiveImages, CopiedImages


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """The pack of a dataset; ``computed`` is False when the one on disk was already right."""

    folder: Path
    info: PackInfo
    image_bytes: int
    computed: bool


class Images(Protocol):
    """Where the images of a pack come from and where they lie in it."""

    largest_image_bytes: int

    def columns(self, episode: Episode) -> list[CameraColumns]:
        """The camera columns of an episode.

        Raises:
            DataError: an image is missing or is none; names episode and frame.
        """

    def finish(self) -> list[FileRecord]:
        """The blobs, complete on disk."""


def build_pack(workspace: Workspace, spec: DatasetSpec, *, force: bool = False, progress: bool = False) -> PackResult:
    """Write the pack of a laid out dataset, images copied into blobs, unless the one on disk is right.

    The index is brought up to date first. A pack that is replaced stays in place until the new one is complete.

    Args:
        workspace: where the dataset lies.
        spec: the dataset.
        force: write it even if it is right.
        progress: show a bar.

    Raises:
        DataError: an unacceptable frame or image, with file and line.
    """
    source = build_index(workspace, spec, progress=progress).fingerprint
    folder = spec.root(workspace) / PACK_DIR
    held = None if force else current_pack(folder, spec, source)
    if held is not None:
        return held
    if not spec.images(workspace).is_dir():
        again = f"Run dm05-prep dataset --subset {spec.name} {workspace.flag}"
        fix = f"{again} (--layout pack --force {SAME_SOURCE} for images that stay in an archive)"
        raise DataError("there is no folder of images to copy from", where=spec.images(workspace), fix=fix)
    again = f"dm05-prep dataset --subset {spec.name} {workspace.flag} --force {SAME_SOURCE}"
    with mending(f"Put a good one there or remove the episode, or run {again}"), replaced_folder(folder) as new:
        images = CopiedImages(new, spec.images(workspace), spec)
        rebuild = f"Run dm05-prep pack --dataset-name {spec.name} {ANY_WORKSPACE} --force"
        return write_pack(new, workspace, spec, images, source=source, rebuild=rebuild, progress=progress)


def publish_archive_pack(
    workspace: Workspace,
    spec: DatasetSpec,
    images: ArchiveImages,
    staging: Path,
    *,
    rebuild: str,
    progress: bool = False,
) -> PackResult:
    """Complete the pack of an archive that has streamed by, once its episode files are in place.

    Args:
        workspace: where the dataset lies.
        spec: the dataset.
        images: was told of every member of the image folder.
        staging: the folder that ``images`` wrote to, on the same file system; it becomes the pack.
        rebuild: what errors tell people to run, "Run dm05-prep dataset ..."; the workspace is ANY_WORKSPACE in it.
        progress: show a bar.

    Raises:
        DataError: an unacceptable frame, or one whose image the archive does not hold, with file and line.
    """
    source = build_index(workspace, spec, progress=progress).fingerprint
    mend = f"Correct or remove the episode, then run dm05-prep dataset --subset {spec.name} --layout pack"
    with mending(f"{mend} {workspace.flag}"), naming(staging):
        result = write_pack(staging, workspace, spec, images, source=source, rebuild=rebuild, progress=progress)
        put_in_place(staging, result.folder)
    images.forget(result.folder)
    return result


def current_pack(folder: Path, spec: DatasetSpec, source: str) -> PackResult | None:
    """The pack in ``folder`` when it is whole and of these episodes."""
    try:
        info = read_info(folder)
        check_matches(folder, info, spec, source)
        check_files(folder, info)
    except DataError:
        return None
    return PackResult(folder=folder, info=info, image_bytes=_image_bytes(info), computed=False)


def write_pack(
    new: Path,
    workspace: Workspace,
    spec: DatasetSpec,
    images: Images,
    *,
    source: str,
    rebuild: str,
    progress: bool = False,
) -> PackResult:
    """Write frames.arrow and pack.json into the (temporary) folder ``new``; the episodes are those of the index.

    Args:
        new: a folder of :func:`~dm05_schemas.pack_writer.replaced_folder`.
        workspace: where the dataset lies.
        spec: the dataset.
        images: where its images lie.
        source: fingerprint of its index.
        rebuild: what errors tell people to run.
        progress: show a bar.

    Raises:
        DataError: an unacceptable frame or image, with file and line.
    """
    with PackWriter(new, spec, "blobs") as writer, progress_bar(None, "frames", "pack", quiet=not progress) as bar:
        for name, episode in _episodes(workspace, spec):
            writer.add(name, episode, images.columns(episode))
            bar.update(len(episode))
        info = writer.finish(
            source=source,
            rebuild=rebuild,
            blobs=images.finish(),
            largest_image_bytes=images.largest_image_bytes,
        )
    folder = spec.root(workspace) / PACK_DIR
    return PackResult(folder=folder, info=info, image_bytes=_image_bytes(info), computed=True)


def _episodes(workspace: Workspace, spec: DatasetSpec) -> Iterator[tuple[str, Episode]]:
    index = read_index(index_path(workspace, spec), workspace, spec)
    for name in index.entries:
        with aiming(workspace, spec.name):
            episode = read_episode(index.jsonl / name, spec)
        yield name, episode


def _image_bytes(info: PackInfo) -> int:
    return sum(record.bytes for record in info.blobs)


@dataclass(frozen=True, kw_only=True)
class PackCommand:
    """Build the memory-mapped form of a dataset: one table of frames, and its images back to back in a few files.

    Training then opens the dataset in milliseconds and reads it from four files instead of half a million. Frames of
    videos become JPEGs of quality 95. To train from the parts of an archive without extracting its images, use
    dm05-prep dataset --layout pack.

    Examples:
      dm05-prep pack
      dm05-prep pack --dataset-name my_robot --force
    """

    dataset_name: str = "libero_pi0_all"
    """Name of the dataset (dm05-prep datasets lists them)."""
    force: bool = False
    """Write it even when the pack is current (needed after images were replaced and the episode files were not)."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """No progress bar, no lines but errors."""

    def run(self) -> None:
        """Do it."""
        workspace = Workspace.resolve(self.workspace)
        spec = lookup(self.dataset_name, workspace)
        result = build_pack(workspace, spec, force=self.force, progress=not self.quiet)
        state = "written" if result.computed else "already current"
        counts = f"{len(result.info.episodes):,} episodes, {result.info.frames:,} frames"
        say(f"pack       {counts}, {human_bytes(result.image_bytes)} of images, {state}: {result.folder}", self.quiet)
