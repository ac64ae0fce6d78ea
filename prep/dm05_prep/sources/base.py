"""What a place to fetch from offers; the engine knows sources only through this.

A source lists files and brings one file at a time. The engine asks for the parts of an archive in order, one ahead of
the one it reads, from a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a source: ``name`` is relative to the uri with ``/`` between folders, ``size`` in bytes.

    The checksums are what the source publishes (lower-case hex), None when it does not; ``url_hint`` is for messages.
    """

    name: str
    size: int
    sha256: str | None = None
    md5: str | None = None
    crc32: int | None = None
    etag: str | None = None
    url_hint: str = ""


class Source(Protocol):
    """A folder, a bucket or a hub repository."""

    @property
    def description(self) -> str:
        """The name of the place in messages, without secrets."""
        ...

    @property
    def owns_parts(self) -> bool:
        """Whether fetched files are copies of ours.

        True: complete and verified against every published checksum on return of :meth:`fetch`, and deleted after
        extraction. False: they are the user's own; the engine compares checksums on the way and deletes nothing.
        """
        ...

    def files(self) -> list[RemoteFile]:
        """All files under the uri, sorted by name.

        Raises:
            PrepError: the place does not exist or cannot be listed.
        """
        ...

    def fetch(self, file: RemoteFile, target: Path, *, progress: Callable[[int], None], stop: threading.Event) -> Path:
        """Bring one file, complete; continues what an earlier call left beside ``target``.

        Args:
            target: where a copy goes; a source of local files ignores it.
            progress: told the number of new bytes as they arrive. It may block for a while: that is how the engine
                keeps the disk from filling faster than it reads.
            stop: when set, return or raise soon, keeping what can be continued.

        Returns:
            the path to read from: ``target``, or the original of a local file.

        Raises:
            PrepError: the file cannot be had.
        """
        ...
