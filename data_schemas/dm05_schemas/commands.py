"""The commands that messages tell people to run: with the dataset and the workspace at hand, ready to be pasted.

What is said where neither is known (:mod:`dm05_schemas.findings`) names the bare command; who knows them completes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dm05_schemas.errors import DM05Error
from dm05_schemas.workspace import Workspace

LAYS_OUT = "dm05-prep dataset lays a dataset out"
_BARE = re.compile(r"\bdm05-prep (dataset|index|model|norm-stats|pack|validate)\b( --(?:dataset-name|subset) \S+)?")


def aimed(text: str, dataset: str, workspace: Workspace) -> str:
    """``text`` with each bare ``dm05-prep`` command of it completed by its dataset and workspace.

    A text that names a workspace already is complete and comes back as it is.
    """
    if "--workspace" in text:
        return text

    def complete(command: re.Match[str]) -> str:
        name = {"model": "", "dataset": f" --subset {dataset}"}.get(command[1], f" --dataset-name {dataset}")
        return f"dm05-prep {command[1]}{command[2] or name} {workspace.flag}"

    return _BARE.sub(complete, text)


@contextmanager
def aiming(workspace: Workspace, dataset: str) -> Iterator[None]:
    """An error of the block names the dataset and the workspace in the command that mends it."""
    try:
        yield
    except DM05Error as error:
        fix = aimed(error.fix or "", dataset, workspace)
        DM05Error.__init__(error, error.what, where=error.where, fix=fix or None)  # whatever its class keeps beside
        raise
