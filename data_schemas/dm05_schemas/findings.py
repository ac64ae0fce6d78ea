"""What can be wrong with a dataset: one table of kinds, each with its weight and its mend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dm05_schemas.commands import LAYS_OUT
from dm05_schemas.errors import DataError

Severity = Literal["error", "warning"]

_FIX = "dm05-prep validate --fix mends it"
_REPAIR = "Correct the frame or remove the episode, then run dm05-prep index"
_FETCH = "Extract it again with dm05-prep dataset"
_INDEX = "dm05-prep index (or validate --fix) writes it"
_REBUILD = "dm05-prep index --rebuild writes it"
_STATS = "Run dm05-prep norm-stats again"
_PACK = "Run dm05-prep pack --force, or where images lie in the pack alone: dm05-prep dataset --layout pack --force"


class Kind(NamedTuple):
    """Weight of a kind of finding, what it means in a few words, and how it is mended."""

    severity: Severity
    title: str
    fix: str | None = None


KINDS: dict[str, Kind] = {
    # The text of an episode file.
    "unreadable": Kind("error", "file that cannot be read", "Correct its permissions or remove it"),
    "empty-episode": Kind("error", "episode without frames", "Remove the file, then run dm05-prep index"),
    "one-frame": Kind("error", "episode of one frame", "Remove the file, then run dm05-prep index"),
    "utf16": Kind("error", "UTF-16 or UTF-32 text", _FIX),
    "bom": Kind("error", "byte order mark", _FIX),
    "bad-utf8": Kind("error", "bytes that are not UTF-8", _REPAIR),
    "blank-line": Kind("error", "blank line", _FIX),
    "lone-cr": Kind("error", "carriage return without line feed", _FIX),
    "bad-json": Kind("error", "line that is not JSON", _REPAIR),
    "duplicate-key": Kind("error", "key that stands twice", _REPAIR),
    "not-finite": Kind("error", "number that is not finite in float32", _REPAIR),
    "crlf": Kind("warning", "CR LF line ends", _FIX),
    "no-final-newline": Kind("warning", "no newline at the end", _FIX),
    "huge-line": Kind("warning", "huge line", "Keep images and other bulk out of the frames"),
    # A frame.
    "not-an-object": Kind("error", "frame that is not an object", _REPAIR),
    "missing-key": Kind("error", "missing key", _REPAIR),
    "bad-vector": Kind("error", "vector of something else than numbers", _REPAIR),
    "wrong-dims": Kind("error", "wrong number of dims", _REPAIR),
    "mixed-action": Kind("error", "action in some frames only", "Give every frame an action or none"),
    "no-action": Kind("error", "no action where states cannot stand in", "Give every frame an action"),
    "bad-image-entry": Kind("error", "image entry of the wrong form", _REPAIR),
    "bad-frame-idx": Kind("error", "video entry without a usable frame_idx", _REPAIR),
    "bad-url": Kind("error", "url that names no file", _REPAIR),
    "url-absolute": Kind("error", "absolute url", "Give urls relative to the image folder"),
    "url-outside": Kind("error", "url that leaves the image folder", "Give urls that stay inside the image folder"),
    "bad-prompt": Kind("error", "prompt that is no string", _REPAIR),
    "bad-is-robot": Kind("error", "is_robot that is neither true nor false", _REPAIR),
    "empty-prompt": Kind("warning", "empty prompt", "Say what the task is"),
    "long-prompt": Kind("warning", "over-long prompt", "Training cuts it to fit; say it shorter"),
    "odd-prompt": Kind("warning", "prompt with invisible or control characters", "Remove them if they are not meant"),
    # The dataset's folder.
    "no-dataset": Kind("error", "folder that is not there", LAYS_OUT),
    "no-episodes": Kind("error", "dataset without episodes", LAYS_OUT),
    "no-images": Kind("error", "image folder that is not there", _FETCH),
    "stray-file": Kind("warning", "file that is no episode", "Move it out of the folder of episodes"),
    "broken-link": Kind("error", "symlink to nothing", "Restore what it points to or remove it"),
    "bad-name": Kind("error", "file name that is not UTF-8", "Rename the file"),
    # Index, statistics, pack.
    "index-missing": Kind("error", "missing index", _INDEX),
    "index-broken": Kind("error", "index that cannot be read", _INDEX),
    "index-stale": Kind("error", "stale index", _INDEX),
    "index-foreign": Kind("error", "index of other code, which training does not rely on", _INDEX),
    "index-copies": Kind("error", "two copies of the index that differ", _INDEX),
    "index-count": Kind("error", "number of frames that differs from the index", _REBUILD),
    "index-content": Kind("error", "file that changed behind its size and time", _REBUILD),
    "stats-missing": Kind(
        "warning", "no statistics yet", "dm05-prep norm-stats computes them, training does so itself"
    ),
    "stats-broken": Kind("error", "statistics that cannot be read", _STATS),
    "stats-stale": Kind("error", "statistics of other data", _STATS),
    "stats-dims": Kind("error", "statistics of other dims", _STATS),
    "stats-narrow": Kind("warning", "near-constant dim", "See that the dim is meant to stand still"),
    "pack-broken": Kind("error", "pack that cannot be used", _PACK),
    # Images and videos.
    "image-missing": Kind("error", "image that is not there", _FETCH),
    "image-case": Kind(
        "error", "image whose name differs in case or Unicode form", "Correct the url or rename the file"
    ),
    "image-empty": Kind("error", "empty image file", _FETCH),
    "image-foreign": Kind("error", "file that is no image", _FETCH),
    "image-truncated": Kind("error", "image that is cut short", _FETCH),
    "image-broken": Kind("error", "image that cannot be decoded", _FETCH),
    "image-depth": Kind("error", "image of more than 8 bits", "Convert it to 8 bits a channel"),
    "image-mode": Kind("warning", "image that is converted to RGB", "Store RGB if its colours matter"),
    "image-extension": Kind("warning", "image whose name says another format", "Rename the file and correct the url"),
    "image-size": Kind("warning", "image of another size than most", "See that it is of the same camera"),
    "video-broken": Kind("error", "video that cannot be read", _FETCH),
    "video-unchecked": Kind("warning", "video that was not opened", "Run pip install 'dm05[video]'"),
}


@dataclass(frozen=True)
class Finding:
    """One thing found at ``path`` (``line`` from 1, None for the file as a whole)."""

    kind: str
    severity: Severity
    path: str
    line: int | None
    detail: str

    @property
    def place(self) -> str:
        """``path:line``, or the path alone."""
        return self.path if self.line is None else f"{self.path}:{self.line}"

    @property
    def fix(self) -> str | None:
        """What mends this kind."""
        return KINDS[self.kind].fix

    def error(self) -> DataError:
        """The finding as an exception."""
        return DataError(self.detail, where=self.place, fix=self.fix)


def finding(kind: str, path: object, line: int | None, detail: str) -> Finding:
    """A finding of a known kind, with that kind's severity."""
    return Finding(kind, KINDS[kind].severity, str(path), line, detail)
