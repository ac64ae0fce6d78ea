"""The child process of :mod:`dm05_prep.sources.helper`: one download, described by a JSON object on stdin.

``{"tool": "hf_transfer" | "xet", "folder": where to put it, "url", "token", "connections",
"repository", "type", "commit", "name", "endpoint"}``. Exit code 0, or 1 with one line on stderr that holds no secret.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

CHUNK_BYTES = 8 << 20
RETRIES_OF_A_CHUNK = 5
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Do the job; the exit code."""
    _die_with_parent()
    job = json.loads(sys.stdin.buffer.read())
    try:
        {"hf_transfer": _hf_transfer, "xet": _xet}[job["tool"]](job)
    except Exception as error:
        print(_shown(error, job.get("token")), file=sys.stderr)
        return 1
    return 0


def _hf_transfer(job: dict[str, Any]) -> None:
    import hf_transfer

    connections = min(16, max(2, job["connections"]))
    hf_transfer.download(
        url=job["url"],
        filename=str(Path(job["folder"]) / "file"),
        max_files=connections,
        chunk_size=CHUNK_BYTES,
        parallel_failures=connections - 1,
        max_retries=RETRIES_OF_A_CHUNK,
        headers={"Authorization": f"Bearer {job['token']}"} if job["token"] else {},
    )


def _xet(job: dict[str, Any]) -> None:
    os.environ.update(HF_HUB_DISABLE_XET="0", HF_ENDPOINT=job["endpoint"], HF_HUB_DISABLE_PROGRESS_BARS="1")
    os.environ.pop("HF_HUB_ENABLE_HF_TRANSFER", None)
    from huggingface_hub import hf_hub_download

    hf_hub_download(
        job["repository"],
        job["name"],
        repo_type=job["type"],
        revision=job["commit"],
        local_dir=job["folder"],
        token=job["token"] or False,
    )


def _die_with_parent() -> None:
    """Be killed when the parent is, also by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _shown(error: Exception, token: str | None) -> str:
    """One line about ``error``: no token, no query of a signed address."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if token:
        text = text.replace(token, "***")
    return re.sub(r"\?[^\s)'\"]*", "?***", text)


if __name__ == "__main__":
    sys.exit(main())
