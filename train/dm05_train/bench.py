"""``dm05-train bench``: what each switch gives, on LIBERO shapes with generated weights.

Every case builds its model anew, makes optimizer steps on the same generated batch and draws, timed on the device.
"plain" is the reference path (eager, padded to the model's longest prompt), with and without activation checkpointing.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from dm05_schemas.errors import UsageError
from torch import Tensor

from dm05_train.config import require_number
from dm05_train.env import World
from dm05_train.model.config import RELEASED, DM05Config
from dm05_train.model.dm05 import DM05
from dm05_train.model.noise import draw
from dm05_train.model.weights import freeze_untrained, generate_weights
from dm05_train.optim.precision import Mode, weight_dtype
from dm05_train.perf.accelerate import Acceleration
from dm05_train.perf.switches import Switches
from dm05_train.timing import moment, seconds_between

# What acts on one GPU; the others need several.
SWITCHES = (
    "fused_adamw",
    "compile_suffix",
    "tf32_matmul",
    "cudnn_benchmark",
    "language_sync",
    "compile_vision",
    "restructure",
    "cuda_graph",
)
FP8 = "fp8_mlp"
TIMED = (*SWITCHES, FP8)
RECOMPUTED = {"checkpointed": 1, "half-checkpointed": 2}  # every how many-th layer
REAL_DIMS = 7
LEAST_TEXT = 8


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to time."""

    model_config: Path = RELEASED
    """A config.json; by default the released model's."""
    per_device_batch: int = 8
    """Samples of a step."""
    prefix: int = 568
    """Tokens of the longest prompt, rounded up to 8."""
    padded: int = 1024
    """What the plain path pads prompts to."""
    chunk_size: int = 10
    """Actions predicted at once."""
    precision: Mode = "bf16_compensated"
    """Of weights and moments, as in dm05-train."""
    steps: int = 10
    """Steps timed, after two that are not."""
    cases: str = "plain,each,without,all"
    """Which: plain, each (every switch alone), without (all but one), all, fp8 (all and FP8), checkpointed and
    half-checkpointed (all, recomputing every or every second layer); or such as all-bf16."""
    out: Path | None = None
    """Folder for bench.json and bench.png."""

    def __post_init__(self) -> None:
        for name in ("per_device_batch", "prefix", "padded", "chunk_size", "steps"):
            require_number(getattr(self, name), f"--{name.replace('_', '-')}", least=1)
        if self.padded < self.prefix:
            fix = "Give as many tokens as --prefix, or more"
            raise UsageError(f"{self.padded} tokens do not hold {self.prefix}", where="--padded", fix=fix)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    name: str
    switches: Switches
    mode: Mode
    checkpointing: int = 0
    """Every how many-th layer recomputes its activations; 0: none."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a case measured; seconds are medians over its steps."""

    name: str
    mode: str
    step_seconds: float
    backward_seconds: float
    update_seconds: float
    first_step_seconds: float
    peak_gib: float
    loss: float


def switches_of(names: Sequence[str]) -> Switches:
    """The master on, and of the single-GPU switches only these."""
    chosen: dict[str, Any] = {name: name in names for name in TIMED}
    return replace(Switches(enable=True), **chosen)


def cases(config: BenchConfig) -> Iterator[Case]:
    """The cases of ``config.cases``, in the order of the table.

    A CUDA graph cannot hold a host sync, so R18 is timed together with R13.
    """
    wanted, mode = config.cases.split(","), config.precision
    for word in wanted:
        if word == "plain":
            yield Case(name="plain, checkpointed", switches=Switches(), mode=mode, checkpointing=1)
            yield Case(name="plain", switches=Switches(), mode=mode)
        elif word == "each":
            for name in SWITCHES:
                names = ("cuda_graph", "language_sync") if name == "cuda_graph" else (name,)
                yield Case(name="only " + "+".join(label(n) for n in names), switches=switches_of(names), mode=mode)
        elif word == "without":
            for name in SWITCHES:
                others = [n for n in SWITCHES if n != name]
                yield Case(name=f"all but {label(name)}", switches=switches_of(others), mode=mode)
        elif word in RECOMPUTED:
            yield Case(name=f"all, {word}", switches=switches_of(SWITCHES), mode=mode, checkpointing=RECOMPUTED[word])
        elif word == "fp8":
            yield Case(name="all and FP8", switches=switches_of(TIMED), mode=mode)
        elif word in ("all", *(f"all-{m}" for m in get_args(Mode))):
            chosen: Any = word.removeprefix("all-") if word != "all" else mode
            yield Case(name="all", switches=switches_of(SWITCHES), mode=chosen)
        else:
            raise UsageError(
                f"no cases are called {word!r}",
                where="--cases",
                fix=f"Use plain, each, without, all, fp8, {', '.join(RECOMPUTED)}, all-bf16",
            )


def label(name: str) -> str:
    """R16 for ``restructure``: the short name of a switch."""
    variable = Switches.variables()[name].removeprefix("DM05_PERF_")
    return variable if variable.startswith("R10") else variable.split("_")[0]


def generated_batch(config: DM05Config, size: int, prefix: int, padded: int, device: torch.device) -> dict[str, Tensor]:
    """LIBERO-like samples: text, image, text, image, text; two images each, of text lengths that differ."""
    tokens, side = config.mm_tokens_per_image, config.vision.image_size
    generator = torch.Generator().manual_seed(0)
    types, real = torch.zeros(size, padded, dtype=torch.int64), torch.zeros(size, padded, dtype=torch.int64)
    text = prefix - 2 * tokens
    for i in range(size):
        head = text * 2 // 3 - i % 4
        types[i, head : head + tokens] = 1
        types[i, head + tokens + text // 10 : head + 2 * tokens + text // 10] = 1
        real[i, : prefix - i % 4] = 1
    mask = torch.zeros(size, config.chunk_size, config.action_dim)
    mask[..., :REAL_DIMS] = 1
    ids = torch.randint(3, config.text.vocab_size, (size, padded), generator=generator) * real
    action = torch.randn(size, config.chunk_size, config.action_dim, generator=generator) * mask
    pixels = torch.rand(2 * size, 3, side, side, generator=generator) * 2 - 1
    batch = {"input_ids": ids, "token_type_ids": types, "attention_mask": real, "pixel_values": pixels}
    return {n: t.to(device) for n, t in (batch | {"action": action, "action_mask": mask}).items()}


def build(config: DM05Config, mode: Mode, device: torch.device) -> DM05:
    """A model with generated weights, its embedding and dead parameters frozen."""
    with torch.device("meta"):
        model = DM05(config)
    model = model.to(weight_dtype(mode)).to_empty(device=device)
    generate_weights(model)
    freeze_untrained(model)
    return model


def accelerated(case: Case, world: World) -> Acceleration:
    """What the switches of a case come to here."""
    return Acceleration(switches=case.switches, world=world, parallel="ddp", mode=case.mode)


def missing(case: Case, world: World) -> str:
    """`` (off: R1, no GPU; ...)`` of what a case names and does not get here; empty when it gets all."""
    acceleration = accelerated(case, world)
    off = [f"{label(name)}, {acceleration.fallbacks[name]}" for name in TIMED if name in acceleration.fallbacks]
    return f" (off: {'; '.join(off)})" if off else ""


def stepper(
    config: BenchConfig, case: Case, model: DM05, world: World
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """(forward and backward, clip and update) of a case."""
    acceleration = accelerated(case, world)
    acceleration.prepare(model)
    model.set_checkpointing(case.checkpointing)
    batch = generated_batch(model.config, config.per_device_batch, config.prefix, config.padded, world.device)
    if acceleration.on("restructure"):
        prompts = ("input_ids", "token_type_ids", "attention_mask")
        batch |= {name: batch[name][:, : config.prefix].contiguous() for name in prompts}
    positions = torch.arange(config.per_device_batch, device=world.device)

    def loss_of(batch: dict[str, Tensor], positions: Tensor) -> Tensor:
        return model.loss(batch, *draw(0, positions, model.config.chunk_size, model.config.action_dim))

    def eager(batch: dict[str, Tensor], positions: Tensor, *, first: bool) -> Tensor:
        loss = loss_of(batch, positions)
        loss.backward()
        return loss.detach()

    backward = acceleration.backward(loss_of, model, print) or eager
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = acceleration.adamw()(named, betas=(0.9, 0.95), eps=1e-8, weight_decay=1e-10, mode=case.mode)
    lr = torch.tensor(2.5e-5, device=world.device)

    def update() -> None:
        optimizer.step(lr, optimizer.clip_scale(1.0)[1])
        if backward is eager:
            for parameter in optimizer.parameters:
                parameter.grad = None

    return lambda: backward(batch, positions, first=True), update


def measure(config: BenchConfig, case: Case, model_config: DM05Config, world: World) -> Result:
    """Run one case; its memory is free again afterwards."""
    device, cuda = world.device, world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    model = build(model_config, case.mode, world.device)
    forward_backward, update = stepper(config, case, model, world)
    began = time.perf_counter()
    loss = float(forward_backward())
    update()
    if cuda:
        torch.cuda.synchronize()
    first = time.perf_counter() - began
    marks = []
    for _ in range(config.steps + 2):
        start = moment(device)
        forward_backward()
        middle = moment(device)
        update()
        marks.append((start, middle, moment(device)))
    spans = [(seconds_between(a, c), seconds_between(a, b), seconds_between(b, c)) for a, b, c in marks[2:]]
    whole, backward, updating = (statistics.median(column) for column in zip(*spans, strict=True))
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return Result(
        name=case.name,
        mode=case.mode,
        step_seconds=whole,
        backward_seconds=backward,
        update_seconds=updating,
        first_step_seconds=first,
        peak_gib=peak,
        loss=loss,
    )


def matmul_rate(device: torch.device, size: int = 8192) -> float:
    """FLOP/s of a large BF16 matmul on this device."""
    size = size if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(12):
        start = moment(device)
        a @ b
        times.append(seconds_between(start, moment(device)))
    return 2 * size**3 / statistics.median(times)


def step_flops(config: DM05Config, batch: int, prefix: int) -> float:
    """Useful FLOPs of a step (forward, and twice that backward): matrices and attention of prefix and images."""
    text, vision, patches = config.text, config.vision, config.vision.patches_per_side**2
    kv = 2 * text.num_kv_heads * text.head_dim
    heads = text.num_heads * text.head_dim
    layer = text.hidden_size * (2 * heads + kv + 3 * text.intermediate_size)
    language = prefix * ((text.num_layers - 1) * (layer + 2 * prefix * heads) + text.hidden_size * kv)
    width = vision.hidden_size
    patch = vision.num_layers * (4 * width**2 + 2 * width * vision.intermediate_size + 2 * patches * width)
    return 3 * 2.0 * batch * (language + 2 * patches * patch)


def release() -> None:
    """Free what the last case held: compiled code and its guards keep a model alive."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: Sequence[str]) -> int:
    """The command."""
    from dm05_train.bench_report import table, write
    from dm05_train.cli import read_flags

    text = """Time the plain path, each switch and all of them.

Examples:
  dm05-train bench --per-device-batch 8 --out bench
  dm05-train bench --cases all,all-bf16,plain                    the end result alone"""
    config = read_flags(BenchConfig, BenchConfig(), arguments, "dm05-train bench", text)
    world = World.from_env({})
    fix = "Name a config.json of DM05 with --model-config, or leave that out to time the released model"
    model_config = replace(DM05Config.from_json(config.model_config, fix=fix), chunk_size=config.chunk_size)
    images = 2 * model_config.mm_tokens_per_image
    if config.prefix < images + LEAST_TEXT:
        fix = f"Give {images + LEAST_TEXT} or more"
        raise UsageError(f"two images alone are {images} tokens", where="--prefix", fix=fix)
    rate = matmul_rate(world.device)
    flops = step_flops(model_config, config.per_device_batch, config.prefix)
    results: list[Result] = []
    for case in cases(config):
        try:
            results.append(measure(config, case, model_config, world))
            print(f"{case.name}: {results[-1].step_seconds:.4f} s{missing(case, world)}", flush=True)
        except torch.OutOfMemoryError:
            print(f"{case.name}: does not fit this GPU", flush=True)
        release()
        if config.out is not None:
            write(results, config.out, facts=facts(config, rate, flops))
    print(table(results, batch=config.per_device_batch, flops=flops, rate=rate))
    return 0


def facts(config: BenchConfig, rate: float, flops: float) -> dict[str, Any]:
    """What a table was measured with."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
    return plain | {"device": device, "torch": torch.__version__, "matmul_flops": rate, "step_flops": flops}
