"""Keeps the file list of README.md true: every module with the first sentence of its own docstring.

``python tools/readme_tree.py`` rewrites the block between the two markers; ``--check`` only says whether it is current.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tree: tools/readme_tree.py -->", "<!-- /tree -->"
PACKAGES = ("data_schemas/dm05_schemas", "prep/dm05_prep", "train/dm05_train")
FOLDERS = {
    "scripts": "What a person or a platform starts.",
    "tools": "Benchmarks, the image and this list: for developers, never imported by the packages.",
    "docs": "Formats and measurements.",
    "tests": "Mirror the three packages; e2e runs the real commands, golden holds the numbers to agree with.",
}
SHOWN = {".py", ".sh", ".md", ".yaml"}
COLUMN = 34


def our_files() -> set[Path]:
    """The files that git knows and that are there; outside of a checkout, all."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in done.stdout.split("\0") if name]
    found = (ROOT / name for name in names) if done.returncode == 0 and names else ROOT.rglob("*")
    return {path for path in found if path.is_file() and (path.suffix in SHOWN or path.name == "Dockerfile")}


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    paragraph = re.sub(r":\w+:`([^`]+)`", r"\1", paragraph).replace("`", "")
    found = re.match(r"(.+?[.:])(?=\s|$)", paragraph)
    return found.group(1).rstrip(":") if found and not found.group(1).endswith(":") else paragraph.rstrip(":")


def purpose(path: Path) -> str:
    """What a file says of itself: its docstring, the first comment of a script, the title of a text."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    if path.suffix == ".md":
        return next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")
    comment = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and not line.startswith("#!")]
    return first_sentence(comment[0]) if comment else ""


def lines_of(folder: Path, files: set[Path], depth: int = 0, *, note: str = "") -> list[str]:
    """The folder's own line, its files, then its folders."""
    init = folder / "__init__.py"
    note = note or (purpose(init) if init.is_file() else "")
    lines = [entry("  " * depth + (folder.relative_to(ROOT).as_posix() if depth == 0 else folder.name) + "/", note)]
    for path in sorted(path for path in files if path.parent == folder and path.name != "__init__.py"):
        lines.append(entry("  " * (depth + 1) + path.name, purpose(path)))
    for path in sorted(path for path in folder.iterdir() if any(path in file.parents for file in files)):
        lines += lines_of(path, files, depth + 1)
    return lines


def entry(name: str, note: str) -> str:
    """One line of the list."""
    return f"{name:<{COLUMN}} {note}".rstrip()


def tree() -> str:
    """The whole list, as the README shows it."""
    files, lines = our_files(), list[str]()
    for package in PACKAGES:
        lines += lines_of(ROOT / package, files)
    for name, note in FOLDERS.items():
        lines += [entry(f"{name}/", note)] if name == "tests" else lines_of(ROOT / name, files, note=note)
    return "\n".join(lines)


def main() -> int:
    """Rewrite or check the block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the block is not current")
    check = parser.parse_args().check
    path = ROOT / "README.md"
    text = path.read_text("utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = f"{head}{BEGIN}\n```\n{tree()}\n```\n{END}{tail}"
    if text == wanted:
        return 0
    if check:
        print("the file list of README.md is not current: run python tools/readme_tree.py", file=sys.stderr)
        return 1
    path.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
