"""Small datasets with real images, in every layout, and a tokenizer to match: for tests of packs and loaders."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dm05_prep.index import build_index
from dm05_prep.pack import PackResult, write_pack
from dm05_prep.pack_images import ArchiveImages, part_records
from dm05_schemas.pack import PACK_DIR
from dm05_schemas.pack_writer import replaced_folder
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.stats import NormStats, VectorStats
from dm05_schemas.workspace import Workspace
from dm05_train.model.config import DM05Config
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
IMAGE_CONTROL = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
TASKS = ("put the bowl on the plate", "把红色方块放进篮子里", "open the drawer")


def make_spec(**changes: Any) -> DatasetSpec:
    """A dataset of two cameras at data/toy, 4 state and 3 action dims."""
    given: dict[str, Any] = {
        "name": "toy",
        "folder": Path("data/toy"),
        "image_keys": ("images_1", "images_2"),
        "image_prompts": ("Head", "Wrist"),
        "robot_type": "Franka",
        "state_desc": ("joint", "joint", "joint", "gripper"),
        "action_dim": 3,
    }
    return DatasetSpec(**(given | changes))


def picture(rng: np.random.Generator, size: tuple[int, int], kind: str = "JPEG") -> bytes:
    """A smooth random picture of (height, width)."""
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    out = io.BytesIO()
    coarse.resize((size[1], size[0]), Image.Resampling.BICUBIC).save(out, kind)
    return out.getvalue()


def write_dataset(
    root: Path,
    spec: DatasetSpec,
    lengths: Sequence[int] = (5, 2, 9),
    *,
    seed: int = 0,
    sizes: Sequence[tuple[int, int]] = ((24, 32),),
    kinds: Sequence[str] = ("JPEG",),
    with_action: bool = True,
) -> Workspace:
    """Episodes of these lengths under `root`, with an index; image i has sizes[i % ...] and kinds[i % ...]."""
    workspace = Workspace(root)
    rng = np.random.default_rng(seed)
    count = 0
    for number, length in enumerate(lengths):
        lines = []
        for t in range(length):
            frame: dict[str, Any] = {}
            for camera, key in enumerate(spec.image_keys):
                kind = kinds[count % len(kinds)]
                url = f"./ep_{number}/camera_{camera}/{t:06d}.{'jpg' if kind == 'JPEG' else kind.lower()}"
                path = spec.images(workspace) / url
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(picture(rng, sizes[count % len(sizes)], kind))
                frame[key] = {"type": "image", "url": url}
                count += 1
            frame["state"] = rng.normal(size=spec.state_dim).tolist()
            if with_action:
                frame["action"] = rng.normal(size=spec.action_dim).tolist()
            lines.append(frame | {"prompt": TASKS[(number + t // 4) % len(TASKS)], "is_robot": True})
        path = spec.jsonl(workspace) / f"ep_{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_index(workspace, spec)
    return workspace


def make_stats(spec: DatasetSpec, chunk_size: int = 4, action_mode: str = "absolute") -> NormStats:
    """Made-up statistics of unequal dims."""

    def vector(dims: int) -> VectorStats:
        low, high = -1.5 - 0.1 * np.arange(dims), 1.2 + 0.2 * np.arange(dims)
        return VectorStats(mean=low, std=high, q01=low, q99=high, min=low, max=high, count=7)

    return NormStats(
        dataset=spec.name,
        chunk_size=chunk_size,
        action_mode=action_mode,
        state=vector(spec.state_dim),
        action=vector(spec.action_dim),
        source_fingerprint="",
        tool_version="0",
    )


def write_parts(workspace: Workspace, spec: DatasetSpec, folder: Path, part_bytes: int) -> list[Path]:
    """The dataset's image folder as a tar, cut into parts of `part_bytes`."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(spec.images(workspace), arcname=f"x/{spec.name}/{spec.image_dir}")
    data = archive.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, start in enumerate(range(0, len(data), part_bytes)):
        parts.append(folder / f"x.tar.part-{number:03d}")
        parts[-1].write_bytes(data[start : start + part_bytes])
    return parts


def pack_archive(workspace: Workspace, spec: DatasetSpec, parts: list[Path], *, keep: bool = True) -> PackResult:
    """A pack from an archive's parts: told of every member as a reader of the stream would."""
    source = build_index(workspace, spec).fingerprint
    folder = spec.root(workspace) / PACK_DIR
    whole = b"".join(part.read_bytes() for part in parts)
    part_bytes = parts[0].stat().st_size
    prefix = f"x/{spec.name}/{spec.image_dir}/"
    with replaced_folder(folder) as new, tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        images = ArchiveImages(
            new, part_records([(part, part.stat().st_size) for part in parts], folder, workspace) if keep else []
        )
        for member in tar.getmembers():
            if member.isfile():
                start = member.offset_data
                data = whole[start : start + member.size]
                images.member(member.name.removeprefix(prefix), start // part_bytes, start % part_bytes, data)
        result = write_pack(new, workspace, spec, images, source=source, rebuild="Run dm05-prep dataset --layout pack")
        images.forget(new)
        return result


def small_config(vocab_size: int = 512, image_token_id: int = 8) -> DM05Config:
    """The real configuration with a small vocabulary and 4 tokens an image, to go with `write_tokenizer`."""
    from dataclasses import replace

    gemma = DM05Config.from_json(Path(__file__).parent / "golden" / "dm05_config.json")
    text = replace(gemma.text, vocab_size=vocab_size)
    return replace(gemma, text=text, image_token_id=image_token_id, mm_tokens_per_image=4)


def write_tokenizer(path: Path, *, without: str = "") -> Path:
    """A byte-fallback BPE tokenizer of a few hundred tokens with Gemma's control tokens at other ids."""
    vocab = {name: i for i, name in enumerate([*CONTROL, *IMAGE_CONTROL])}
    letters = [chr(c) for c in range(33, 127)] + ["▁", "\n"] + [f"<0x{b:02X}>" for b in range(256)]
    for token in [*letters, "th", "the", "▁the", "pu", "put", "00", "11"]:
        vocab.setdefault(token, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("p", "u"), ("pu", "t"), ("0", "0"), ("1", "1")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(n, normalized=False) for n in [*CONTROL, *IMAGE_CONTROL] if n != without])
    if without:
        tokenizer = Tokenizer.from_str(tokenizer.to_str().replace(json.dumps(without), '"<other>"'))
    tokenizer.save(str(path))
    return path
