"""The command ``dm05-train``: trains, or with a first word ``eval``, ``memory`` or ``bench`` does that."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TypeVar

from dm05_schemas.cli import run
from dm05_schemas.errors import UsageError
from dm05_schemas.flags import parse_flags
from dm05_schemas.version import tool_version

from dm05_train.config import TrainConfig
from dm05_train.errors import TrainError

T = TypeVar("T")

COMMANDS = {
    "eval": ("dm05_train.evaluate", "held-out loss, and predicted against true actions in real units"),
    "memory": ("dm05_train.memory", "what a configuration needs per GPU"),
    "bench": ("dm05_train.bench", "step time of the plain path, of each switch and of all of them"),
}

DESCRIPTION = """Fine-tune DM05.

Examples:
  dm05-train                                              the workspace here, its released weights, 300 steps
  dm05-train --workspace W --trainer-config.num-train-steps 2000 --trainer-config.save-strategy steps
  dm05-train --model-config.model-name-or-path OUTPUT/checkpoint-000100      goes on where that run stopped
  torchrun --nproc-per-node 8 -m dm05_train --trainer-config.per-device-train-batch-size 4

Alone on a machine with several GPUs it starts torchrun itself; for several machines use
scripts/run_full_sft_distributed.sh. Dashes and underscores mean the same in a flag. A flag beats an environment
variable (WORKSPACE_DIR, DATA_PATH, NORM_STATS_PATH, PER_DEVICE_BATCH, TRAIN_STEPS), which beats the default.
Speed switches are environment variables: DM05_PERF_ENABLE=1 turns them on, DM05_PERF_LOG=1 lists them.

--version says which dm05-train this is. Other commands, each with its own --help:
""" + "\n".join(f"  dm05-train {name:8} {what}" for name, (_, what) in COMMANDS.items())


def read_flags(kind: type[T], default: T, arguments: Sequence[str], prog: str, description: str) -> T:
    """A config from flags laid over ``default``; UsageError for a wrong flag, exit 0 after --help."""
    return parse_flags(kind, arguments, prog=prog, description=description, default=default)


def read_train_config(arguments: Sequence[str]) -> TrainConfig:
    """The configuration of a training run from its flags and the environment."""
    return read_flags(TrainConfig, TrainConfig.defaults(os.environ), arguments, "dm05-train", DESCRIPTION)


def train(arguments: Sequence[str]) -> int:
    """Train in this process, or start one process a GPU and wait for them."""
    from dm05_train.env import speaking_in_turn, under_torchrun

    with speaking_in_turn(os.environ):
        config = read_train_config(arguments)
    if not under_torchrun(os.environ):
        from dm05_train.launch import count_gpus, plan, start

        chosen = plan(os.environ, count_gpus())
        if chosen.processes > 1:
            return start(chosen, config, arguments, os.environ)
    from dm05_train.train import train as train_here

    return train_here(config, os.environ)


def dispatch() -> int:
    """Run the command of this process's arguments."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("--version", "-V"):
        print(f"dm05-train {tool_version()}")
        return 0
    if arguments and arguments[0] in COMMANDS:
        command: Callable[[Sequence[str]], int] = import_module(COMMANDS[arguments[0]][0]).main
        return command(arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1, cutoff=0.4)
        offer = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"no command is called {arguments[0]!r}",
            fix=f"{offer}Without a command dm05-train trains; the others are {', '.join(COMMANDS)}",
        )
    return train(arguments)


def installed() -> int:
    """:func:`dispatch`; TrainError where the packages of training are not installed, as on a download box."""
    try:
        return dispatch()
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("dm05_"):
            raise
        raise TrainError(
            f"training needs {error.name}, which is not installed", fix="Run pip install -e '.[train]'"
        ) from error


def main() -> None:
    """Run the command and exit; :mod:`dm05_train.__main__` is where the console script begins."""
    run(installed, "dm05-train")
