"""Names in and out: released safetensors to a model and back.

A checkpoint folder holds ``model.safetensors`` (or ``model-*-of-*.safetensors``) with the released names. The
model's own parameter names are these, except that ``lm_head`` is the embedding again and is not held, and that packed
parameters (``model.packed``: name -> ((released name, rows), ...)) stand for several tensors stacked by rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from dm05_schemas.checkpoint import read_header
from safetensors import safe_open
from torch import Tensor

from dm05_train.errors import TrainError
from dm05_train.model.config import DM05Config
from dm05_train.model.dm05 import DM05, Packed

EMBEDDING = "model.vlm.model.language_model.embed_tokens.weight"
LM_HEAD = "model.vlm.lm_head.weight"


def dead_parameters(config: DM05Config) -> set[str]:
    """Released names of parameters that feed nothing: they get no gradient, and no optimizer holds them."""
    language, expert = "model.vlm.model.language_model.", "model.action_expert."
    last = f"{language}layers.{config.text.num_layers - 1}."
    norms = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    tail = [
        "self_attn.q_proj",
        "self_attn.q_norm",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        *norms,
    ]
    names = {f"{last}{name}.weight" for name in tail} | {f"{language}norm.weight", f"{expert}norm.weight"}
    for i in range(config.expert.num_layers):
        names |= {f"{expert}layers.{i}.{n}.weight" for n in ("input_layernorm", "pre_feedforward_layernorm")}
    return names


def freeze_untrained(model: DM05) -> None:
    """Take the embedding and the parameters that feed nothing out of training, by construction."""
    dead = dead_parameters(model.config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != EMBEDDING and name not in dead)


def released_tensors(tensors: Mapping[str, Tensor], packed: Packed) -> Iterator[tuple[str, Tensor]]:
    """Views by released name of tensors keyed by parameter name (weights, or an optimizer's moments)."""
    for name, tensor in tensors.items():
        if name not in packed:
            yield name, tensor
            continue
        start = 0
        for released, rows in packed[name]:
            yield released, tensor[start : start + rows]
            start += rows


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
    single = folder / "model.safetensors"
    if not single.is_file():
        raise TrainError(
            "no model.safetensors here",
            where=folder,
            fix="Run dm05-prep model, or name a checkpoint with --model-config.model-name-or-path",
        )
    return [single]


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def check_names(model: DM05, shapes: Mapping[str, tuple[int, ...]], where: Path) -> None:
    """Compare a checkpoint's names and shapes with the model's.

    Raises:
        TrainError: tensors are missing, unknown or of another shape; all are counted, the first few named.
    """
    want = {n: tuple(t.shape) for n, t in released_tensors(dict(model.named_parameters()), model.packed)}
    have = dict(shapes)
    head = have.pop(LM_HEAD, None)
    if EMBEDDING not in have and head is not None:
        have[EMBEDDING] = head
    missing, extra = want.keys() - have.keys(), have.keys() - want.keys()
    wrong = {f"{n} {have[n]} instead of {want[n]}" for n in want.keys() & have.keys() if have[n] != want[n]}
    problems = [
        f"{len(names)} {kind} ({_some(names)})"
        for kind, names in (("missing", missing), ("unknown", extra), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise TrainError(
            "the tensors are not this model's: " + "; ".join(problems),
            where=where,
            fix="Does config.json belong to this file?",
        )


def load_weights(model: DM05, folder: Path, *, threads: int = 8) -> None:
    """Copy a checkpoint into the model's parameters (any device and dtype) in one pass over the file's map.

    No second copy is held in host memory: each tensor is a view of the map, read by ``threads`` at once.

    Raises:
        TrainError: no file, or names and shapes that are not the model's.
        DataError: a file is cut short or no safetensors file.
    """
    slots = state_for_saving(model)
    files = _files(folder)
    for path in files:
        read_header(path)  # says in words what the library below would only choke on: cut short, no safetensors
    handles = [safe_open(path, framework="pt", device="cpu") for path in files]
    where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 (not a dict)
    check_names(model, {n: tuple(h.get_slice(n).get_shape()) for n, h in where.items()}, folder)

    def read(name: str) -> None:
        source = LM_HEAD if name == EMBEDDING and name not in where else name
        slots[name].copy_(where[source].get_tensor(source))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, sorted(slots)))


def state_for_saving(model: DM05) -> dict[str, Tensor]:
    """The model's parameters by released name (views, on the model's device)."""
    return dict(released_tensors({n: p.detach() for n, p in model.named_parameters()}, model.packed))


@torch.no_grad()
def generate_weights(model: DM05, seed: int = 0) -> None:
    """Fill the parameters with generated numbers of a sane scale, for benchmarks and tests without a checkpoint."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel() if "mm_input_projection" not in name else parameter.shape[0]
            scale = 0.02 if "embed" in name else fan_in**-0.5
            parameter.normal_(0.0, scale, generator=generator)
        elif (name.endswith("weight") and "layer_norm" in name) or (
            "post_layernorm" in name and name.endswith("weight")
        ):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
