"""A process that fetches every file of a source, all at once, to be killed by tests. Prints its peak memory at the end.

Arguments: bos or hf, uri, endpoint, folder, connections.
"""

from __future__ import annotations

import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dm05_prep.sources import SourceOptions, open_source


def peak_mib() -> int:
    """Most memory this program had at once; ru_maxrss would count the process that started it too."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main(name: Any, uri: str, endpoint: str, folder: str, jobs: str) -> None:
    """Fetch."""
    source = open_source(name, uri, kind="dataset", jobs=int(jobs), options=SourceOptions(endpoint=endpoint))
    files, stop = source.files(), threading.Event()

    def fetch(file: Any) -> Path:
        return source.fetch(file, Path(folder) / file.name, progress=lambda count: None, stop=stop)

    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(fetch, files))
    print(peak_mib())


if __name__ == "__main__":
    main(*sys.argv[1:])
