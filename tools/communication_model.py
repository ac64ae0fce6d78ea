"""Predict the step time on several GPUs under DDP, from timings of one GPU and the rates of the links.

    python tools/communication_model.py --config tests/golden/dm05_config.json

Gradients are summed by rings, bucket by bucket, while the backward pass goes on. A bucket is sent when its last
gradient is there and the bucket before it is through; what is left when the backward pass ends is exposed. Nothing here
measures: every rate is a flag, and the defaults are assumptions or one-GPU timings (docs/performance.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.weights import freeze_untrained
from dm05_train.perf.restructure import restructure

BYTES = 2  # a BF16 gradient
GPUS_A_MACHINE = 8
EXPERT_ATTENTION_SECONDS = 0.009 / 8  # a sample, nearly all of it backward (stock torch)
LANGUAGE_TO_VISION = 3.5 / 1.9  # FLOPs of a sample's forward pass
# Name begins -> place in the backward pass; what steers all of the expert's layers gets its gradient after them.
ARRIVAL = (
    "model.action_out_proj.",
    "model.action_expert.layers.",
    "model.action_expert.",
    "model.action_in_proj.",
    "model.time_mlp_",
    "model.vlm.model.language_model.",
    "model.vlm.model.multi_modal_projector.",
    "model.vlm.model.vision_tower.",
)
PARTS = ("expert", "expert", "expert", "expert", "expert", "language", "vision", "vision")


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """One parameter's gradient, and the part of the model it belongs to."""

    name: str
    part: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One GPU's seconds: the backward pass, and all else of a step (forward, clip, update)."""

    backward: float
    rest: float
    batch: int


@dataclass(frozen=True, kw_only=True)
class Links:
    """What sums gradients.

    ``nvlink`` and ``network``: bytes/s of a GPU to the next, and of a machine to the next, in one direction.
    ``efficiency``: the share of them that a ring reaches. ``hop``: seconds each of a ring's steps takes at least.
    ``contention``: how much slower the backward pass is while a bucket is on its way. ``memory``: bytes/s of a copy.
    """

    nvlink: float
    network: float
    efficiency: float
    hop: float
    contention: float
    memory: float

    def seconds(self, size: int, gpus: int) -> float:
        """Time of a ring all-reduce of ``size`` bytes."""
        rate = self.nvlink if gpus <= GPUS_A_MACHINE else min(self.nvlink, self.network)
        return 2 * (gpus - 1) * (size / gpus / (rate * self.efficiency) + self.hop)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of several GPUs: seconds, and of these what communication adds after the backward pass has ended."""

    step: float
    communication: float
    exposed: float


def gradients(config: Path, *, packed: bool) -> list[Gradient]:
    """The trained parameters' gradients in the order in which the backward pass finishes them."""
    with torch.device("meta"):
        model = DM05(DM05Config.from_json(config))
    freeze_untrained(model)
    if packed:
        restructure(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    places = [next(i for i, start in enumerate(ARRIVAL) if name.startswith(start)) for name, _ in trained]
    order = sorted(range(len(trained)), key=lambda i: (places[i], -i))
    return [Gradient(name=trained[i][0], part=PARTS[places[i]], bytes=BYTES * trained[i][1].numel()) for i in order]


def buckets(sizes: Sequence[int], cap: int) -> list[int]:
    """Bytes of each bucket: as DDP does, one is closed by the gradient that fills it (or that is left last)."""
    found, filling = [], 0
    for size in sizes:
        filling += size
        if filling >= cap:
            found.append(filling)
            filling = 0
    return found + ([filling] if filling else [])


def parts(found: Sequence[Gradient], timing: Timing, memory: float) -> dict[str, tuple[int, float]]:
    """(bytes, seconds) of each part of the backward pass.

    The expert is bound by memory (weights read, gradients written) and its attention; the other two share the rest by
    their FLOPs. Within a part, gradients come evenly.
    """
    size = {part: sum(g.bytes for g in found if g.part == part) for part in ("expert", "language", "vision")}
    expert = min(timing.backward / 2, EXPERT_ATTENTION_SECONDS * timing.batch + 2 * size["expert"] / memory)
    vision = (timing.backward - expert) / (1 + LANGUAGE_TO_VISION)
    seconds = {"expert": expert, "language": timing.backward - expert - vision, "vision": vision}
    return {part: (size[part], seconds[part]) for part in size}


def ready_at(position: int, spans: dict[str, tuple[int, float]]) -> float:
    """Seconds into the backward pass at which the first ``position`` bytes of gradients are there."""
    now = 0.0
    for size, seconds in spans.values():
        if position <= size:
            return now + seconds * position / size
        position, now = position - size, now + seconds
    return now


def predict(found: Sequence[Gradient], timing: Timing, links: Links, *, gpus: int, mb: int, copies: int) -> Prediction:
    """One step.

    Args:
        mb: size of a bucket in MiB, as DDP counts.
        copies: passes over all gradients that DDP adds on the GPU: 1 divides them into buckets, 2 copies them back too.
    """
    sizes = buckets([g.bytes for g in found], mb << 20)
    times = [links.seconds(size, gpus) for size in sizes]
    copying = copies * 2 * sum(sizes) / links.memory
    plain = timing.backward + copying
    stretch = 1 + links.contention * min(sum(times), plain) / plain
    backward, spans = plain * stretch, parts(found, timing, links.memory)
    end, position = 0.0, 0
    for size, seconds in zip(sizes, times, strict=True):
        position += size
        end = max(end, ready_at(position, spans) * backward / timing.backward) + seconds
    exposed = max(0.0, end - backward)
    return Prediction(step=timing.rest + backward + exposed, communication=sum(times), exposed=exposed)


# (what, samples a GPU, seconds of forward and backward, seconds of clip and update), measured on one H200.
CASES = (
    ("all on", 8, 0.2682, 0.0170),
    ("all on, compensated", 8, 0.2675, 0.0214),
    ("all on", 4, 0.1407, 0.0170),
    ("all on, compensated", 4, 0.1402, 0.0214),
)
PLAIN = (
    ("plain", 8, 0.8076, 0.771),
    ("plain, checkpointed", 8, 1.0482, 0.803),
)


def timing_of(batch: int, forward_backward: float, update: float) -> Timing:
    """Backward is two thirds of forward and backward."""
    return Timing(backward=forward_backward * 2 / 3, rest=forward_backward / 3 + update, batch=batch)


def rows(config: Path, links: Links, gpus: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """The cells of the table."""
    for packed, cases, caps, copies in ((True, CASES, sizes, 1), (False, PLAIN, (25,), 2)):
        found = gradients(config, packed=packed)
        for name, batch, forward_backward, update in cases:
            timing = timing_of(batch, forward_backward, update)
            alone = timing.backward + timing.rest
            for count in gpus:
                for mb in caps:
                    p = predict(found, timing, links, gpus=count, mb=mb, copies=copies)
                    amount = len(buckets([g.bytes for g in found], mb << 20))
                    yield (
                        f"{name}, B = {batch}",
                        str(count),
                        f"{mb} ({amount})",
                        f"{p.communication * 1e3:.1f}",
                        f"{p.exposed * 1e3:.1f}",
                        f"{p.step:.4f}",
                        f"{count * batch / p.step:.1f}",
                        f"{alone / p.step:.1%}",
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a DM05 config.json")
    parser.add_argument("--gpus", default="2,4,8,16", help="how many; more than 8 are several machines (%(default)s)")
    parser.add_argument("--buckets", default="25,128,512,1000", help="MB (%(default)s)")
    parser.add_argument("--nvlink", type=float, default=450.0, help="GB/s in one direction (%(default)s)")
    parser.add_argument("--network", type=float, default=200.0, help="GB/s of a machine, 8 x 200 Gb/s (%(default)s)")
    parser.add_argument("--efficiency", type=float, default=0.8, help="share of them a ring reaches (%(default)s)")
    parser.add_argument("--hop-us", type=float, default=5.0, help="least time of a ring's step (%(default)s)")
    parser.add_argument("--contention", type=float, default=0.15, help="slow-down of backward (%(default)s)")
    parser.add_argument("--memory", type=float, default=4250.0, help="GB/s of a copy on the GPU (%(default)s)")
    a = parser.parse_args()
    links = Links(
        nvlink=a.nvlink * 1e9,
        network=a.network * 1e9,
        efficiency=a.efficiency,
        hop=a.hop_us * 1e-6,
        contention=a.contention,
        memory=a.memory * 1e9,
    )
    total = sum(g.bytes for g in gradients(a.config, packed=True))
    print(f"{total // BYTES:,} trained parameters, {total / 1e9:.2f} GB of gradients a step\n")
    head = ("case", "GPUs", "bucket MB (count)", "all-reduce ms", "exposed ms", "step s", "samples/s", "scaling")
    numbers = [[int(word) for word in text.split(",")] for text in (a.gpus, a.buckets)]
    for cells in (head, ("---",) * len(head), *rows(a.config, links, *numbers)):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
