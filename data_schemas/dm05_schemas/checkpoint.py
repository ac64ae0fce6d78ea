"""The released checkpoint: which tensors a config asks for, and the header of a safetensors file.

::

    checkpoints/DM05/
      model.safetensors    8 bytes little-endian N | N bytes JSON header | tensors back to back, no gaps
      config.json          the sizes that the names and shapes below follow from
      tokenizer.json ...
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dm05_schemas.errors import DataError

Shape = tuple[int, ...]

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000


class TensorEntry(NamedTuple):
    """One tensor of a file: dtype as safetensors names it, shape, first byte and end, counted from the file's start."""

    dtype: str
    shape: Shape
    start: int
    end: int


def expected_tensors(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Name and shape of every tensor of a released checkpoint with this ``config.json``, sorted by name.

    Raises:
        DataError: the config lacks a key that a shape follows from.
    """
    try:
        _check_sizes(config)
        named = {
            **dict(_language(config["vlm_config"]["text_config"])),
            **dict(_vision(config["vlm_config"]["vision_config"], config["vlm_config"]["text_config"]["hidden_size"])),
            **dict(_expert(config["action_config"], config["action_dim"])),
        }
    except (KeyError, TypeError) as error:
        raise DataError(f"config.json has no usable {error}", fix="dm05-prep model fetches the released one") from error
    return dict(sorted(named.items()))


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, from its header alone; offsets are checked to cover the file exactly.

    Raises:
        DataError: cut short, not a safetensors file, or a header that contradicts itself or the file's size.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise DataError("is a pointer of Git LFS, not the file itself", where=path, fix=_FETCH)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise DataError(f"is not a safetensors file ({size} bytes)", where=path, fix=_FETCH)
        raw = file.read(length)
    if len(raw) < length:
        raise DataError(f"is cut short: {size} bytes, the header alone takes {length + 8}", where=path, fix=_FETCH)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
        entries = {name: _entry(name, value, length + 8) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"has a broken safetensors header: {error}", where=path, fix=_FETCH) from error
    _check_cover(entries, length + 8, size, path)
    return entries


_FETCH = "dm05-prep model fetches it again"


_MOST_LAYERS, _LARGEST_SIZE = 1000, 1 << 24
_WIDTHS = ("hidden_size", "intermediate_size", "num_hidden_layers")
_DECODER = (*_WIDTHS, "head_dim", "num_attention_heads", "num_key_value_heads")


def _check_sizes(config: Mapping[str, Any]) -> None:
    """KeyError or TypeError, naming the key, for a size that is missing or none."""
    text, vision = config["vlm_config"]["text_config"], config["vlm_config"]["vision_config"]
    for part, names in (
        (text, (*_DECODER, "vocab_size")),
        (vision, (*_WIDTHS, "patch_size", "num_channels", "image_size")),
        (config["action_config"], _DECODER),
        (config, ("action_dim", "chunk_size")),
    ):
        for name in names:
            value, most = part[name], _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST_SIZE
            if type(value) is not int or not 1 <= value <= most:
                raise TypeError(f"{name}: {value!r} is no size")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _entry(name: str, value: Mapping[str, Any], offset: int) -> TensorEntry:
    dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError(f"{name}: shape and offsets must be whole numbers")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{name}: unknown dtype {dtype!r}")
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError(f"{name}: {end - start} bytes do not hold {dtype} {list(shape)}")
    return TensorEntry(dtype, shape, start + offset, end + offset)


def _check_cover(entries: Mapping[str, TensorEntry], begin: int, size: int, path: Path) -> None:
    position = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise DataError(f"has a gap or an overlap before {name}", where=path, fix=_FETCH)
        position = entry.end
    if position > size:
        raise DataError(f"is cut short: {size} of {position} bytes", where=path, fix=_FETCH)
    if position < size:
        raise DataError(f"has {size - position} bytes too many", where=path, fix=_FETCH)


def _language(text: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    width, vocabulary = text["hidden_size"], text["vocab_size"]
    yield "model.vlm.lm_head.weight", (vocabulary, width)
    yield "model.vlm.model.language_model.embed_tokens.weight", (vocabulary, width)
    yield from _decoder("model.vlm.model.language_model", text)


def _decoder(prefix: str, text: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """The layers and the last norm that the language model and the action expert have alike."""
    width, head, mlp = text["hidden_size"], text["head_dim"], text["intermediate_size"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    layer: dict[str, Shape] = {
        "input_layernorm": (width,),
        "mlp.down_proj": (width, mlp),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "post_attention_layernorm": (width,),
        "post_feedforward_layernorm": (width,),
        "pre_feedforward_layernorm": (width,),
        "self_attn.k_norm": (head,),
        "self_attn.k_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (head,),
        "self_attn.q_proj": (queries, width),
        "self_attn.v_proj": (keys, width),
    }
    for number in range(text["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"{prefix}.layers.{number}.{name}.weight", shape
    yield f"{prefix}.norm.weight", (width,)


def _linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _vision(vision: Mapping[str, Any], language_width: int) -> Iterator[tuple[str, Shape]]:
    width, mlp, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    prefix = "model.vlm.model.vision_tower.vision_model"
    yield f"{prefix}.embeddings.patch_embedding.weight", (width, vision["num_channels"], patch, patch)
    yield f"{prefix}.embeddings.patch_embedding.bias", (width,)
    yield f"{prefix}.embeddings.position_embedding.weight", ((vision["image_size"] // patch) ** 2, width)
    for number in range(vision["num_hidden_layers"]):
        layer = f"{prefix}.encoder.layers.{number}"
        yield from _norm(f"{layer}.layer_norm1", width)
        yield from _norm(f"{layer}.layer_norm2", width)
        yield from _linear(f"{layer}.mlp.fc1", mlp, width)
        yield from _linear(f"{layer}.mlp.fc2", width, mlp)
        for name in ("k_proj", "out_proj", "q_proj", "v_proj"):
            yield from _linear(f"{layer}.self_attn.{name}", width, width)
    yield from _norm(f"{prefix}.post_layernorm", width)
    projector = "model.vlm.model.multi_modal_projector"
    yield f"{projector}.mm_input_projection_weight", (width, language_width)
    yield f"{projector}.mm_soft_emb_norm.weight", (width,)


def _expert(expert: Mapping[str, Any], action_dim: int) -> Iterator[tuple[str, Shape]]:
    width = expert["hidden_size"]
    prefix = "model.action_expert"
    yield from _decoder(prefix, expert)
    yield from _linear(f"{prefix}.final_time_modulator", 3 * width, width)
    for number in range(expert["num_hidden_layers"]):
        yield from _linear(f"{prefix}.input_time_modulators.{number}", 3 * width, width)
        yield from _linear(f"{prefix}.mlp_time_modulators.{number}", 3 * width, width)
    yield from _linear("model.action_in_proj", width, action_dim)
    yield from _linear("model.action_out_proj", action_dim, width)
    yield from _linear("model.time_mlp_in", width, width)
    yield from _linear("model.time_mlp_out", width, width)
