"""The frame table of a jsonl folder: parsed once, then opened like a pack.

`libero_pi0_all/.frames/` (see `dm05_schemas.pack`) is derived: it is written when it is missing or the jsonl files have
changed, and can be deleted at any time. Where the dataset folder cannot be written it lies in the user's cache folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from dm05_schemas.episode import read_episode
from dm05_schemas.errors import DataError
from dm05_schemas.files import cache_home, folder_lock
from dm05_schemas.frame_table import FrameTable
from dm05_schemas.index import Index
from dm05_schemas.pack import FRAMES_DIR, PackInfo, check_files, check_matches, read_info
from dm05_schemas.pack_writer import PackWriter, file_columns, replaced_folder
from dm05_schemas.registry import DatasetSpec


def frames_of(root: Path, spec: DatasetSpec, index: Index, source: str) -> tuple[Path, PackInfo]:
    """The folder of a jsonl dataset's frame table and its pack.json, made first where needed.

    Several ranks may call this at once: one writes, the others wait.

    Args:
        root: the dataset's folder.
        spec: the dataset.
        index: its fresh index.
        source: the index's fingerprint.

    Raises:
        DataError: no episodes, or a frame that breaks the contract (with file and line).
    """
    places = [root / FRAMES_DIR, _cache_folder(index.jsonl)]
    with folder_lock(index.jsonl):
        for folder in places:
            info = _usable(folder, spec, source)
            if info is not None:
                return folder, info
        for folder in places:
            try:
                return folder, _write(folder, spec, index, source)
            except OSError as error:
                problem = error
    fix = "Free some space there, or set XDG_CACHE_HOME to a folder that can be written"
    raise DataError(f"the frame table cannot be written: {problem.strerror or problem}", where=places[-1], fix=fix)


def _cache_folder(jsonl: Path) -> Path:
    return cache_home() / "dm05" / f"frames-{hashlib.sha256(str(jsonl.resolve()).encode()).hexdigest()[:16]}"


def _usable(folder: Path, spec: DatasetSpec, source: str) -> PackInfo | None:
    try:
        info = replace(read_info(folder), rebuild=_rebuild(folder))
        check_matches(folder, info, spec, source)
        check_files(folder, info)
        FrameTable(folder, info).close()
    except DataError:
        return None
    return info


def _write(folder: Path, spec: DatasetSpec, index: Index, source: str) -> PackInfo:
    with replaced_folder(folder) as new, PackWriter(new, spec, "files") as writer:
        for name in index.entries:
            episode = read_episode(index.jsonl / name, spec)
            writer.add(name, episode, file_columns(episode))
        return writer.finish(source=source, rebuild=_rebuild(folder))


def _rebuild(folder: Path) -> str:
    return f"Delete {folder} and start again: it is written anew"
