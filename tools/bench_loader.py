"""The loader against the plain way, its opening time, and the memory of its workers. For developers; never a test.

    python tools/bench_loader.py                  samples a second on one core, side by side
    python tools/bench_loader.py open             time and memory of opening at 2.7, 27 and 273 thousand frames
    python tools/bench_loader.py memory           16 workers over two epochs of 273 thousand frames of tiny images

The plain way is the public recipe's: read and split the whole episode for every sample, decode with Pillow, pad, resize
to 448, scale in float64 and normalise on the CPU, tokenise the prompt with every image token written out.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import simplejpeg
import torch
import tyro
from dm05_prep.demo.tokenizer import build_tokenizer
from dm05_prep.index import build_index
from dm05_prep.norm_stats import compute
from dm05_prep.pack import build_pack
from dm05_schemas.episode import read_episode
from dm05_schemas.registry import DatasetSpec, lookup
from dm05_schemas.workspace import Workspace
from dm05_train.data.arena import Arena
from dm05_train.data.dataset import Layout, MemoryMappedDataset, open_dataset
from dm05_train.data.loader import Loader
from dm05_train.data.worker import fill
from dm05_train.model.config import DM05Config
from dm05_train.prompt import PromptBuilder
from PIL import Image
from tokenizers import Tokenizer

SIZE, CHUNK, BATCH = 448, 10, 8
EPISODE_FRAMES = 161  # LIBERO: 273 thousand frames in 1,693 episodes
GOLDEN_CONFIG = Path(__file__).parents[1] / "tests" / "golden" / "dm05_config.json"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the loader."""

    what: tyro.conf.Positional[Literal["speed", "open", "memory"]] = "speed"
    """What to measure."""
    workspace: Path | None = None
    """A workspace with libero_pi0_all to read; made up when left out (256x256 pictures of about 19 KB, as LIBERO's)."""
    seconds: float = 5.0
    """How long each way is run."""
    workers: int = 16
    """memory: number of workers."""
    frames: int = 273_000
    """memory: number of frames."""


def main(bench: Bench) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="dm05-bench-") as temporary:
        folder = Path(temporary)
        {"speed": speed, "open": opening, "memory": memory}[bench.what](bench, folder)


def make_workspace(root: Path, frames: int, side: int, pictures: int) -> Workspace:
    """A LIBERO-like dataset of so many frames that share a few pictures."""
    workspace, rng = Workspace(root), np.random.default_rng(0)
    spec = lookup("libero_pi0_all", workspace)
    spec.images(workspace).mkdir(parents=True)
    spec.jsonl(workspace).mkdir(parents=True)
    for number in range(pictures):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float32)
        noisy = np.clip(pixels + rng.normal(0, 6, pixels.shape), 0, 255).astype(np.uint8)
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(noisy), quality=86, colorsubsampling="420")
        (spec.images(workspace) / f"{number:06d}.jpg").write_bytes(data)
    for episode in range(-(-frames // EPISODE_FRAMES)):
        count = min(EPISODE_FRAMES, frames - episode * EPISODE_FRAMES)
        lines = []
        for t in range(max(2, count)):
            views = {
                key: {"type": "image", "url": f"./{(episode * 7 + 2 * t + camera) % pictures:06d}.jpg"}
                for camera, key in enumerate(spec.image_keys)
            }
            vectors = {"state": rng.normal(size=8).round(6).tolist(), "action": rng.normal(size=7).round(6).tolist()}
            lines.append(json.dumps(views | vectors | {"prompt": f"put object {episode % 40} on the plate"}))
        path = spec.jsonl(workspace) / f"episode_{episode:05d}.jsonl"
        path.write_text("\n".join(lines) + "\n")
    build_index(workspace, spec)
    return workspace


def opened(workspace: Workspace, layout: Layout) -> MemoryMappedDataset:
    spec = lookup("libero_pi0_all", workspace)
    stats = compute(workspace, spec, CHUNK, "absolute", out=workspace.root / "norm_stats").stats
    return open_dataset(workspace, spec, stats, CHUNK, "absolute", layout)


def prompts(folder: Path, spec: DatasetSpec) -> tuple[PromptBuilder, Path]:
    """A prompt builder with 256 tokens an image, on the demo's tokenizer."""
    tokenizer = build_tokenizer()
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer.json, ensure_ascii=False))
    gemma = DM05Config.from_json(GOLDEN_CONFIG)
    config = replace(gemma, image_token_id=tokenizer.ids["<image_soft_token>"])
    return PromptBuilder(path, config, spec), path


def per_second(work: Callable[[int], int], seconds: float) -> float:
    """Samples a second of CPU time of `work(i)`, which makes and counts some."""
    work(0)
    made, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        made += work(made)
    return made / (time.process_time() - start)


def speed(bench: Bench, folder: Path) -> None:
    """Samples a second and core, plain and ours, and where ours goes."""
    workspace = Workspace(bench.workspace) if bench.workspace else make_workspace(folder / "w", 1300, 256, 400)
    spec = lookup("libero_pi0_all", workspace)
    builder, tokenizer = prompts(folder, spec)
    plain = PlainWay(workspace, spec, tokenizer)
    slow = per_second(lambda i: plain.batch(range(i, i + 2)), bench.seconds)
    print(f"plain way              {slow:8.1f} samples/s/core")
    build_pack(workspace, spec)
    layouts: tuple[Layout, ...] = ("jsonl", "pack")
    for layout in layouts:
        dataset = opened(workspace, layout)
        loader = Loader(dataset, builder, image_size=SIZE, per_device_batch=BATCH)
        arena = Arena(loader.layout, image_bytes=BATCH * dataset.cameras * 256 * 256 * 3)

        def make(i: int, loader: Loader = loader, arena: Arena = arena, dataset: MemoryMappedDataset = dataset) -> int:
            ids = loader.schedule.sample_ids(loader.schedule.positions(0, i // BATCH))
            filled = fill(dataset, arena, ids.tolist())
            loader.prompts.write(arena.arrays, filled.prompts, filled.states)
            return BATCH

        fast = per_second(make, bench.seconds)
        share = decode_seconds(dataset, bench.seconds / 2) * fast
        print(f"ours, {layout:<5}            {fast:8.1f} samples/s/core, {fast / slow:.1f}x; JPEG decode {share:.0%}")


def decode_seconds(dataset: MemoryMappedDataset, seconds: float) -> float:
    """CPU seconds a sample that JPEG decoding alone takes, from memory into one buffer."""
    ids = range(0, len(dataset), max(1, len(dataset) // 50))
    images = [dataset.encoded(i, camera)[0] for i in ids for camera in range(dataset.cameras)]
    buffer = np.empty(256 * 256 * 3, dtype=np.uint8)

    def decode(_: int) -> int:
        for image in images:
            simplejpeg.decode_jpeg(image, buffer=buffer)
        return len(images) // dataset.cameras

    return 1 / per_second(decode, seconds)


class PlainWay:
    """The public recipe's way from a sample number to a batch, written out."""

    def __init__(self, workspace: Workspace, spec: DatasetSpec, tokenizer: Path) -> None:
        self._images, self._spec = spec.images(workspace), spec
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._samples = [
            (path, t)
            for path in sorted(spec.jsonl(workspace).iterdir())
            for t in range(len(read_episode(path, spec)) - 1)
        ]
        self._order = np.random.default_rng(0).permutation(len(self._samples))

    def batch(self, numbers: range) -> int:
        samples = [self._sample(*self._samples[self._order[i % len(self._order)]]) for i in numbers]
        longest = max(len(sample["input_ids"]) for sample in samples)
        for sample in samples:
            sample["input_ids"] = np.pad(sample["input_ids"], (0, longest - len(sample["input_ids"])))
        for name in samples[0]:
            torch.stack([torch.as_tensor(sample[name]) for sample in samples])
        return len(samples)

    def _sample(self, path: Path, t: int) -> dict[str, Any]:
        frames = [json.loads(line) for line in path.read_text().split("\n") if line]
        chunk = np.array([frames[min(t + k, len(frames) - 1)]["action"] for k in range(CHUNK)], dtype=np.float32)
        pixels = [self._pixels(self._images / frames[t][key]["url"]) for key in self._spec.image_keys]
        text = f"<bos><start_of_turn>user\nRobot: Franka\nOverall speed: 0.5\nTask: {frames[t]['prompt']}.\n"
        for label in self._spec.image_prompts:
            image = "<start_of_image>" + "<image_soft_token>" * 256 + "<end_of_image>"
            text += f"{label} image:\n\n{image}\n\n"
        ids = np.array(self._tokenizer.encode(text + "<end_of_turn>\n<start_of_turn>model\n").ids)
        return {"input_ids": ids, "pixel_values": np.stack(pixels), "action": np.pad(chunk, ((0, 0), (0, 25)))}

    @staticmethod
    def _pixels(path: Path) -> np.ndarray[Any, Any]:
        image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
        side = max(image.size)
        square = Image.new("RGB", (side, side))
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        planes = torch.from_numpy(np.array(square)).permute(2, 0, 1)[None].float()
        large = torch.nn.functional.interpolate(planes, size=(SIZE, SIZE), mode="bilinear")[0].round().byte().numpy()
        scaled = (large.astype(np.float64) * (1 / 255)).astype(np.float32)
        half = np.full((3, 1, 1), 0.5, dtype=np.float32)
        return np.asarray((scaled - half) / half)


def opening(bench: Bench, folder: Path) -> None:
    """What a worker pays to open the dataset, in a process of its own."""
    for frames in (2_730, 27_300, 273_000):
        workspace = make_workspace(folder / str(frames), frames, 8, 50)
        layouts: tuple[Layout, ...] = ("jsonl", "pack")
        build_pack(workspace, lookup("libero_pi0_all", workspace))
        for layout in layouts:
            dataset = opened(workspace, layout)
            before, start = psutil.Process().memory_info().rss, time.perf_counter()
            again = dataset.handle.open()
            seconds, grown = time.perf_counter() - start, psutil.Process().memory_info().rss - before
            start = time.perf_counter()
            opened(workspace, layout)
            checked = time.perf_counter() - start
            print(
                f"{frames:8,} frames, {layout:<5}: a worker opens it in {seconds * 1e3:5.1f} ms and "
                f"{grown / 2**20:4.1f} MiB; checked against its source and checksum {checked * 1e3:5.0f} ms"
            )
            again.close()


def memory(bench: Bench, folder: Path) -> None:
    """Private memory of the workers over two epochs."""
    workspace = make_workspace(folder / "w", bench.frames, 8, 50)
    spec = lookup("libero_pi0_all", workspace)
    build_pack(workspace, spec)
    dataset = opened(workspace, "pack")
    builder, _ = prompts(folder, spec)
    loader = Loader(dataset, builder, image_size=28, per_device_batch=64, workers=bench.workers)
    steps = 2 * len(dataset) // 64
    start = time.perf_counter()
    for step in range(steps + 1):
        next(loader)
        if step % (steps // 8) == 0:
            children = [c for c in psutil.Process().children() if "data.worker" in " ".join(c.cmdline())]
            sizes = [child.memory_full_info().uss / 2**20 for child in children]
            print(
                f"epoch {step * 64 / len(dataset):4.2f}: {len(sizes)} workers, private memory "
                f"{min(sizes):.1f} to {max(sizes):.1f} MiB each, {sum(sizes):.0f} MiB in all; "
                f"{step * 64 / (time.perf_counter() - start):,.0f} samples/s",
                flush=True,
            )
    loader.close()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Bench, description=__doc__)))
