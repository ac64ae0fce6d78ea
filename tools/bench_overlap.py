"""Does extraction run while later parts arrive? Download alone, extraction alone, and both together.

    python tools/bench_overlap.py [--mib 1152] [--parts 9] [--slower 2] [--folder DIR]

The archive holds files of about 30 KB, as the released one does, in nine parts, and a sixteenth of a part is made
durable at a time, as with the released size. The server is a process of its own. It sends at a rate at which the
download takes ``--slower`` times as long as the extraction: 1 is the hardest case, a usual network is far slower.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from bench_reassemble import INSIDE, write_parts
from dm05_prep.extract import ExtractOptions, extract
from dm05_prep.parts import order_parts
from dm05_prep.sources import Source, SourceOptions, open_source
from dm05_prep.sources.partfile import SPAN_BYTES
from process import Service

JOBS = 8


def main() -> None:
    """Make the archive, run the three ways, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1152, help="size of the archive")
    parser.add_argument("--parts", type=int, default=9)
    parser.add_argument("--slower", type=float, default=2.0, help="download time in extraction times")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--way", nargs=3, metavar=("NAME", "ENDPOINT", "FOLDER"), help="used by the benchmark itself")
    arguments = parser.parse_args()
    if arguments.way:
        print(*run_way(*arguments.way))
        return
    folder = Path(tempfile.mkdtemp(prefix="bench-overlap-", dir=arguments.folder))
    try:
        compare(folder, arguments.mib << 20, arguments.parts, arguments.slower)
    finally:
        shutil.rmtree(folder)


def compare(folder: Path, size: int, count: int, slower: float) -> None:
    """The three ways, each in a process of its own."""
    parts = folder / "root" / "bucket" / "p"
    parts.mkdir(parents=True)
    files = write_parts(parts, size, -(-size // count))
    (parts / "SHA256SUMS").unlink()
    with Service("bos_server", folder / "root", public_read=True, public_list=True, multipart=True) as service:
        timed("download", service.url, folder, "warm")
        extraction = timed("extract", service.url, folder, "e")
        streams = min(JOBS, -(-size // count // SPAN_BYTES))
        service.order(rate=size / extraction[0] / slower / streams)
        ways = {
            "download alone": timed("download", service.url, folder, "d"),
            "extraction alone": extraction,
            "both together": timed("both", service.url, folder, "b"),
        }
    print(f"{files:,} files, {size >> 20} MiB in {count} parts")
    for title, (seconds, cpu) in ways.items():
        print(f"{title:<16} {seconds:6.2f} s, CPU {cpu:6.2f} s")
    (download, work), (extraction, more), (both, _) = ways.values()
    bound = (work + more) / (os.cpu_count() or 1)
    print(
        f"{both / max(download, extraction):.2f} of the longer one, {both / (download + extraction):.2f} of their sum"
    )
    print(f"the CPU time of both spread evenly over all cores, without that of the server: {bound:.2f} s")


def timed(way: str, endpoint: str, folder: Path, name: str) -> tuple[float, float]:
    """Seconds of one way and of CPU for it, without the start of its process."""
    command = [sys.executable, __file__, "--way", way, endpoint, str(folder / name)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=folder)
    shutil.rmtree(folder / name)
    seconds, cpu = done.stdout.split()[-2:]
    return float(seconds), float(cpu)


def run_way(way: str, endpoint: str, folder: str) -> tuple[float, float]:
    """One way in this process; its seconds, and those of CPU with its children's."""
    work = Path(folder)
    (work / "parts").mkdir(parents=True)
    if way == "extract":
        source: Source = open_source("local", str(work.parent / "root" / "bucket" / "p"), kind="dataset", jobs=JOBS)
    else:
        options = SourceOptions(endpoint=endpoint, anonymous=True)
        source = open_source("bos", "bos://bucket/p/", kind="dataset", jobs=JOBS, options=options)
    parts = order_parts(source.files())
    started, spent = time.monotonic(), sum(os.times()[:4])
    if way == "download":
        for part in parts.parts:
            target = work / "parts" / part.name
            source.fetch(part.file, target, progress=lambda count: None, stop=threading.Event())
    else:
        batches = ExtractOptions(batch_bytes=parts.largest // 16)
        extract(source, parts, work / INSIDE[-1], INSIDE, parts_folder=work / "parts", options=batches)
    return time.monotonic() - started, sum(os.times()[:4]) - spent


if __name__ == "__main__":
    main()
