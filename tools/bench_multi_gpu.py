"""Time training steps on several GPUs: all switches off, all on, and each that needs several GPUs.

    python tools/bench_multi_gpu.py --gpus 1,2,4,8 --out bench_gpus          (starts torchrun for every case)
    torchrun --nproc-per-node 8 tools/bench_multi_gpu.py --out bench_gpus    (all cases in these processes)
    python tools/bench_multi_gpu.py --table --out bench_gpus                 (prints the table of what is measured)

A case makes the trainer's own steps on a generated batch with generated weights, so that neither data nor checkpoint
is needed. Its time is the median of the last steps up to ``--steps``, of the slowest rank. Each case leaves
``OUT/GPUS-CASE-bBATCH.json``; a case that has one with the same settings is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from dm05_schemas.cli import run
from dm05_schemas.errors import UsageError
from dm05_train.bench import build, generated_batch, release
from dm05_train.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig
from dm05_train.env import World, broadcast, first_line, join, leave, under_torchrun
from dm05_train.errors import TrainError
from dm05_train.launch import count_gpus
from dm05_train.loop import Run, train_step
from dm05_train.metrics import StepLog
from dm05_train.model.config import RELEASED, DM05Config
from dm05_train.optim import build_optimizer
from dm05_train.perf.accelerate import Acceleration
from dm05_train.perf.switches import Switches
from dm05_train.timing import moment, seconds_between
from torch import Tensor

PROG = "bench_multi_gpu.py"
NONE: dict[str, Any] = dict.fromkeys(Switches.variables(), False)
OFF = Switches(**NONE)
ON = Switches(enable=True, bucket_cap_mb=1000)
TIMED_STEPS = 20
PUBLISHED = {4: 1.172, 8: 1.140}  # of the accelerated image over its own baseline, on eight GPUs, by batch


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    switches: Switches
    parallel: Literal["ddp", "fsdp"] = "ddp"
    optim: Literal["adamw", "muon_adamw"] = "adamw"
    checkpointing: bool = False
    reference: str = "all"
    """The case whose time on one GPU is what this one scales from."""


CASES = {
    "baseline": Case(switches=OFF, reference="baseline"),
    "baseline-checkpointed": Case(switches=OFF, checkpointing=True, reference="baseline-checkpointed"),
    "all": Case(switches=ON),
    "without-R5": Case(switches=replace(ON, ddp_bucket=False)),
    **{f"bucket-{mb}": Case(switches=replace(ON, bucket_cap_mb=mb)) for mb in (25, 128, 512)},
    "without-R7": Case(switches=replace(ON, async_loss=False)),
    "without-static-graph": Case(switches=replace(ON, ddp_static_graph=False)),
    "without-graphs": Case(switches=replace(ON, cuda_graph=False)),
    "muon": Case(switches=ON, optim="muon_adamw", reference="muon"),
    "muon-without-gather": Case(
        switches=replace(ON, muon_batched_gather=False), optim="muon_adamw", reference="muon-without-gather"
    ),
    "fsdp": Case(switches=ON, parallel="fsdp"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every case of a table has in common."""

    model_config: str
    prefix: int
    padded: int
    precision: str
    steps: int


def train_config(name: str, batch: int, steps: int) -> TrainConfig:
    """The trainer's configuration of a case."""
    case = CASES[name]
    return TrainConfig(
        data_config=DataConfig(),
        model_config=ModelConfig(),
        optimizer_config=OptimizerConfig(optim=case.optim),
        trainer_config=TrainerConfig(
            per_device_train_batch_size=batch,
            num_train_steps=steps,
            parallel=case.parallel,
            gradient_checkpointing=case.checkpointing,
        ),
    )


def same_batch(config: DM05Config, settings: Settings, batch: int, world: World, trimmed: bool) -> dict[str, Tensor]:
    """This rank's batch, with what the trainer's loader adds to it."""
    found = generated_batch(config, batch, settings.prefix, settings.padded, world.device)
    if trimmed:
        prompts = ("input_ids", "token_type_ids", "attention_mask")
        found |= {name: found[name][:, : settings.prefix].contiguous() for name in prompts}
    first = world.rank * batch
    return found | {"sample_ids": torch.arange(first, first + batch), "position": torch.tensor(first)}


def prepare(name: str, settings: Settings, batch: int, world: World) -> tuple[Run, Acceleration]:
    """The trainer's run of a case, built as ``dm05_train.train.prepare`` does."""
    case, config = CASES[name], train_config(name, batch, settings.steps)
    mode: Any = settings.precision
    model = build(DM05Config.from_json(Path(settings.model_config)), mode, world.device)
    acceleration = Acceleration(
        switches=case.switches, world=world, parallel=case.parallel, mode=mode, optim=case.optim
    )
    acceleration.prepare(model)
    model.set_checkpointing(config.trainer_config.recomputed_every)
    wrapped = acceleration.wrap(model)
    optimizer = build_optimizer(
        model.named_parameters(),
        config.optimizer_config,
        mode,
        packed=model.packed,
        muon_batched=case.switches.on("muon_batched_gather"),
        adamw_class=acceleration.adamw(),
        muon_class=acceleration.muon(),
    )
    made = same_batch(model.config, settings, batch, world, case.switches.on("restructure"))
    made_run = Run(
        config=config,
        world=world,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        batches=itertools.repeat(made),
        dataset_size=batch * world.size,
        seed=0,
        name=name,
        precision=mode,
        async_loss=case.switches.on("async_loss"),
    )
    made_run.backward = acceleration.backward(made_run.loss_of, wrapped, print) or made_run.eager_backward
    return made_run, acceleration


def measure(name: str, settings: Settings, batch: int, world: World) -> dict[str, Any]:
    """Run one case on this rank; the result is the same on all."""
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    made, acceleration = prepare(name, settings, batch, world)
    interval = made.config.trainer_config.logging_steps if made.async_loss else 1
    log = StepLog(world, interval, lag=made.async_loss)
    marks, results = [moment(world.device)], []
    for _ in range(settings.steps):
        rate = made.rate()
        loss, norm = train_step(made)
        results += log.add(made.step, rate, loss, norm)
        marks.append(moment(world.device))
    results += log.drain()
    spans = [seconds_between(a, b) for a, b in itertools.pairwise(marks)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    worst = torch.tensor([statistics.median(spans[-TIMED_STEPS:]), peak], dtype=torch.float64)
    if world.size > 1:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return {
        "step_seconds": float(worst[0]),
        "peak_gib": float(worst[1]),
        "first_loss": results[0].loss,
        "last_loss": results[-1].loss,
        "fallbacks": acceleration.fallbacks,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
    }


def result_path(out: Path, gpus: int, name: str, batch: int) -> Path:
    """Where a case's result lies."""
    return out / f"{gpus}-{name}-b{batch}.json"


def write(path: Path, body: Mapping[str, Any]) -> None:
    """A result, by rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(body, indent=1) + "\n", "utf-8")
    os.replace(temporary, path)


def is_measured(path: Path, settings: Settings) -> bool:
    """Whether a case has a result of these settings (a failure is tried again)."""
    if not path.is_file():
        return False
    body = json.loads(path.read_text("utf-8"))
    return "step_seconds" in body and body["settings"] == asdict(settings)


def run_here(names: Sequence[str], batches: Sequence[int], settings: Settings, out: Path) -> None:
    """All cases in the processes that torchrun started."""
    world = World.from_env(os.environ)
    join(world)
    try:
        for batch, name in itertools.product(batches, names):
            path = result_path(out, world.size, name, batch)
            if broadcast(world, is_measured(path, settings)):
                continue
            body: dict[str, Any] = {"gpus": world.size, "case": name, "batch": batch, "settings": asdict(settings)}
            try:
                body |= measure(name, settings, batch, world)
            except torch.OutOfMemoryError as error:
                if world.size > 1:  # the others wait for this rank in a collective: end, and torchrun ends them
                    raise TrainError(f"{name}, batch {batch}: does not fit these GPUs") from None
                body["failed"] = first_line(error)
            if world.is_main:
                write(path, body)
                print(f"{world.size} x {name}, batch {batch}: {body.get('step_seconds', 'failed')} s", flush=True)
            release()
    finally:
        leave()


def start_case(gpus: int, name: str, batch: int, settings: Settings, out: Path, minutes: float) -> None:
    """One case under a torchrun of its own; that it failed, hung or was killed is a result too."""
    flags = {"cases": name, "batches": batch, "out": out, **asdict(settings)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", __file__]
    arguments = [text for flag, value in flags.items() for text in (f"--{flag.replace('_', '-')}", str(value))]
    # A case has its switches from here alone, whatever the shell has set.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DM05_")}
    environ.setdefault("OMP_NUM_THREADS", "1")
    path = result_path(out, gpus, name, batch)
    path.unlink(missing_ok=True)
    started = time.monotonic()
    process = subprocess.Popen([*torchrun, *arguments], env=environ, start_new_session=True)
    try:
        code: int | str = process.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        code = f"none: it took over {minutes:g} minutes"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks, which have own groups
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not path.is_file():
        failed = f"exit code {code} after {time.monotonic() - started:.0f} s"
        facts = {"gpus": gpus, "case": name, "batch": batch, "settings": asdict(settings), "failed": failed}
        write(path, facts)
        print(f"{gpus} x {name}, batch {batch}: {failed}", flush=True)


def read_results(out: Path) -> list[dict[str, Any]]:
    """All results of a folder: by batch and GPUs, then in the order of the cases."""
    found = [json.loads(path.read_text("utf-8")) for path in out.glob("[0-9]*-*-b*.json")]
    order = list(CASES)
    return sorted(found, key=lambda r: (r["batch"], r["gpus"], order.index(r["case"])))


def rows(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The cells of the table; a dash where what a cell compares with is not measured."""
    seconds = {(r["gpus"], r["case"], r["batch"]): r["step_seconds"] for r in results if "step_seconds" in r}
    for r in results:
        gpus, name, batch = r["gpus"], r["case"], r["batch"]
        if "step_seconds" not in r:
            yield str(batch), str(gpus), name, r["failed"], *("–" for _ in range(5))
            continue
        step = r["step_seconds"]
        base, alone = seconds.get((gpus, "baseline", batch)), seconds.get((1, CASES[name].reference, batch))
        yield (
            str(batch),
            str(gpus),
            name,
            f"{step:.4f}",
            f"{gpus * batch / step:.1f}",
            f"{base / step:.3f}x" if base else "–",
            f"{alone / step:.1%}" if alone else "–",
            f"{r['peak_gib']:.1f}",
            f"{r['last_loss']:.5f}",
        )


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown table, and what its columns compare."""
    head = ("batch a GPU", "GPUs", "case", "step s", "samples/s", "over baseline", "scaling", "peak GiB", "last loss")
    lines = [head, tuple("---" for _ in head), *rows(results)]
    known = ", ".join(f"{gain:.3f}x at batch {batch}" for batch, gain in PUBLISHED.items())
    return "\n".join(
        [
            *("| " + " | ".join(cells) + " |" for cells in lines),
            "",
            f'"all" has buckets of {ON.bucket_cap_mb} MB. Over baseline: with the same GPUs and batch (published for 8 '
            f"GPUs: {known}). Scaling: step time on one GPU (of the baselines and Muon their own, else of "
            '"all") over step time.',
        ]
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags.

    Raises:
        UsageError: a case that does not exist, or more GPUs than there are.
    """
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default="", help="how many, such as 1,2,4,8 (1 and all; under torchrun: its ranks)")
    parser.add_argument("--cases", default=",".join(CASES), help="which, by name (%(default)s)")
    parser.add_argument("--batches", default="4,8", help="samples a GPU (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench_gpus"), help="folder of the results")
    parser.add_argument("--table", action="store_true", help="only print the table of the results in --out")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of a case (%(default)s)")
    parser.add_argument("--minutes", type=float, default=15.0, help="end a case that takes longer (%(default)s)")
    parser.add_argument("--model-config", type=Path, default=RELEASED, help="a config.json (the released model's)")
    parser.add_argument("--prefix", type=int, default=568, help="tokens of the longest prompt (%(default)s)")
    parser.add_argument("--padded", type=int, default=1024, help="what the baseline pads to (%(default)s)")
    parser.add_argument("--precision", default="bf16_compensated", choices=["fp32", "bf16", "bf16_compensated"])
    chosen = parser.parse_args(arguments)
    chosen.cases = chosen.cases.split(",")
    for name in chosen.cases:
        if name not in CASES:
            raise UsageError(f"no case is called {name!r}", where="--cases", fix=f"Use some of {', '.join(CASES)}")
    there = count_gpus()
    try:
        chosen.batches = [int(word) for word in chosen.batches.split(",")]
        chosen.gpus = [int(word) for word in chosen.gpus.split(",") if word] or sorted({1, max(1, there)})
    except ValueError as error:
        raise UsageError(first_line(error), where="--gpus, --batches", fix="Give numbers such as 1,2,4,8") from None
    if there and max(chosen.gpus) > there:
        raise UsageError(f"{max(chosen.gpus)} of {there} GPUs", where="--gpus", fix=f"Give {there} or less")
    return chosen


def main() -> int:
    """Measure what is missing and print the table."""
    chosen = parse(sys.argv[1:])
    settings = Settings(
        model_config=str(chosen.model_config.resolve()),
        prefix=chosen.prefix,
        padded=chosen.padded,
        precision=chosen.precision,
        steps=chosen.steps,
    )
    if under_torchrun(os.environ):
        run_here(chosen.cases, chosen.batches, settings, chosen.out)
        return 0
    if not chosen.table:
        for batch, gpus, name in itertools.product(chosen.batches, chosen.gpus, chosen.cases):
            # Alone, only what others scale from says anything.
            if gpus == 1 and CASES[name].reference != name:
                continue
            if not is_measured(result_path(chosen.out, gpus, name, batch), settings):
                start_case(gpus, name, batch, settings, chosen.out, chosen.minutes)
    print(table(read_results(chosen.out)))
    return 0


if __name__ == "__main__":
    run(main, PROG)
