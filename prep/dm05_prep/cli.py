"""The command ``dm05-prep``: one table of subcommands, each a dataclass whose fields are its flags.

Only the module of the command that is called gets imported, so ``dm05-prep --help`` needs nothing heavy.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from typing import NoReturn, Protocol

from dm05_schemas.errors import UsageError
from dm05_schemas.version import tool_version

from dm05_prep.signals import stopping_in_order

PROG = "dm05-prep"


class Command(Protocol):
    """What every entry of :data:`COMMANDS` points to: a frozen dataclass of flags."""

    def run(self) -> int | None:
        """Do the work; the exit code, or None for 0."""
        ...


# name -> (module:class, the line shown in the overview)
COMMANDS: dict[str, tuple[str, str]] = {
    "dataset": (
        "dm05_prep.dataset:DatasetCommand",
        "fetch, reassemble and lay out a dataset, then index and statistics",
    ),
    "model": ("dm05_prep.model:ModelCommand", "fetch the released checkpoint and check it"),
    "index": ("dm05_prep.index:IndexCommand", "write or check index_cache.json (frames of each episode)"),
    "norm-stats": ("dm05_prep.norm_stats:NormStatsCommand", "compute the exact normalisation statistics"),
    "pack": ("dm05_prep.pack:PackCommand", "build the memory-mapped form of a dataset"),
    "validate": ("dm05_prep.validate:ValidateCommand", "check a dataset against the contract, fast or frame by frame"),
    "report": ("dm05_prep.report:ReportCommand", "write an HTML report of a dataset"),
    "datasets": ("dm05_prep.datasets:DatasetsCommand", "list the registered datasets"),
    "doctor": ("dm05_prep.doctor:DoctorCommand", "check this machine, the network and the workspace"),
    "demo": ("dm05_prep.demo:DemoCommand", "write a small LIBERO-like dataset as parts, and a tiny checkpoint"),
}


def main() -> NoReturn:
    """Run the command and exit; :mod:`dm05_prep.__main__` is where the console script begins."""
    from dm05_schemas.cli import run
    from dm05_schemas.stops import end_at_once

    end_at_once(PROG)
    run(lambda: dispatch(sys.argv[1:]), PROG)


def dispatch(argv: list[str]) -> int | None:
    """Run the command that ``argv`` (without the program name) asks for; UsageError for a wrong word."""
    if not argv:
        raise UsageError(f"no command given: one of {', '.join(COMMANDS)}", fix=f"See: {PROG} --help")
    word, *rest = argv
    if word in ("-h", "--help", "help"):
        print(overview())
        return 0
    if word in ("--version", "-V"):
        print(f"{PROG} {tool_version()}")
        return 0
    name = word.replace("_", "-")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean: {PROG} {near[0]}" if near else f"See: {PROG} --help"
        raise UsageError(f"unknown command {word!r}", fix=hint)
    command = parse(load(name), f"{PROG} {name}", rest)
    with stopping_in_order():
        return command.run()


def overview() -> str:
    """The text of ``dm05-prep --help``."""
    lines = [f"usage: {PROG} COMMAND [OPTIONS]", "", "Prepare data for training DM05.", "", "commands:"]
    lines += [f"  {name:<11} {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "Examples:"]
    lines += [f"  {PROG} dataset --source hf --workspace dm05", f"  {PROG} COMMAND --help", f"  {PROG} --version", ""]
    return "\n".join(lines).rstrip()


def load(name: str) -> type[Command]:
    """The class behind a command of :data:`COMMANDS`."""
    module_name, class_name = COMMANDS[name][0].split(":")
    command: type[Command] = getattr(importlib.import_module(module_name), class_name)
    return command


def parse(command: type[Command], prog: str, argv: list[str]) -> Command:
    """Read flags into ``command``; UsageError, in one line, for a wrong one. ``--help`` prints and exits 0."""
    import tyro
    from dm05_schemas.flags import parse_flags

    pairs_off = (tyro.conf.FlagCreatePairsOff,)
    return parse_flags(command, argv, prog=prog, description=inspect.getdoc(command), config=pairs_off)
