"""The demo is real input: coherent motion, pictures that show it, an archive like the hub's, a loadable checkpoint."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from dm05_prep.demo import draw_episodes, write_demo
from dm05_prep.demo.render import render
from dm05_prep.demo.tokenizer import build_tokenizer
from dm05_prep.demo.world import HOME, STEP, TASKS, TURN, Trajectory, draw_scene, simulate
from dm05_schemas.checkpoint import expected_tensors, read_header
from dm05_schemas.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file


def episode(seed: int, task: int = 0, length: int = 60) -> Trajectory:
    return simulate(draw_scene(TASKS[task], np.random.default_rng(seed)), length)


@given(seed=st.integers(0, 2**32 - 1), task=st.integers(0, len(TASKS) - 1))
@settings(max_examples=40, deadline=None)
def test_every_episode_is_solved_and_the_states_follow_from_the_actions(seed: int, task: int) -> None:
    trajectory = episode(seed, task)
    state, action = trajectory.state, trajectory.action
    assert state.shape == (60, 8) and action.shape == (60, 7)
    scale = np.concatenate([STEP, TURN])
    np.testing.assert_allclose(state[1:, :6], state[:-1, :6] + action[:-1, :6] * scale, atol=1e-9)
    assert set(np.unique(action[:, 6])) == {-1.0, 1.0}
    np.testing.assert_allclose(state[:, 6], -state[:, 7])
    assert np.hypot(*(trajectory.moments[-1].block[:2] - trajectory.scene.goal)) < 0.03
    assert np.linalg.norm(state[-1, :3] - HOME) < 0.02
    assert np.abs(np.diff(action[:, :3], axis=0)).max() < 2.0


def test_the_pictures_show_where_the_object_is() -> None:
    trajectory = episode(3)
    for moment in trajectory.moments[::12]:
        for picture in render(trajectory.scene, moment):
            image = Image.open(io.BytesIO(picture))
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (256, 256))
    start, carried = (render(trajectory.scene, trajectory.moments[t])[0] for t in (0, 25))
    assert np.linalg.norm(red_middle(start) - red_middle(carried)) > 10


def red_middle(picture: bytes) -> np.ndarray:
    red, green, blue = np.asarray(Image.open(io.BytesIO(picture))).astype(int).transpose(2, 0, 1)
    return np.argwhere((red > 120) & (green < 90) & (blue < 90)).mean(0)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder, episodes=4, frames=8, part_bytes=100_000)
    return folder


def test_the_parts_are_one_tar_cut_by_size(demo: Path) -> None:
    parts = sorted((demo / "parts").iterdir())
    assert [part.name for part in parts] == [f"libero.tar.part-{number:03d}" for number in range(len(parts))]
    assert len(parts) > 2
    assert {part.stat().st_size for part in parts[:-1]} == {100_000}
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
        members = tar.getmembers()
        names = {member.name for member in members if member.isfile()}
        frames = [json.loads(line) for line in tar.extractfile("libero/libero_pi0_all/jsonl/episode_003.jsonl")]  # type: ignore[union-attr]
        video = tar.extractfile("libero/libero_goal/video/episode_000/camera_0.mp4").read()  # type: ignore[union-attr]
    assert {member.mtime for member in members} == {0}
    assert {name.split("/")[1] for name in names} == {"libero_pi0_all", "libero_goal"}
    for frame in frames:
        assert f"libero/libero_pi0_all/image/{frame['images_2']['url'].removeprefix('./')}" in names
        assert len(frame["state"]) == 8 and len(frame["action"]) == 7
        assert frame["prompt"] == "把绿色的方块放进篮子里"
    assert video[4:12] == b"ftypisom"


def test_the_video_holds_the_drawn_frames_in_order(demo: Path, tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="the video extra is not installed")
    parts = sorted((demo / "parts").iterdir())
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
        video = tar.extractfile("libero/libero_goal/video/episode_001/camera_1.mp4").read()  # type: ignore[union-attr]
    rng = np.random.default_rng(0)
    draw_episodes(rng, 4, 8)
    trajectory = draw_episodes(rng, 2, 8)[1]
    with av.open(io.BytesIO(video)) as container:
        seen = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(seen) == len(trajectory.moments)
    for image, moment in zip(seen, trajectory.moments, strict=True):
        drawn = np.asarray(Image.open(io.BytesIO(render(trajectory.scene, moment)[1]))).astype(int)
        assert np.abs(image - drawn).mean() < 3


def test_the_checkpoint_has_every_tensor_the_config_calls_for(demo: Path) -> None:
    folder = demo / "DM05"
    expected = expected_tensors(json.loads((folder / "config.json").read_text()))
    assert {name: entry.shape for name, entry in read_header(folder / "model.safetensors").items()} == expected
    weights = load_file(folder / "model.safetensors")
    head, embedding = "model.vlm.lm_head.weight", "model.vlm.model.language_model.embed_tokens.weight"
    np.testing.assert_array_equal(weights[head], weights[embedding])
    assert all(np.isfinite(tensor).all() for tensor in weights.values())
    gates = weights["model.action_expert.input_time_modulators.0.bias"]
    assert (gates[-len(gates) // 3 :] == 1).all()


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(deadline=None)
def test_the_tokenizer_writes_any_text_and_reads_it_back(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the train extra is not installed")
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(build_tokenizer().json))
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")


def test_the_tokenizer_knows_gemmas_control_tokens_by_name() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the train extra is not installed")
    built = build_tokenizer()
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(built.json))
    special = {token["content"] for token in built.json["added_tokens"] if token["special"]}
    assert special == {
        *("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    }
    for token, number in built.ids.items():
        assert tokenizer.token_to_id(token) == number
        assert tokenizer.encode(token, add_special_tokens=False).ids == [number]
    assert tokenizer.encode("x").ids[0] == built.ids["<bos>"]
    words = tokenizer.encode("put the red block on the plate", add_special_tokens=False).tokens
    assert len(words) < 12


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(demo: Path, tmp_path: Path) -> None:
    write_demo(tmp_path / "same", episodes=4, frames=8, part_bytes=100_000)
    write_demo(tmp_path / "other", episodes=4, frames=8, part_bytes=100_000, seed=1)

    def content(folder: Path) -> dict[str, bytes]:
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    assert content(tmp_path / "same") == content(demo)
    assert content(tmp_path / "other") != content(demo)


def test_a_second_call_finds_it_and_a_damaged_one_is_refused_then_replaced(tmp_path: Path) -> None:
    first = write_demo(tmp_path, episodes=1, frames=4)
    second = write_demo(tmp_path, episodes=1, frames=4)
    assert first.written and not second.written and second.frames == first.frames
    first.parts[0].write_bytes(b"cut")
    with pytest.raises(UsageError, match="--force"):
        write_demo(tmp_path, episodes=1, frames=4)
    assert write_demo(tmp_path, episodes=1, frames=4, force=True).written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DM05", "demo.json", "parts"]


def test_folders_of_the_user_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="parts: is there already"):
        write_demo(tmp_path, episodes=1, frames=4)
    assert [path.name for path in tmp_path.rglob("*")] == ["parts", "mine.txt"]
