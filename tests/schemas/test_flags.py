"""Flags: read into a dataclass, and refused in one line that offers the nearest one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dm05_schemas.errors import UsageError
from dm05_schemas.flags import parse_flags


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 1.0
    """How fast."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    chunk_size: int = 10
    """How many."""
    folder: Path | None = None
    """Where."""
    inner: Inner = field(default_factory=Inner)


def read(*arguments: str, default: Flags | None = None) -> Flags:
    return parse_flags(Flags, arguments, prog="tool", description="A tool.", default=default)


def test_dashes_and_underscores_mean_the_same() -> None:
    assert read("--chunk-size", "3") == read("--chunk_size", "3") == Flags(chunk_size=3)


def test_flags_lie_over_the_default() -> None:
    default = Flags(chunk_size=5, inner=Inner(rate=2.0))
    assert read("--inner.rate", "4", default=default) == Flags(chunk_size=5, inner=Inner(rate=4.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chunk-sise", "3"], ["--chunk-sise", "Did you mean --chunk-size?"]),
        (["--inner.rat", "3"], ["--inner.rat", "Did you mean --inner.rate?"]),
        (["--chunk-size", "ten"], ["ten", "--chunk-size"]),
        (["--chunk-size"], ["--chunk-size"]),
        (["word"], ["word"]),
    ],
)
def test_a_wrong_word_is_one_line(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as error:
        read(*arguments)
    assert "\n" not in str(error.value)
    for word in [*words, "See: tool --help"]:
        assert word in str(error.value)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--folder", ""], "--folder: an empty value"),
        (["--folder="], "--folder: an empty value"),
        (["--folder", "  "], "--folder: an empty value"),
        (["--chunk-size", "3", "--folder", "", "--inner.rate", "1"], "--folder: an empty value"),
        ([""], "an argument: an empty value"),
    ],
)
def test_an_empty_value_is_not_the_current_folder(arguments: list[str], where: str) -> None:
    with pytest.raises(UsageError, match=where):
        read(*arguments)
    assert read("--folder", ".").folder == Path(".")


def test_help_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        read("--help")
    assert not stop.value.code
    assert "How many." in capsys.readouterr().out
