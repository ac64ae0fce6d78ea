"""Where the command dm05-train begins: until a run listens, a signal ends it on the spot."""

from __future__ import annotations

import os

from dm05_schemas.stops import end_at_once


def main() -> None:
    """Entry point of the console script, and of the ranks that the launcher starts."""
    end_at_once("dm05-train", silent="LOCAL_RANK" in os.environ, usr1=True)
    from dm05_train.cli import main as go_on

    go_on()


if __name__ == "__main__":
    main()
