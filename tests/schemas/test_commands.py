"""Commands in messages work when they are pasted."""

from __future__ import annotations

from pathlib import Path

import pytest
from dm05_schemas.commands import aimed, aiming
from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.findings import KINDS
from dm05_schemas.workspace import Workspace

WORKSPACE = Workspace(Path("/some where"))
HERE = "--workspace '/some where'"


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("dm05-prep dataset lays it out", f"dm05-prep dataset --subset toy {HERE} lays it out"),
        ("dm05-prep index (or more) writes it", f"dm05-prep index --dataset-name toy {HERE} (or more) writes it"),
        ("Run dm05-prep norm-stats again", f"Run dm05-prep norm-stats --dataset-name toy {HERE} again"),
        ("Run dm05-prep model, or wait", f"Run dm05-prep model {HERE}, or wait"),
        ("Run dm05-prep index --dataset-name a --force", f"Run dm05-prep index --dataset-name a {HERE} --force"),
        ("dm05-prep datasets lists them", "dm05-prep datasets lists them"),
        ("Run dm05-prep index --workspace X", "Run dm05-prep index --workspace X"),
        ("Mend it", "Mend it"),
    ],
)  # fmt: skip
def test_bare_commands_are_completed(text: str, complete: str) -> None:
    assert aimed(text, "toy", WORKSPACE) == complete
    assert aimed(complete, "toy", WORKSPACE) == complete


def test_every_command_of_a_finding_is_completed() -> None:
    for kind in KINDS.values():
        if kind.fix and "dm05-prep " in kind.fix:
            text = aimed(kind.fix, "toy", WORKSPACE)
            assert text.count("--workspace") == text.count("dm05-prep ")


def test_errors_of_every_class_are_aimed() -> None:
    for made in (DataError, UsageError):
        with pytest.raises(made) as caught, aiming(WORKSPACE, "toy"):
            raise made("is stale", where="x", fix="Run dm05-prep index")
        assert str(caught.value) == f"x: is stale. Run dm05-prep index --dataset-name toy {HERE}"
        assert caught.value.fix == f"Run dm05-prep index --dataset-name toy {HERE}"
    with pytest.raises(DataError, match=r"^broken$"), aiming(WORKSPACE, "toy"):
        raise DataError("broken")
