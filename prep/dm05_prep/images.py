"""Images that do not go to files: a dataset laid out as a pack keeps them in blobs, or in the archive's own parts.

The pack is begun in ``STAGING`` inside the dataset's folder and gets its name when the episode files are in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

STAGING = ".dm05-pack.partial"

ImageMode = Literal["files", "parts", "blobs"]
"""Images go to files; or to a pack, which names the archive's parts; or to a pack, which holds copies."""
ImageState = tuple[int, tuple[int, ...]]
"""How far a sink has got: the fields of :class:`dm05_prep.pack_images.ArchiveState`."""


class ImageSink(Protocol):
    """Where the images go; :class:`dm05_prep.pack_images.ArchiveImages` is one."""

    def member(self, url: str, part: int, offset: int, data: bytes) -> None:
        """One image file, whose data begins at ``offset`` of part number ``part``."""
        ...

    def link(self, url: str, target: str) -> None:
        """A second name of an earlier image."""
        ...

    def sync(self) -> ImageState:
        """Make everything so far durable; the state to continue from."""
        ...


@dataclass(frozen=True, kw_only=True)
class PackImages:
    """Which members are images, and what takes them.

    Attributes:
        image_dir: the dataset's folder of images; "." for everything that is not below ``jsonl_dir``.
        mode: "parts" or "blobs"; work begun in one mode cannot go on in another.
        make: opens the sink in a folder, continuing from a state.
    """

    mode: ImageMode
    image_dir: str
    jsonl_dir: str
    make: Callable[[Path, ImageState | None], ImageSink]

    def open(self, tree: Path, state: ImageState | None) -> ImageSink:
        """The sink below ``tree``."""
        folder = tree / STAGING
        folder.mkdir(exist_ok=True)
        return self.make(folder, state)

    def holds(self, path: str) -> bool:
        """True for the image folder and everything below it."""
        if self.image_dir == ".":
            return path != self.jsonl_dir and not path.startswith(f"{self.jsonl_dir}/")
        return path == self.image_dir or path.startswith(f"{self.image_dir}/")

    def url(self, path: str) -> str:
        """``image/a/b.jpg`` -> ``a/b.jpg``; "" for what is no image."""
        if not self.holds(path):
            return ""
        return path if self.image_dir == "." else path[len(self.image_dir) + 1 :]
