"""Batches: their contract, their order under any split of the work, resuming, and what happens to broken workers."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from dm05_prep.pack import build_pack
from dm05_schemas.errors import DataError
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace
from dm05_train.data.dataset import MemoryMappedDataset, open_dataset
from dm05_train.data.images import to_pixels
from dm05_train.data.loader import Loader
from dm05_train.data.sampler import order
from dm05_train.errors import TrainError
from dm05_train.prompt import PromptBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import make_spec, make_stats, pack_archive, small_config, write_dataset, write_parts, write_tokenizer

SPEC = make_spec()
SIZE = 28
Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.json")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """66 samples of one image size."""
    return write_dataset(tmp_path_factory.mktemp("w"), SPEC, lengths=(30, 2, 17, 21))


@pytest.fixture(scope="module")
def builder(tokenizer: Path) -> PromptBuilder:
    return PromptBuilder(tokenizer, small_config(), SPEC)


def opened(workspace: Workspace, spec: DatasetSpec = SPEC, layout: str = "auto") -> MemoryMappedDataset:
    return open_dataset(workspace, spec, make_stats(spec), 4, "absolute", layout)  # type: ignore[arg-type]


def loader(workspace: Workspace, builder: PromptBuilder, **changes: Any) -> Loader:
    given = {"image_size": SIZE, "per_device_batch": 4, "seed": 3} | changes
    return Loader(opened(workspace), builder, **given)


def take(source: Loader, count: int) -> list[Batch]:
    batches = [next(source) for _ in range(count)]
    source.close()
    return batches


def assert_equal(first: Batch, second: Batch) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def test_contract(workspace: Workspace, builder: PromptBuilder) -> None:
    dataset = opened(workspace)
    source = loader(workspace, builder)
    for step in range(3):
        batch = next(source)
        ids = batch["sample_ids"]
        assert int(batch["position"]) == 4 * step
        assert ids.tolist() == order(3, 66, np.arange(4 * step, 4 * step + 4)).tolist()
        length = batch["input_ids"].shape[1]
        assert length % 8 == 0
        samples = [dataset[i] for i in ids.tolist()]
        for row, sample in enumerate(samples):
            due, types = builder.build(sample.task)
            n = len(due)
            assert batch["input_ids"][row, :n].tolist() == due.tolist()
            assert batch["token_type_ids"][row, :n].tolist() == types.tolist()
            assert batch["attention_mask"][row].tolist() == [1] * n + [0] * (length - n)
            assert not batch["input_ids"][row, n:].any() and not batch["token_type_ids"][row, n:].any()
        assert torch.equal(batch["action"], torch.from_numpy(np.stack([s.action for s in samples])))
        assert torch.equal(batch["action_mask"], torch.from_numpy(np.stack([s.action_mask for s in samples])))
        images = torch.from_numpy(np.stack([image for s in samples for image in s.images]))
        assert torch.equal(batch["pixel_values"], to_pixels(images, SIZE))
        for name in ("input_ids", "token_type_ids", "attention_mask", "sample_ids", "position"):
            assert batch[name].dtype == torch.int64
        for name in ("pixel_values", "action", "action_mask"):
            assert batch[name].dtype == torch.float32
        assert batch["pixel_values"].shape == (8, 3, SIZE, SIZE) and batch["action"].shape == (4, 4, 32)
    longest = max(len(builder.build(task)[0]) for task in dataset.prompts)
    assert 0 <= length - longest < 8


def test_batches_are_not_overwritten_by_later_ones(workspace: Workspace, builder: PromptBuilder) -> None:
    for workers in (0, 1):
        first, *_ = batches = take(loader(workspace, builder, workers=workers), 8)
        again = take(loader(workspace, builder, workers=workers), 1)[0]
        assert_equal(first, again)
        assert len({int(b["position"]) for b in batches}) == 8


def test_workers_and_layouts_do_not_change_a_bit(workspace: Workspace, builder: PromptBuilder, tmp_path: Path) -> None:
    plain = take(loader(workspace, builder), 40)
    for workers in (1, 3):
        for one, other in zip(plain, take(loader(workspace, builder, workers=workers), 40), strict=True):
            assert_equal(one, other)
    copy = Workspace(tmp_path / "copy")
    shutil.copytree(workspace.root, copy.root)
    build_pack(copy, SPEC)
    pack_archive(copy, SPEC, write_parts(copy, SPEC, tmp_path / "parts", 3000))
    shutil.rmtree(SPEC.images(copy))
    for one, other in zip(plain, take(loader(copy, builder, workers=2), 40), strict=True):
        assert_equal(one, other)


splits = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.sampled_from([0, 0, 0, 0, 1, 2]))


@settings(max_examples=10, deadline=None)
@given(before=splits, after=splits, steps=st.integers(0, 4), augmented=st.booleans())
def test_resumes_exactly_on_any_split(
    workspace: Workspace,
    builder: PromptBuilder,
    before: tuple[int, int, int, int],
    after: tuple[int, int, int, int],
    steps: int,
    augmented: bool,
) -> None:
    """Stop after some steps on one number of ranks, batch, accumulation and workers; go on with another."""

    def run(split: tuple[int, int, int, int], state: dict[str, int] | None, steps: int) -> tuple[dict[int, Batch], Any]:
        ranks, batch, accumulation, workers = split
        rows: dict[int, Batch] = {}
        states = []
        for rank in range(ranks):
            source = loader(
                workspace,
                builder,
                world_size=ranks,
                rank=rank,
                per_device_batch=batch,
                accumulation=accumulation,
                workers=workers,
                augment_images=augmented,
            )
            if state is not None:
                source.load_state_dict(state)
            for made in (next(source) for _ in range(steps * accumulation)):
                for i in range(batch):
                    position = int(made["position"]) + i
                    assert position not in rows
                    pixels = made["pixel_values"].unflatten(0, (batch, 2))[i]
                    rows[position] = {"pixels": pixels, "action": made["action"][i], "ids": made["input_ids"][i]}
            states.append(source.state_dict())
            source.close()
        assert all(state == states[0] for state in states)
        return rows, states[0]

    first, state = run(before, None, steps)
    second, _ = run(after, state, 2)
    assert not first.keys() & second.keys()
    rows = first | second
    plain, _ = run((1, 1, 1, 0), None, len(rows))
    assert sorted(rows) == sorted(plain)
    for position, row in plain.items():
        assert_equal(row, rows[position])


def test_state_counts_whole_steps(workspace: Workspace, builder: PromptBuilder) -> None:
    source = loader(workspace, builder, accumulation=2, world_size=2, workers=1)
    seen = []
    for _ in range(5):
        seen.append(source.state_dict()["position"])
        next(source)
    source.close()
    assert seen == [0, 0, 16, 16, 32]
    assert all(isinstance(value, int) for value in source.state_dict().values())


def test_fewer_samples_than_a_step(workspace: Workspace, builder: PromptBuilder) -> None:
    with pytest.raises(TrainError, match=r"66 samples, fewer than the 72 of one step \(3 ranks x batch 8 x acc.* 3\)"):
        loader(workspace, builder, world_size=3, per_device_batch=8, accumulation=3)


def test_prefix_length_can_be_set(workspace: Workspace, builder: PromptBuilder) -> None:
    assert take(loader(workspace, builder, prefix_length=300), 1)[0]["input_ids"].shape == (4, 300)
    with pytest.raises(TrainError, match="more than a prefix of 40"):
        loader(workspace, builder, prefix_length=40)


def test_images_of_several_sizes(tmp_path: Path, builder: PromptBuilder) -> None:
    """Sizes that differ inside a batch, and that outgrow the memory set aside for the first one's."""
    sizes = ((4, 6), (30, 22), (300, 200), (7, 7), (64, 64))
    workspace = write_dataset(tmp_path, SPEC, lengths=(9, 8), sizes=sizes, kinds=("JPEG", "PNG"))
    dataset = opened(workspace)
    plain = take(loader(workspace, builder), 12)
    for batch, other in zip(plain, take(loader(workspace, builder, workers=2), 12), strict=True):
        assert_equal(batch, other)
        due = [
            to_pixels(torch.from_numpy(image.copy()), SIZE)
            for i in batch["sample_ids"].tolist()
            for image in dataset[i].images
        ]
        assert torch.equal(batch["pixel_values"], torch.stack(due))


def test_state_in_the_prompt(tmp_path: Path, tokenizer: Path) -> None:
    spec = make_spec(state_in_prompt=True)
    workspace = write_dataset(tmp_path, spec, lengths=(20,))
    prompts = PromptBuilder(tokenizer, small_config(), spec)
    dataset = opened(workspace, spec)
    for workers in (0, 1):
        source = Loader(dataset, prompts, image_size=SIZE, per_device_batch=5, workers=workers)
        for batch in take(source, 3):
            for row, i in enumerate(batch["sample_ids"].tolist()):
                ids, _ = prompts.build(dataset[i].task, dataset[i].state)
                assert batch["input_ids"][row, : len(ids)].tolist() == ids.tolist()
                assert int(batch["attention_mask"][row].sum()) == len(ids)


def test_a_broken_image_ends_the_run_with_its_name(tmp_path: Path, builder: PromptBuilder) -> None:
    for layout in ("jsonl", "pack"):
        root = tmp_path / layout
        workspace = write_dataset(root, SPEC, lengths=(9,))
        if layout == "pack":
            build_pack(workspace, SPEC)
        for workers in (0, 2):
            source = loader(workspace, builder, workers=workers)
            next(source)
            target = SPEC.images(workspace) / "ep_0/camera_1/000003.jpg"
            if layout == "pack":
                target = SPEC.root(workspace) / "pack/images-00000.bin"
            data = target.read_bytes()
            os.truncate(target, len(data) // 3)
            with pytest.raises(DataError, match=r"episode ep_0\.jsonl, frame \d+") as caught:
                for _ in range(30):
                    next(source)
            assert str(target) in str(caught.value)
            with pytest.raises(DataError, match=r"ep_0\.jsonl"):
                next(source)
            source.close()
            target.write_bytes(data)


def test_a_pack_that_breaks_before_a_worker_opens_it(tmp_path: Path, builder: PromptBuilder) -> None:
    workspace = write_dataset(tmp_path, SPEC, lengths=(9,))
    build_pack(workspace, SPEC)
    source = loader(workspace, builder, workers=1)
    table = SPEC.root(workspace) / "pack/frames.arrow"
    table.write_bytes(bytes(table.stat().st_size))
    with pytest.raises(DataError, match=r"frames\.arrow: episode ep_0\.jsonl, frame \d: is no Arrow file any more"):
        next(source)
    source.close()


def test_a_killed_worker_is_an_error_with_its_place(workspace: Workspace, builder: PromptBuilder) -> None:
    source = loader(workspace, builder, workers=2)
    next(source)
    for child in psutil.Process().children():
        child.send_signal(signal.SIGKILL)
    with pytest.raises(TrainError, match=r"killed by SIGKILL while it read samples from episode ep_\d\.jsonl, frame"):
        for _ in range(20):
            next(source)
    source.close()


@pytest.mark.parametrize("early", [False, True])
def test_signals_to_the_whole_group_are_the_trainers(
    workspace: Workspace, builder: PromptBuilder, early: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scheduler's warning reaches every process of a job; the step that saves still gets its batches."""
    expected = take(loader(workspace, builder), 6)
    source = loader(workspace, builder, workers=2)
    got = [] if early else [next(source)]
    if early:
        source._open_pool()
    for child in psutil.Process().children():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            child.send_signal(number)
    got += [next(source) for _ in expected[len(got) :]]
    for first, second in zip(got, expected, strict=True):
        assert_equal(first, second)
    source.close()
    assert capfd.readouterr().err == ""
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_no_worker_is_left(workspace: Workspace, builder: PromptBuilder) -> None:
    before = {child.pid for child in psutil.Process().children()}
    source = loader(workspace, builder, workers=3)
    next(source)
    handles = psutil.Process().num_fds()
    source.close()
    source.close()
    assert psutil.Process().num_fds() < handles
    dropped = loader(workspace, builder, workers=2)
    next(dropped)
    del dropped, source
    gc.collect()
    assert {child.pid for child in psutil.Process().children()} == before


def test_workers_end_with_a_killed_trainer(workspace: Workspace, tokenizer: Path) -> None:
    """Nothing outlives a training process that had no time to say goodbye."""
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from small_data import make_spec, make_stats, small_config
from dm05_schemas.workspace import Workspace
from dm05_train.data.dataset import open_dataset
from dm05_train.data.loader import Loader
from dm05_train.prompt import PromptBuilder
spec = make_spec()
data = open_dataset(Workspace(Path({str(workspace.root)!r})), spec, make_stats(spec), 4, "absolute")
prompts = PromptBuilder(Path({str(tokenizer)!r}), small_config(), spec)
source = Loader(data, prompts, image_size=28, per_device_batch=4, workers=2)
next(source)
print("ready", flush=True)
import time
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    workers = psutil.Process(process.pid).children()
    assert len(workers) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


def test_memory_of_workers_stays_flat(workspace: Workspace, builder: PromptBuilder) -> None:
    source = loader(workspace, builder, workers=2)
    sizes = []
    for _ in range(4):
        for _ in range(60):
            next(source)
        sizes.append(sum(child.memory_info().rss for child in psutil.Process().children()))
    source.close()
    assert sizes[-1] - sizes[0] < 3 << 20


def test_the_next_batch_waits_ready(workspace: Workspace, builder: PromptBuilder) -> None:
    """While a step computes, the workers fill what comes next."""
    source = loader(workspace, builder, workers=1)
    next(source)
    time.sleep(1.0)
    start = time.perf_counter()
    next(source)
    assert time.perf_counter() - start < 0.25
    source.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_same_batches(workspace: Workspace, builder: PromptBuilder) -> None:
    plain = take(loader(workspace, builder, augment_images=True), 30)
    there = take(loader(workspace, builder, augment_images=True, workers=2, device="cuda"), 30)
    for one, other in zip(plain, there, strict=True):
        for name, tensor in one.items():
            got = other[name].cpu()
            if name == "pixel_values":
                assert (tensor - got).abs().max() <= 2.01 / 127.5
            else:
                assert torch.equal(tensor, got)
