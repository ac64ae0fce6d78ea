"""Where the command dm05-prep begins: until its modules are loaded, a signal ends it on the spot."""

from __future__ import annotations

from dm05_schemas.stops import end_at_once


def main() -> None:
    """Entry point of the console script."""
    end_at_once("dm05-prep")
    from dm05_prep.cli import main as go_on

    go_on()


if __name__ == "__main__":
    main()
