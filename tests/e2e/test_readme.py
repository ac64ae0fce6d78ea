"""The READMEs tell the truth: every command, flag, switch, file and link in them exists, and both say the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from dm05_prep.cli import COMMANDS
from dm05_train.perf.switches import OTHERS, Switches
from real_commands import call

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
BOTH = pytest.mark.parametrize("readme", [ENGLISH, CHINESE], ids=lambda path: path.name)

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of the repository")


def text_of(readme: Path) -> str:
    """A README without its list of files, which only the English one holds."""
    return re.sub(r"<!-- tree:.*?<!-- /tree -->", "", readme.read_text("utf-8"), flags=re.S)


def code_blocks(text: str) -> list[list[str]]:
    """The lines of every fenced block, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M)
    return [[line.split(" #")[0].rstrip() for line in block.splitlines()] for block in blocks]


def first_column(text: str, heading: str) -> list[str]:
    """The code spans in the first column of the table under a heading."""
    section = text.split(heading, 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def test_the_list_of_files_is_true() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "readme_tree.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_module_says_in_one_sentence_what_it_is_for() -> None:
    block = ENGLISH.read_text("utf-8").split("<!-- tree:")[1].split("```")[1]
    listed = [line for line in block.splitlines() if line.strip()]
    assert len(listed) > 90
    silent = [line for line in listed if re.match(r"\s*\S+\.(py|sh|md)\s*$", line)]
    assert silent == []


def test_the_first_commands_come_first() -> None:
    lines = ENGLISH.read_text("utf-8").splitlines()
    assert next(number for number, line in enumerate(lines) if line.startswith("make demo")) < 20
    assert code_blocks(text_of(ENGLISH))[0] == ["make demo", "make test"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_both_languages_have_the_same_shape() -> None:
    english, chinese = text_of(ENGLISH), text_of(CHINESE)
    assert code_blocks(english) == code_blocks(chinese)
    for pattern in (r"^#+ ", r"^\|", r"!\[[^\]]*\]\(([^)]+)\)", r"^```"):
        found = [re.findall(pattern, text, flags=re.M) for text in (english, chinese)]
        assert found[0] == found[1], pattern
    spans = [sorted(set(re.findall(r"`((?:--|DM05_|dm05-|make )[^`]*)`", text))) for text in (english, chinese)]
    assert spans[0] == spans[1]


@BOTH
def test_every_link_and_picture_is_there(readme: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", readme.read_text("utf-8"))
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert missing == []


@BOTH
def test_the_tables_of_commands_and_switches_are_complete(readme: Path) -> None:
    text = text_of(readme)
    assert first_column(text, "## `dm05-prep`") == [
        *("dataset", "model", "index", "norm-stats", "pack", "validate", "report", "datasets", "doctor", "demo")
    ]
    assert set(first_column(text, "## `dm05-prep`")) == set(COMMANDS)
    heading = "## Speed switches" if readme == ENGLISH else "## 加速开关"
    named = set(re.findall(r"DM05_\w+", text.split(heading)[1].split("\n## ")[0]))
    known = set(Switches.variables().values()) | {"DM05_DDP_BUCKET_CAP_MB", "DM05_PERF_R10_MATMUL_PRECISION"}
    assert known - OTHERS - named == set()
    assert named - known == set()


@BOTH
def test_every_training_flag_is_one(readme: Path) -> None:
    help_text = call("dm05-train", "--help", COLUMNS="200").succeeded().out.replace("_", "-")
    for flag in first_column(text_of(readme), "## `dm05-train`"):
        if flag.startswith("--"):
            assert flag in help_text, flag


@pytest.mark.parametrize(
    "document", [ENGLISH, ROOT / "docs" / "formats.md", ROOT / "scripts" / "demo.sh"], ids=lambda path: path.name
)
def test_every_command_line_of_ours_has_flags_that_exist(document: Path) -> None:
    lines = re.findall(r"dm05-(prep|train)\"? ([^`\n#]+)", document.read_text("utf-8"))
    assert lines
    for program, rest in lines:
        words = rest.split()
        sub = words[0] if program == "prep" else next((w for w in words[:1] if w in ("eval", "memory", "bench")), "")
        if program == "prep" and sub not in COMMANDS:
            continue
        flags = [word for word in words if re.fullmatch(r"--[a-z][a-z.\-]+", word)]
        if not flags:
            continue
        text = call(f"dm05-{program}", *([sub] if sub else []), "--help", COLUMNS="200").succeeded().out
        for flag in flags:
            assert flag in text.replace("_", "-"), f"{program} {sub}: {flag}"
