"""Files that are on this machine already: a folder of parts, or one archive file. Nothing is copied.

Checksums are taken from files that lie beside the parts, when there are any::

    PARTS/
      libero.tar.part-000 ...
      SHA256SUMS | sha256sums.txt | *.sha256      lines "<64 hex>  NAME", as sha256sum writes them
      .cache/huggingface/download/NAME.metadata   left by the hub's own downloader: commit, sha256, time
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dm05_schemas.errors import UsageError
from dm05_schemas.files import expanded

from dm05_prep.errors import PrepError
from dm05_prep.sources.base import RemoteFile

_SUM_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *]?(.+)")
_HUB_METADATA = Path(".cache/huggingface/download")


@dataclass(frozen=True)
class LocalSource:
    """A folder (or one file) of the user; see :class:`dm05_prep.sources.base.Source`."""

    path: Path
    owns_parts: bool = False

    @property
    def description(self) -> str:
        return str(self.path)

    def files(self) -> list[RemoteFile]:
        """Every file under the folder that is not hidden, or the one file."""
        if self.path.is_file():
            return [replace(_describe(self.path, self.path.parent), sha256=_sums(self.path.parent).get(self.path.name))]
        if not self.path.is_dir():
            raise PrepError("no such folder", where=self.path, fix="Give the folder of the parts with --uri")
        sums = _sums(self.path)
        found = [_describe(file, self.path) for file in _walk(self.path)]
        return sorted((replace(file, sha256=sums.get(file.name)) for file in found), key=lambda file: file.name)

    def fetch(self, file: RemoteFile, target: Path, *, progress: Callable[[int], None], stop: threading.Event) -> Path:
        """The file where it is."""
        root = self.path.parent if self.path.is_file() else self.path
        progress(file.size)
        return root / file.name


def open_source(uri: str | None, *, kind: str, jobs: int) -> LocalSource:
    """The folder ``uri``; there is no default."""
    if not uri:
        raise UsageError("--source local needs --uri", fix="Give the folder with --uri")
    return LocalSource(expanded(uri.removeprefix("file://")).absolute())


def _describe(file: Path, root: Path) -> RemoteFile:
    return RemoteFile(name=file.relative_to(root).as_posix(), size=file.stat().st_size, url_hint=str(file))


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if not entry.is_symlink():  # a link may lead back up
                yield from _walk(entry)
        elif entry.is_file():
            yield entry


def _sums(folder: Path) -> dict[str, str]:
    """name -> sha256, of the lists in ``folder``."""
    sums: dict[str, str] = {}
    for file in sorted(folder.glob(str(_HUB_METADATA / "*.metadata"))):
        lines = file.read_text(errors="replace").splitlines()
        if len(lines) > 1 and re.fullmatch("[0-9a-f]{64}", lines[1].strip()):
            sums[file.name.removesuffix(".metadata")] = lines[1].strip()
    for file in sorted(folder.iterdir()):
        if file.is_file() and (file.name.lower().startswith("sha256sum") or file.suffix == ".sha256"):
            for line in file.read_text(errors="replace").splitlines():
                match = _SUM_LINE.fullmatch(line.strip())
                if match:
                    sums[match[2].strip().removeprefix("./")] = match[1].lower()
    return sums
