"""Where things are in a workspace.

::

    WORKSPACE/                         training runs from here
      index_cache.json                 number of frames of every episode file
      datasets.toml | datasets.json    datasets of the user (optional)
      data/libero/libero_pi0_all/      jsonl/, image/ or video/, index_cache.json, pack/
      norm_stats/NAME_DIGEST.{parquet,json}
      checkpoints/DM05/                model.safetensors, config.json, tokenizer.json, ...

``$DATA_PATH``, when set, takes the place of ``WORKSPACE/data``; keys in index files keep their ``data/...`` form.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.files import expanded

INDEX_NAME = "index_cache.json"


@dataclass(frozen=True)
class Workspace:
    """One workspace folder; ``data_path`` replaces ``root/data`` when given."""

    root: Path
    data_path: Path | None = None

    @classmethod
    def resolve(cls, root: Path | None) -> Workspace:
        """The workspace of a command: ``root``, else $WORKSPACE_DIR, else the current folder ($DATA_PATH is honoured).

        Raises:
            UsageError: the path is a file.
        """
        chosen = root if root is not None else Path(os.environ.get("WORKSPACE_DIR") or ".")
        chosen = expanded(chosen).absolute()
        if chosen.exists() and not chosen.is_dir():
            raise UsageError("the workspace is not a folder", where=chosen, fix="Give a folder with --workspace")
        data = os.environ.get("DATA_PATH")
        return cls(chosen, expanded(data).absolute() if data else None)

    @property
    def flag(self) -> str:
        """How a command that is to be run names it: ``--workspace PATH``."""
        return f"--workspace {shlex.quote(str(self.root))}"

    @property
    def data(self) -> Path:
        """The folder that ``data/...`` paths start from."""
        return self.data_path if self.data_path is not None else self.root / "data"

    @property
    def index_cache(self) -> Path:
        """The copy of the index at the top of the workspace."""
        return self.root / INDEX_NAME

    @property
    def norm_stats_dir(self) -> Path:
        """Folder of the normalisation statistics."""
        return self.root / "norm_stats"

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the released weights."""
        return self.root / "checkpoints" / "DM05"

    @property
    def datasets_file(self) -> Path | None:
        """The user's dataset entries: $DM05_DATASETS, else datasets.toml or datasets.json here, else None.

        Raises:
            DataError: $DM05_DATASETS names no file, or both files are here.
        """
        named = os.environ.get("DM05_DATASETS")
        if named:
            path = expanded(named).absolute()
            if not path.is_file():
                raise DataError("$DM05_DATASETS names no file", where=path, fix="Correct or unset DM05_DATASETS")
            return path
        found = [path for path in (self.root / "datasets.toml", self.root / "datasets.json") if path.is_file()]
        if len(found) > 1:
            raise DataError("there is a datasets.json beside it", where=found[0], fix="Keep one of the two")
        return found[0] if found else None

    def locate(self, relative: Path | PurePosixPath | str) -> Path:
        """The real path of a path relative to the workspace; ``data/...`` starts from :attr:`data`."""
        parts = PurePosixPath(relative).parts
        if parts and parts[0] == "data":
            return self.data.joinpath(*parts[1:])
        return self.root.joinpath(*parts)
