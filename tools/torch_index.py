"""Prints the pip option for PyTorch's index of CPU builds when that index answers, else nothing."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

TIMEOUT_SECONDS = 5.0


def option(index: str) -> str:
    """``--extra-index-url INDEX``, or an empty string when the index is empty or does not answer in time."""
    if not index:
        return ""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=TIMEOUT_SECONDS):
            return f"--extra-index-url {index}"
    except (OSError, ValueError):
        return ""


if __name__ == "__main__":
    print(option(sys.argv[1]))
