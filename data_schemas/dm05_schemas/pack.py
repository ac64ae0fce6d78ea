"""The memory-mapped form of a dataset: what it holds and how it is checked.

::

    libero_pi0_all/pack/
      pack.json            this module's PackInfo: version, counts, prompts, cameras, episodes, blobs, fingerprint
      frames.arrow         Arrow IPC file, uncompressed, one row a frame, episodes one after the other:
                             episode int32, frame int32, prompt int32 (numbers into the lists of pack.json)
                             state float32[S]; target float32[A]: the action, or the following state where an episode
                               has no actions
                             crc32 uint32 of the five before
                             one struct a camera, named by its key:
                               blobs: blob int32, offset int64, length int32, crc32 uint32 of the encoded image
                               files: url string, frame_idx int32 (-1 for an image), crc32 uint32 of the two
      images-00000.bin     blobs: encoded images back to back; or the tar parts themselves, wherever they are
    libero_pi0_all/.frames/
      pack.json, frames.arrow   the same with images as files: what training keeps of a jsonl folder

An image that reaches past the end of its blob goes on at the start of the next one (a tar cut into parts). Both folders
are written under a temporary name and renamed, so a folder of that name is complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import orjson
import pyarrow as pa

from dm05_schemas import strict_json
from dm05_schemas.errors import DataError
from dm05_schemas.files import replace_file
from dm05_schemas.image import MAX_PIXEL_BYTES
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace

FORMAT, VERSION = "dm05-pack", 1
PACK_DIR, FRAMES_DIR = "pack", ".frames"
INFO_NAME, FRAMES_NAME = "pack.json", "frames.arrow"
SAME_SOURCE = "with the same --source and --uri"
ANY_WORKSPACE = "--workspace WORKSPACE"
"""Stands in pack.json for the workspace, which may be moved; :func:`read_pack` puts the present one there."""

ImageStore = Literal["blobs", "files"]


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file the pack needs: path relative to the pack's folder (or absolute) and size in bytes."""

    path: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PackInfo:
    """pack.json; see the module's text."""

    dataset: str
    images: ImageStore
    state_dim: int
    action_dim: int
    cameras: tuple[str, ...]
    prompts: tuple[str, ...]
    episodes: tuple[str, ...]
    episode_frames: tuple[int, ...]
    frames_file: FileRecord
    frames_crc32: int
    blobs: tuple[FileRecord, ...]
    largest_image_bytes: int
    """Decoded size of the largest image, H x W x 3; 0 when not known."""
    source: str
    """Fingerprint of the index (see :mod:`dm05_schemas.index`) of the episodes it was made from."""
    rebuild: str
    """What errors say to do: a sentence with the command that writes this pack again."""
    tool_version: str

    @property
    def frames(self) -> int:
        """Number of rows of frames.arrow."""
        return sum(self.episode_frames)


def arrow_schema(info: PackInfo | DatasetSpec, images: ImageStore) -> pa.Schema:
    """The schema of frames.arrow for a dataset (or as its pack says)."""
    cameras = info.cameras if isinstance(info, PackInfo) else info.image_keys
    camera = pa.struct(
        [("blob", pa.int32()), ("offset", pa.int64()), ("length", pa.int32()), ("crc32", pa.uint32())]
        if images == "blobs"
        else [("url", pa.string()), ("frame_idx", pa.int32()), ("crc32", pa.uint32())]
    )
    numbers = [pa.field(name, pa.int32(), nullable=False) for name in ("episode", "frame", "prompt")]
    vectors = [
        pa.field(name, pa.list_(pa.field("item", pa.float32(), nullable=False), dims), nullable=False)
        for name, dims in (("state", info.state_dim), ("target", info.action_dim))
    ]
    check = pa.field("crc32", pa.uint32(), nullable=False)
    return pa.schema([*numbers, *vectors, check, *(pa.field(key, camera, nullable=False) for key in cameras)])


def write_info(folder: Path, info: PackInfo) -> Path:
    """Write pack.json into ``folder``."""
    document = {"format": FORMAT, "version": VERSION, **asdict(info)}
    path = folder / INFO_NAME
    replace_file(path, orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    return path


def read_pack(workspace: Workspace, spec: DatasetSpec) -> PackInfo:
    """pack.json of a dataset's pack; its ``rebuild`` names this workspace.

    Raises:
        DataError: see :func:`read_info`.
    """
    if spec.images(workspace).is_dir():
        rebuild = f"Run dm05-prep pack --dataset-name {spec.name} {workspace.flag} --force"
    else:
        rebuild = f"Run dm05-prep dataset --subset {spec.name} --layout pack {workspace.flag} --force {SAME_SOURCE}"
    info = read_info(spec.root(workspace) / PACK_DIR, rebuild)
    return replace(info, rebuild=info.rebuild.replace(ANY_WORKSPACE, workspace.flag))


def read_info(folder: Path, rebuild: str = "Run dm05-prep pack --force") -> PackInfo:
    """pack.json of ``folder``.

    Args:
        folder: the pack's.
        rebuild: what an error says to do; a pack.json that can be read says it itself.

    Raises:
        DataError: missing, no pack, of another version, or with fields that do not fit together.
    """
    path = folder / INFO_NAME
    try:
        document = strict_json.read_object(path)
    except OSError as error:
        raise DataError(f"cannot read the pack: {error.strerror or error}", where=path, fix=rebuild) from error
    except DataError as error:
        raise DataError(error.what, where=path, fix=rebuild) from error
    if document.pop("format", None) != FORMAT:
        raise DataError("is not the description of a pack", where=path, fix=rebuild)
    version = document.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise DataError(f"is of version {version}, this program reads version {VERSION}", where=path, fix=rebuild)
    try:
        info = _from_document(document)
    except (KeyError, TypeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"does not hold what it should: {error}"
        raise DataError(what, where=path, fix=rebuild) from error
    return info


def _from_document(document: Mapping[str, Any]) -> PackInfo:
    values: dict[str, Any] = dict(document)
    for name in ("cameras", "prompts", "episodes"):
        values[name] = tuple(_each(values[name], str, name))
    values["episode_frames"] = tuple(_each(values["episode_frames"], int, "episode_frames"))
    values["blobs"] = tuple(_record(item) for item in values["blobs"])
    values["frames_file"] = _record(values["frames_file"])
    for name in ("state_dim", "action_dim", "frames_crc32", "largest_image_bytes"):
        _is(int, values[name], name)
    for name in ("dataset", "images", "source", "rebuild", "tool_version"):
        _is(str, values[name], name)
    info = PackInfo(**values)
    if info.images not in get_args(ImageStore):
        raise ValueError(f"images is {info.images!r}")
    if len(info.episodes) != len(info.episode_frames) or min(info.episode_frames, default=0) < 2:
        raise ValueError("episodes and episode_frames do not fit together")
    if min(info.state_dim, info.action_dim, len(info.cameras), len(info.prompts)) < 1:
        raise ValueError("a count is 0")
    if (info.images == "blobs") != bool(info.blobs):
        raise ValueError(f"images are {info.images} and there are {len(info.blobs)} blobs")
    if info.largest_image_bytes > MAX_PIXEL_BYTES:
        raise ValueError(f"largest_image_bytes is {info.largest_image_bytes}")
    return info


def _record(value: Mapping[str, Any]) -> FileRecord:
    record = FileRecord(**value)
    _is(str, record.path, "path")
    _is(int, record.bytes, "bytes")
    return record


def _is(kind: type, value: Any, name: str) -> Any:
    if type(value) is not kind or (type(value) is int and value < 0):
        raise ValueError(f"{name} is {value!r}")
    return value


def _each(values: Any, kind: type, name: str) -> list[Any]:
    return [_is(kind, value, name) for value in _is(list, values, name)]


def blob_path(folder: Path, record: FileRecord) -> Path:
    """Where a blob lies; ``folder`` is the pack's."""
    return Path(os.path.normpath(folder / record.path))


def check_files(folder: Path, info: PackInfo) -> None:
    """That every file of the pack is there with the size it was written with.

    Raises:
        DataError: missing, cut short or grown; the text says how to rebuild.
    """
    for record in (info.frames_file, *info.blobs):
        path = blob_path(folder, record)
        try:
            size = path.stat().st_size
        except OSError as error:
            fix = f"Put it back if it was moved, or make the pack anew. {info.rebuild}"
            raise DataError(f"part of the pack, {error.strerror or error}", where=path, fix=fix) from error
        if size != record.bytes:
            what = f"part of the pack, has {size:,} bytes where {record.bytes:,} were written"
            raise DataError(what, where=path, fix=info.rebuild)


def check_matches(folder: Path, info: PackInfo, spec: DatasetSpec, source: str | None = None) -> None:
    """That the pack is of this dataset, as the registry has it now, and of these episodes.

    Args:
        folder: the pack's.
        info: its pack.json.
        spec: the dataset.
        source: fingerprint of the episodes as they are now; None when they are not at hand.

    Raises:
        DataError: another dataset, other cameras or dims, or made from other episodes.
    """
    held = (info.dataset, info.cameras, info.state_dim, info.action_dim)
    due = (spec.name, spec.image_keys, spec.state_dim, spec.action_dim)
    for name, has, needs in zip(("dataset", "cameras", "state dims", "action dims"), held, due, strict=True):
        if has != needs:
            raise DataError(f"was packed with {name} {has}, now it is {needs}", where=folder, fix=info.rebuild)
    if source is not None and source != info.source:
        raise DataError("is stale: the episode files have changed since it was made", where=folder, fix=info.rebuild)
