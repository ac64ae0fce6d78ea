"""Samples from every layout: the same tensors, exactly as the contract says, and one clear line for a wrong file."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from dm05_prep.index import build_index
from dm05_prep.pack import build_pack
from dm05_schemas import sample as contract
from dm05_schemas.episode import read_episode
from dm05_schemas.errors import DataError
from dm05_schemas.image import decode_rgb
from dm05_schemas.pack import read_info
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace
from dm05_train.data.dataset import MemoryMappedDataset, held_out, open_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import make_spec, make_stats, pack_archive, write_dataset, write_parts

SPEC = make_spec()
MIXED = {"sizes": ((24, 32), (24, 32), (40, 20)), "kinds": ("JPEG", "JPEG", "PNG")}


def opened(workspace: Workspace, layout: str = "auto", spec: DatasetSpec = SPEC, **more: object) -> MemoryMappedDataset:
    mode = "relative" if spec.action_mode == "relative" else "absolute"
    return open_dataset(workspace, spec, make_stats(spec), 4, mode, layout, **more)  # type: ignore[arg-type]


def assert_same(first: MemoryMappedDataset, second: MemoryMappedDataset) -> None:
    assert len(first) == len(second) and first.episodes == second.episodes
    for i in range(len(first)):
        a, b = first[i], second[i]
        assert (a.episode, a.frame, a.task) == (b.episode, b.frame, b.task)
        for name in ("state", "action", "action_mask"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
        assert all(np.array_equal(x, y) for x, y in zip(a.images, b.images, strict=True))


@pytest.mark.parametrize("with_action", [True, False])
@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_samples_are_what_the_contract_says(tmp_path: Path, with_action: bool, mode: str) -> None:
    dims = 4 if mode == "relative" or not with_action else 3
    spec = make_spec(action_dim=dims, action_mode=mode)
    workspace = write_dataset(tmp_path, spec, with_action=with_action, **MIXED)
    dataset, stats = opened(workspace, spec=spec), make_stats(spec)
    i = 0
    for path in sorted(spec.jsonl(workspace).iterdir()):
        episode = read_episode(path, spec)
        for t in range(len(episode) - 1):
            got = dataset[i]
            chunk = contract.action_chunk(episode.targets, t, 4, from_states=not with_action)
            if mode == "relative":
                chunk = contract.relative(chunk, episode.state[t], spec.gripper_dims)
            action, mask = contract.pad_action(contract.normalise(chunk, stats.action.q01, stats.action.q99))
            assert np.array_equal(got.action, action) and np.array_equal(got.action_mask, mask)
            state = contract.normalise(episode.state[t], stats.state.q01, stats.state.q99)
            assert np.array_equal(got.state, state) and got.state.dtype == np.float32
            assert got.task == episode.prompts[episode.prompt_ids[t]]
            assert (got.episode, got.frame) == (path.name, t)
            for image, url in zip(got.images, episode.urls[t], strict=True):
                assert np.array_equal(image, decode_rgb((spec.images(workspace) / url).read_bytes()))
            i += 1
    assert i == len(dataset) == 13
    assert np.array_equal(dataset[-1].action, dataset[12].action)
    with pytest.raises(IndexError):
        dataset[13]


@pytest.mark.parametrize("part_bytes", [700, 5000, 10**6])
def test_every_layout_gives_the_same_tensors(tmp_path: Path, part_bytes: int) -> None:
    workspace = write_dataset(tmp_path / "w", SPEC, **MIXED)
    plain = opened(workspace, "jsonl")
    build_pack(workspace, SPEC)
    copied = opened(workspace, "pack")
    assert copied.info.images == "blobs" and plain.info.images == "files"
    assert_same(plain, copied)
    parts = write_parts(workspace, SPEC, tmp_path / "parts", part_bytes)
    pack_archive(workspace, SPEC, parts)
    shutil.rmtree(SPEC.images(workspace))
    backed = opened(workspace, "pack")
    assert len(backed.info.blobs) == len(parts)
    assert_same(copied, backed)
    pack_archive(workspace, SPEC, parts, keep=False)
    shutil.rmtree(tmp_path / "parts")
    assert_same(copied, opened(workspace, "pack"))


def test_a_dataset_goes_to_another_process_small(tmp_path: Path) -> None:
    dataset = opened(write_dataset(tmp_path, SPEC))
    handed = pickle.dumps(dataset.handle)
    assert len(handed) < 3000
    assert_same(dataset, pickle.loads(handed).open())


def test_layouts_by_name(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    with pytest.raises(DataError, match=r"pack\.json: cannot read the pack.* dm05-prep pack"):
        opened(workspace, "pack")
    assert opened(workspace).info.images == "files"
    build_pack(workspace, SPEC)
    assert opened(workspace).info.images == "blobs"
    assert opened(workspace, "jsonl").info.images == "files"
    shutil.rmtree(SPEC.jsonl(workspace))
    assert len(opened(workspace)) == 13


def test_frame_table_is_made_once_and_again_when_the_source_changes(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    opened(workspace)
    table = SPEC.root(workspace) / ".frames" / "frames.arrow"
    first = table.stat().st_ino
    opened(workspace)
    assert table.stat().st_ino == first
    extra = SPEC.jsonl(workspace) / "ep_9.jsonl"
    shutil.copy(SPEC.jsonl(workspace) / "ep_0.jsonl", extra)
    with pytest.raises(DataError, match=r"1 episode file not in the index .* dm05-prep index"):
        opened(workspace)
    build_index(workspace, SPEC)
    assert len(opened(workspace)) == 17
    assert not [p for p in SPEC.root(workspace).iterdir() if p.name.endswith(".tmp")]


def test_frame_table_elsewhere_when_the_dataset_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = write_dataset(tmp_path / "w", SPEC)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (SPEC.root(workspace) / ".frames").write_text("a file in the way")
    dataset = opened(workspace)
    assert dataset.handle.folder.is_relative_to(tmp_path / "cache") and len(dataset) == 13


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = write_dataset(tmp_path / "w", SPEC)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "nowhere")  # as expanduser leaves it for a user that no file knows
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (SPEC.root(workspace) / ".frames").write_text("a file in the way")
    assert opened(workspace).handle.folder.is_relative_to(tmp_path / "tmp")


def test_what_to_run_follows_a_moved_workspace(tmp_path: Path) -> None:
    build_pack(write_dataset(tmp_path / "a", SPEC), SPEC)
    (tmp_path / "a").rename(tmp_path / "b c")
    workspace = Workspace(tmp_path / "b c")
    opened(workspace)
    blob = SPEC.root(workspace) / "pack/images-00000.bin"
    os.truncate(blob, 100)
    again = rf"Run dm05-prep pack --dataset-name toy --workspace '{tmp_path}/b c' --force"
    with pytest.raises(DataError, match=again):
        opened(workspace)
    (blob.parent / "pack.json").write_text("{")
    with pytest.raises(DataError, match=again):
        opened(workspace)
    shutil.rmtree(SPEC.images(workspace))
    with pytest.raises(DataError, match=r"Run dm05-prep dataset --subset toy --layout pack --workspace .* --force"):
        opened(workspace)


def test_stale_or_foreign_packs_say_what_to_run(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    build_pack(workspace, SPEC)
    path = SPEC.jsonl(workspace) / "ep_0.jsonl"
    os.utime(path, ns=(1, 1))
    build_index(workspace, SPEC)
    opened(workspace)  # same contents at another time: still the same data
    path.write_text(path.read_text().replace("bowl", "pan").replace("drawer", "door"))
    build_index(workspace, SPEC)
    with pytest.raises(DataError, match=r"stale: the episode files have changed.*Run dm05-prep pack --dataset-name"):
        opened(workspace)
    build_pack(workspace, SPEC)
    with pytest.raises(DataError, match=r"was packed with cameras .*images_2.*, now it is \('images_1',\)"):
        opened(workspace, spec=make_spec(image_keys=("images_1",), image_prompts=("Head",)))


def test_statistics_of_other_data_are_refused(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    other = replace(make_stats(SPEC), source_fingerprint="0" * 64)
    with pytest.raises(DataError, match=r"of other episodes than those here.*dm05-prep norm-stats"):
        open_dataset(workspace, SPEC, other, 4, "absolute")
    with pytest.raises(DataError, match="5 action dims, dataset toy has 3"):
        open_dataset(workspace, SPEC, make_stats(make_spec(action_dim=5)), 4, "absolute")


def test_missing_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dm05-prep index"):
        opened(Workspace(tmp_path))


def test_a_bad_frame_is_named_with_its_line(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    path = SPEC.jsonl(workspace) / "ep_2.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    frame = json.loads(lines[3])
    frame["action"] = frame["action"][:2]
    path.write_text("".join([*lines[:3], json.dumps(frame) + "\n", *lines[4:]]))
    build_index(workspace, SPEC)
    with pytest.raises(DataError, match=r"ep_2\.jsonl:4: .*action"):
        opened(workspace)
    assert not (SPEC.root(workspace) / ".frames").exists()


class TestHeldOut:
    names: ClassVar = [f"episode_{i:04d}.jsonl" for i in range(400)]

    def test_splits_are_complements(self, tmp_path: Path) -> None:
        workspace = write_dataset(tmp_path, SPEC, lengths=(3, 4, 5, 2, 6))
        train, val = (opened(workspace, val_episodes=2, split=split) for split in ("train", "val"))
        assert len(val.episodes) == 2 and not set(train.episodes) & set(val.episodes)
        assert len(train) + len(val) == len(opened(workspace))
        whole = {(s.episode, s.frame): s.state for s in (opened(workspace)[i] for i in range(15))}
        for dataset in (train, val):
            for i in range(len(dataset)):
                got = dataset[i]
                assert np.array_equal(got.state, whole[got.episode, got.frame])
        with pytest.raises(DataError, match="5 episodes to keep out of 5 leave none"):
            opened(workspace, val_episodes=5)

    def test_share_does_not_depend_on_the_others(self) -> None:
        chosen = held_out(self.names, 0.1)
        assert 15 < len(chosen) < 70
        assert held_out(self.names[:200], 0.1) == chosen & set(self.names[:200])

    def test_number_changes_little_when_episodes_come(self) -> None:
        chosen = held_out(self.names, 20)
        assert len(chosen) == 20
        assert len(held_out([*self.names, "new.jsonl"], 20) & chosen) >= 19
        assert held_out(self.names[::-1], 20) == chosen
        assert held_out(self.names, 0) == set()


def test_opening_is_quick_and_small_at_any_size(tmp_path: Path) -> None:
    """Rows grow a hundredfold, the time to open and what a reader holds do not."""
    sizes = {}
    for frames in (100, 10_000):
        workspace = Workspace(tmp_path / str(frames))
        write_dataset(workspace.root, SPEC, lengths=(2,))
        path = SPEC.jsonl(workspace) / "ep_0.jsonl"
        path.write_text(path.read_text() * (frames // 2))
        build_index(workspace, SPEC)
        dataset = opened(workspace)
        seconds = min(_timed(dataset) for _ in range(5))
        assert len(dataset) == frames - 1
        sizes[frames] = (seconds, len(pickle.dumps(dataset.handle)))
    assert sizes[10_000][0] < max(0.05, 5 * sizes[100][0])
    assert abs(sizes[10_000][1] - sizes[100][1]) < 64


def _timed(dataset: MemoryMappedDataset) -> float:
    start = time.perf_counter()
    dataset.handle.open().close()
    return time.perf_counter() - start


def read_all(dataset: MemoryMappedDataset) -> None:
    for i in range(len(dataset)):
        dataset[i]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = write_dataset(tmp_path_factory.mktemp("packed"), SPEC, lengths=(4, 5))
    build_pack(workspace, SPEC)
    return workspace


@settings(max_examples=60, deadline=None)
@given(
    target=st.sampled_from(["images-00000.bin", "frames.arrow"]),
    fault=st.sampled_from(["truncate", "flip", "delete", "empty"]),
    while_open=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_faults_never_crash_or_give_wrong_data(
    packed: Workspace, tmp_path_factory: pytest.TempPathFactory, target: str, fault: str, while_open: bool, seed: int
) -> None:
    """A file of the pack is damaged before it is opened or under an open reader: right data or one clear line."""
    rng = random.Random(seed)
    copy = tmp_path_factory.mktemp("fault")
    shutil.copytree(packed.root, copy, dirs_exist_ok=True)
    workspace = Workspace(copy)
    whole = opened(packed)
    dataset = opened(workspace) if while_open else None
    path = SPEC.root(workspace) / "pack" / target
    data = bytearray(path.read_bytes())
    if fault == "delete":
        path.unlink()
    elif fault == "flip":
        at = rng.randrange(len(data))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ rng.randrange(1, 256)]))
    else:
        os.truncate(path, 0 if fault == "empty" else rng.randrange(len(data)))
    try:
        dataset = dataset or opened(workspace)
        for i in range(len(dataset)):
            got, due = dataset[i], whole[i]
            assert all(np.array_equal(a, b) for a, b in zip(got.images, due.images, strict=True))
            assert np.array_equal(got.action, due.action) and np.array_equal(got.state, due.state)
            assert got.task == due.task
    except DataError as error:
        assert target in str(error) and "dm05-prep pack" in str(error)
        if while_open:
            assert "episode ep_" in str(error) and "frame " in str(error)
    shutil.rmtree(copy)


def test_broken_image_files_are_named(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    dataset = opened(workspace)
    victim = SPEC.images(workspace) / "ep_2/camera_1/000003.jpg"
    data = victim.read_bytes()
    for broken in (data[: len(data) // 2], b"", b"hello"):
        victim.write_bytes(broken)
        with pytest.raises(DataError, match=r"camera_1/000003\.jpg: episode ep_2\.jsonl, frame 3, images_2: ") as got:
            read_all(dataset)
        assert f"or run dm05-prep dataset --subset toy --workspace {tmp_path} --force" in str(got.value)
    victim.unlink()
    with pytest.raises(DataError, match=r"000003\.jpg: episode ep_2\.jsonl, frame 3.*No such file.*dm05-prep"):
        read_all(dataset)


def test_a_pack_replaced_under_a_reader(tmp_path: Path) -> None:
    """An open reader keeps what it opened; a worker that opens later is told."""
    workspace = write_dataset(tmp_path, SPEC)
    build_pack(workspace, SPEC)
    dataset = opened(workspace)
    before = [dataset[i].state for i in range(len(dataset))]
    path = SPEC.jsonl(workspace) / "ep_0.jsonl"
    path.write_text(path.read_text().replace("bowl", "pan") * 2)
    build_index(workspace, SPEC)
    build_pack(workspace, SPEC)
    assert read_info(SPEC.root(workspace) / "pack").frames == 21
    assert all(np.array_equal(dataset[i].state, state) for i, state in enumerate(before))
    with pytest.raises(DataError, match="written anew while this run reads it"):
        dataset.handle.open()
