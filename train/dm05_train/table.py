"""The table a run prints before its first step: what was resolved, and from what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dm05_train.config import TrainConfig
from dm05_train.env import World
from dm05_train.memory import GIB, Memory
from dm05_train.perf.accelerate import Acceleration


def start_table(
    config: TrainConfig,
    world: World,
    *,
    output: Path,
    samples: int,
    seed: int,
    parameters: tuple[int, int],
    precision: str,
    memory: Memory,
    acceleration: Acceleration,
    environ: Mapping[str, str],
) -> str:
    """Lines of ``name value``.

    Args:
        samples: of an epoch.
        seed: of the run, which a continued one keeps.
        parameters: number of all and of the trained ones.
        memory: estimate per GPU.
        environ: to say which values came from a variable.
    """
    trainer, optimizer, data = config.trainer_config, config.optimizer_config, config.data_config
    batch = config.global_batch(world.size)
    every, trained = parameters
    total = memory.total if world.device.type == "cuda" else memory.total - memory.rest
    steps = trainer.num_train_steps
    saves = f"every {trainer.save_steps} steps" if trainer.save_strategy == "steps" else "none on the way"
    saves += ", at the end" if trainer.save_at_end else ""
    saves += f", newest {trainer.save_total_limit} kept" if trainer.save_total_limit else ""
    rows = {
        "dataset": f"{data.dataset_name}, {samples:,} samples an epoch, chunk {config.model_config.chunk_size}",
        "global batch": f"{batch} = {world.nodes} machines x {world.local_size} GPUs x "
        f"{trainer.per_device_train_batch_size} a GPU x {trainer.gradient_accumulation_steps} accumulated",
        "steps": f"{steps} = {steps * batch / samples:.2f} epochs",
        "optimizer": f"{optimizer.optim}, rate {optimizer.base_lr:g}, {optimizer.warmup_steps} steps of warm-up, then "
        f"{optimizer.lr_scheduler}, clip {trainer.max_grad_norm:g}",
        "parameters": f"{every:,}, of which {trained:,} are trained",
        "precision": precision,
        "parallel": f"{trainer.parallel} over {world.size} ranks" if world.size > 1 else f"one {world.device.type}",
        "memory": f"about {total / GIB:.1f} GiB a process (weights {memory.weights / GIB:.1f}, optimizer "
        f"{memory.optimizer / GIB:.1f}, gradients {memory.gradients / GIB:.1f}, activations "
        f"{memory.activations / GIB:.1f})",
        "checkpoints": saves,
        "output": str(output),
        "seed": str(seed),
        "switches": switch_line(acceleration),
    }
    used = [
        n
        for n in ("WORKSPACE_DIR", "DATA_PATH", "NORM_STATS_PATH", "PER_DEVICE_BATCH", "TRAIN_STEPS")
        if environ.get(n)
    ]
    if used:
        rows["environment"] = ", ".join(f"{name}={environ[name]}" for name in used)
    return "\n".join(f"{name:13} {value}" for name, value in rows.items())


def switch_line(acceleration: Acceleration) -> str:
    """The switches that count here by their variables, and those asked for that do not apply, by reason."""
    switches = acceleration.switches
    if not switches.enable:
        return "DM05_PERF_ENABLE=0: the plain path (1 turns the speed switches on)"
    variables = {name: variable.removeprefix("DM05_") for name, variable in switches.variables().items()}
    line = "on " + " ".join(variable for name, variable in variables.items() if acceleration.on(name))
    reasons: dict[str, list[str]] = {}
    for name, reason in acceleration.fallbacks.items():
        reasons.setdefault(f"{acceleration.state(name)}, {reason}", []).append(variables[name])
    return line + "".join(f"; {reason}: {' '.join(names)}" for reason, names in reasons.items())
