"""Prompts against the golden token ids, and what a task may not do to them."""

from __future__ import annotations

import json
import warnings
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
from small_data import CONTROL, IMAGE_CONTROL, small_config, write_tokenizer
from tokenizers import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "prompts.json"
CASES = json.loads(GOLDEN.read_text())["cases"]


GEMMA = DM05Config.from_json(Path(__file__).parents[1] / "golden" / "dm05_config.json")


def dataset(cameras: tuple[str, ...] = ("Head", "Left wrist"), **fields: Any) -> DatasetSpec:
    plain = {"name": "d", "folder": Path("data/d"), "state_desc": ("joint",), "action_dim": 1}
    return DatasetSpec(image_keys=cameras, image_prompts=cameras, **{**plain, **fields})


def expand(ids: list[int | list[int]]) -> list[int]:
    return [i for item in ids for i in ([item[0]] * item[1] if isinstance(item, list) else [item])]


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
