"""The command line: overview, wrong words in one line, lazy imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields
from typing import Literal

import pytest
from dm05_prep.cli import COMMANDS, dispatch, load, overview, parse
from dm05_schemas.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Do something.

    Examples:
      dm05-prep sample --kind a
    """

    kind: Literal["a", "b"] = "a"
    """Which kind it is, told at such a length that the text of an error is broken over several lines of a box."""
    number: int = 1
    """How many."""
    loud: bool = False
    """Loudly."""

    def run(self) -> int | None:
        return self.number


def wrong(*arguments: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(Sample, "dm05-prep sample", list(arguments))
    assert "\n" not in str(caught.value) and "│" not in str(caught.value)
    assert str(caught.value).endswith("See: dm05-prep sample --help")
    return str(caught.value)


def test_flags_with_dashes_or_underscores() -> None:
    assert parse(Sample, "x", ["--kind", "b", "--number=3", "--loud"]) == Sample(kind="b", number=3, loud=True)


def test_wrong_flags_are_told_in_one_line() -> None:
    assert "--knd" in wrong("--knd", "a")
    assert "'c'" in wrong("--kind", "c") and "'a', 'b'" in wrong("--kind", "c")
    assert "--number" in wrong("--number", "many") and "many" in wrong("--number", "many")
    assert "extra" in wrong("extra")
    assert "--kind" in wrong("--kind")


def test_help_shows_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(Sample, "dm05-prep sample", ["--help"])
    assert not caught.value.code
    assert "dm05-prep sample --kind a" in capsys.readouterr().out


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "-h", "help"):
        assert dispatch([word]) == 0
    assert dispatch(["--version"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS) and "\nExamples:\n  " in out and "dm05-prep 0." in out
    with pytest.raises(UsageError, match="Did you mean: dm05-prep norm-stats"):
        dispatch(["norm_stat"])
    with pytest.raises(UsageError, match=r"unknown command 'xyzzy'\. See: dm05-prep --help"):
        dispatch(["xyzzy"])
    with pytest.raises(UsageError, match="no command given"):
        dispatch([])
    assert max(map(len, overview().splitlines())) <= 100


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        dispatch([name, "--help"])
    assert not caught.value.code
    out = capsys.readouterr().out
    assert f"dm05-prep {name}" in out and "\nExamples:\n  " in out
    assert callable(load(name).run)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_path_may_be_empty(name: str) -> None:
    """It would be the current folder, which nobody asked for."""
    paths = [f.name for f in fields(load(name)) if "Path" in str(f.type)]
    assert paths
    for flag in (f"--{path.replace('_', '-')}" for path in paths):
        with pytest.raises(UsageError, match="empty value"):
            dispatch([name, flag, ""])


def test_the_overview_needs_nothing_heavy() -> None:
    code = "import sys; from dm05_prep.cli import dispatch; dispatch(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pyarrow", "polars", "tyro", "torch", "PIL"} & set(done.stdout.replace("'", " ").split())
