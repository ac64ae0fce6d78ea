"""How fast files come over the loopback, next to curl with as many streams, with all checksums on.

    python tools/bench_transfer.py [--gib 2] [--streams 8] [--rounds 3] [--folder DIR]

The server is a process of its own (tests/servers). curl runs as one process a stream, each with its range and its file.
Ours runs in a fresh process too, so that its peak memory is its own. Rounds alternate. Nobody waits for the disk. Who
fetches with curl takes a sum afterwards: that is shown as well. On a machine with other work the
best round of each says most; the median is shown as well.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "servers"))

from process import Service

TITLES = {
    "curl": "curl, no checksum",
    "summed": "curl, then openssl",
    "bos": "ours from BOS, crc32",
    "hf": "ours from a hub, sha256",
}
Result = dict[str, float]

OURS = """
import json, resource, sys, threading, time
from pathlib import Path
from dm05_prep.sources import SourceOptions, open_source
name, uri, endpoint, target, streams = sys.argv[1:]
options = SourceOptions(endpoint=endpoint, anonymous=True)
source = open_source(name, uri, kind="dataset", jobs=int(streams), options=options)
file = source.files()[0]
begun = resource.getrusage(resource.RUSAGE_SELF)
started = time.perf_counter()
source.fetch(file, Path(target), progress=lambda count: None, stop=threading.Event())
seconds = time.perf_counter() - started
spent = resource.getrusage(resource.RUSAGE_SELF)
cpu = spent.ru_utime + spent.ru_stime - begun.ru_utime - begun.ru_stime
print(json.dumps({"seconds": seconds, "cpu": cpu, "mib": spent.ru_maxrss / 1024}))
"""


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-transfer-", dir=arguments.folder))
    try:
        compare(folder, int(arguments.gib * (1 << 30)), arguments.streams, arguments.rounds)
    finally:
        shutil.rmtree(folder)


def compare(folder: Path, size: int, streams: int, rounds: int) -> None:
    """All contenders, ``rounds`` times in turn."""
    part = folder / "root" / "bucket" / "p" / "libero.tar.part-000"
    part.parent.mkdir(parents=True)
    write_random(part, size)
    repository = folder / "hub" / "datasets" / "owner" / "name"
    repository.mkdir(parents=True)
    os.link(part, repository / part.name)
    results: dict[str, list[Result]] = {name: [] for name in TITLES}
    with (
        Service("bos_server", folder / "root", public_read=True, public_list=True, multipart=True) as bos,
        Service("hub_server", folder / "hub") as hub,
    ):
        url = f"{bos.url}/bucket/p/{part.name}"
        curl(url, folder, size, streams=1)  # the services take their sums once
        ours("hf", "owner/name", hub.url, folder, streams)
        for _ in range(rounds):
            results["curl"].append(curl(url, folder, size, streams))
            results["summed"].append(curl(url, folder, size, streams, summed=True))
            results["bos"].append(ours("bos", "bos://bucket/p/", bos.url, folder, streams))
            results["hf"].append(ours("hf", "owner/name", hub.url, folder, streams))
    report(size, streams, results)


def report(size: int, streams: int, results: dict[str, list[Result]]) -> None:
    """Print rates, ratio to curl, CPU time without the server's, and peak memory."""
    gib = size / (1 << 30)
    print(f"{gib:.2f} GiB over the loopback, {streams} streams, {os.cpu_count()} cores")
    base = [result["seconds"] for result in results["curl"]]
    for name, title in TITLES.items():
        seconds = [result["seconds"] for result in results[name]]
        best, median = min(seconds), statistics.median(seconds)
        ratio, middle = min(base) / best, statistics.median(base) / median
        rates = f"best {gib / best:4.2f}, median {gib / median:4.2f} GiB/s; of curl {ratio:4.0%}, {middle:4.0%}"
        cpu = statistics.median(result["cpu"] for result in results[name]) / gib
        peak = max(result.get("mib", 0.0) for result in results[name])
        print(f"{title:<24} {rates}; CPU {cpu:4.2f} s a GiB" + (f"; peak memory {peak:.0f} MiB" if peak else ""))


def write_random(path: Path, size: int) -> None:
    """A file that no one can compress."""
    block = os.urandom(1 << 24)
    with path.open("wb") as file:
        while size > 0:
            file.write(block[: min(size, len(block))])
            size -= len(block)


def curl(url: str, folder: Path, size: int, streams: int, *, summed: bool = False) -> Result:
    """Seconds that one curl a stream takes for the whole file, and the sha256 by openssl after it."""
    share = -(-size // streams)
    outputs = [folder / f"curl.{number}" for number in range(streams)]
    os.sync()
    begun, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    children = [
        subprocess.Popen(["curl", "-sf", "-r", f"{n * share}-{min(size, (n + 1) * share) - 1}", "-o", str(out), url])
        for n, out in enumerate(outputs)
    ]
    codes = [child.wait() for child in children]
    if summed:
        names = " ".join(out.name for out in outputs)
        subprocess.run(f"cat {names} | openssl dgst -sha256 >/dev/null", shell=True, check=True, cwd=folder)
    seconds = time.perf_counter() - started
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    if any(codes) or sum(out.stat().st_size for out in outputs) != size:
        sys.exit("curl failed")
    for out in outputs:
        out.unlink()
    return {"seconds": seconds, "cpu": spent.ru_utime + spent.ru_stime - begun.ru_utime - begun.ru_stime}


def ours(name: str, uri: str, endpoint: str, folder: Path, streams: int) -> Result:
    """Seconds and peak MiB of our loop, in a process of its own."""
    target = folder / "ours.bin"
    command = [sys.executable, "-c", OURS, name, uri, endpoint, str(target), str(streams)]
    os.sync()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    target.unlink()
    result: Result = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
