"""The released file names, and which names of a remote listing may become paths here."""

from __future__ import annotations

from pathlib import PurePosixPath

from dm05_prep.errors import PrepError

RELEASED_PARTS = tuple(f"libero.tar.part-{number:03}" for number in range(9))
MODEL_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "norm_stats.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def check_name(name: str, where: str) -> str:
    """``name``, when it is a path that stays below the folder it is put in.

    Raises:
        PrepError: absolute, with ``..``, or with characters that no file name can have.
    """
    path = PurePosixPath(name)
    plain = name and str(path) == name and not path.is_absolute() and ".." not in path.parts
    if not plain or "\0" in name or "\\" in name or any(len(part.encode()) > 255 for part in path.parts):
        raise PrepError("has a name that cannot be a path below the target folder", where=where, fix="Rename it there")
    return name
