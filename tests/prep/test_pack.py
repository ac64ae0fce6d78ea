"""dm05-prep pack: from files, from videos, from an archive's parts; interrupted, repeated, and on broken data."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from dm05_prep.index import build_index
from dm05_prep.pack import PACK_DIR, build_pack, publish_archive_pack
from dm05_prep.pack_images import ArchiveImages, ArchiveState, CopiedImages, part_records
from dm05_schemas.episode import read_episode
from dm05_schemas.errors import DataError
from dm05_schemas.frame_table import FrameTable
from dm05_schemas.image import decode_rgb
from dm05_schemas.pack import blob_path, check_files, read_info
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace
from PIL import Image
from small_data import make_spec, make_stats, pack_archive, picture, write_dataset, write_parts

SPEC = make_spec()


def stored_images(workspace: Workspace, spec: DatasetSpec = SPEC) -> list[bytes]:
    """Every image of a pack, read by hand: row by row, camera by camera."""
    folder = spec.root(workspace) / PACK_DIR
    info = read_info(folder)
    check_files(folder, info)
    table = FrameTable(folder, info)
    found = []
    for row in range(info.frames):
        for key in info.cameras:
            place = [int(table.rows(f"{key}.{name}", row)[0]) for name in ("blob", "offset", "length", "crc32")]
            blob, offset, length, crc = place
            data = b""
            while len(data) < length:
                with blob_path(folder, info.blobs[blob]).open("rb") as file:
                    file.seek(offset)
                    data += file.read(length - len(data))
                blob, offset = blob + 1, 0
            assert zlib.crc32(data) == crc
            found.append(data)
    return found


def source_images(workspace: Workspace, spec: DatasetSpec = SPEC) -> list[bytes]:
    """Every image as the frames name them, in the same order."""
    episodes = [read_episode(path, spec) for path in sorted(spec.jsonl(workspace).iterdir())]
    return [(spec.images(workspace) / url).read_bytes() for e in episodes for urls in e.urls for url in urls]


def test_copies_every_image(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC, sizes=((24, 32), (50, 30)), kinds=("JPEG", "PNG"))
    result = build_pack(workspace, SPEC)
    due = source_images(workspace)
    assert stored_images(workspace) == due
    first = [image for camera in (0, 1) for image in due[camera:10:2]]
    assert (result.folder / "images-00000.bin").read_bytes().startswith(b"".join(first))  # in the order they are shown
    assert result.computed and result.image_bytes == sum(map(len, due))
    assert result.info.largest_image_bytes == 50 * 30 * 3
    assert sorted(path.name for path in result.folder.iterdir()) == ["frames.arrow", "images-00000.bin", "pack.json"]


def test_does_nothing_when_current(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    first = build_pack(workspace, SPEC)
    inode = (first.folder / "frames.arrow").stat().st_ino
    again = build_pack(workspace, SPEC)
    assert not again.computed and again.info == first.info
    assert (first.folder / "frames.arrow").stat().st_ino == inode
    assert build_pack(workspace, SPEC, force=True).computed
    os.truncate(first.folder / "images-00000.bin", 10)
    assert build_pack(workspace, SPEC).computed
    assert stored_images(workspace) == source_images(workspace)
    shutil.copy(SPEC.jsonl(workspace) / "ep_0.jsonl", SPEC.jsonl(workspace) / "ep_7.jsonl")
    assert build_pack(workspace, SPEC).computed


def test_an_image_named_twice_is_stored_once(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC, lengths=(4,))
    path = SPEC.jsonl(workspace) / "ep_0.jsonl"
    path.write_text(path.read_text().replace("000003", "000001").replace("camera_1", "camera_0"))
    build_pack(workspace, SPEC)
    assert stored_images(workspace) == source_images(workspace)
    assert (SPEC.root(workspace) / "pack/images-00000.bin").stat().st_size == sum(
        len((SPEC.images(workspace) / f"ep_0/camera_0/00000{t}.jpg").read_bytes()) for t in range(3)
    )


def test_blobs_roll_over(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC, lengths=(6,))
    folder = tmp_path / "out"
    folder.mkdir()
    images = CopiedImages(folder, SPEC.images(workspace), SPEC, blob_bytes=2500)
    images.columns(read_episode(SPEC.jsonl(workspace) / "ep_0.jsonl", SPEC))
    records = images.finish()
    assert len(records) > 2 and all(record.bytes >= 2500 for record in records[:-1])
    assert [record.path for record in records[:2]] == ["images-00000.bin", "images-00001.bin"]
    assert all((folder / record.path).stat().st_size == record.bytes for record in records)


@pytest.mark.parametrize(("broken", "text"), [(None, "No such file"), (b"", "empty file"), (b"text", "not an image")])
def test_a_missing_or_broken_image_leaves_the_old_pack(tmp_path: Path, broken: bytes | None, text: str) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    first = build_pack(workspace, SPEC)
    victim = SPEC.images(workspace) / "ep_2/camera_0/000004.jpg"
    victim.unlink()
    if broken is not None:
        victim.write_bytes(broken)
    with pytest.raises(DataError, match=text) as caught:
        build_pack(workspace, SPEC, force=True)
    assert "ep_2.jsonl:5: " in str(caught.value) and "camera_0/000004.jpg" in str(caught.value)
    assert read_info(first.folder) == first.info
    assert not [path for path in SPEC.root(workspace).iterdir() if path.name.endswith(".tmp")]


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """kill -9 leaves no pack under its name, and the next run clears up and succeeds."""
    workspace = write_dataset(tmp_path, SPEC, lengths=(400, 400))
    registry = tmp_path / "datasets.json"
    registry.write_text(
        json.dumps(
            {
                "toy": {
                    "folder": "data/toy",
                    "image_keys": list(SPEC.image_keys),
                    "image_prompts": list(SPEC.image_prompts),
                    "state_desc": list(SPEC.state_desc),
                    "action_dim": 3,
                }
            }
        )
    )
    command = [sys.executable, "-c", "from dm05_prep.cli import main; main()", "pack", "--dataset-name", "toy"]
    command += ["--workspace", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = SPEC.root(workspace)
    while process.poll() is None and not list(root.glob(".pack-*.tmp/images-00000.bin")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (root / "pack").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "800 frames" in done.stdout and "written" in done.stdout
    assert not list(root.glob(".pack-*"))
    assert stored_images(workspace) == source_images(workspace)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "already current" in done.stdout
    (SPEC.images(workspace) / "ep_1/camera_1/000399.jpg").unlink()
    done = subprocess.run([*command, "--force"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "ep_1.jsonl:400" in done.stderr and "Traceback" not in done.stderr


def pack_alone(root: str, go: float) -> str:
    """Build the pack in a process of its own; what went wrong."""
    time.sleep(max(0, go - time.time()))
    try:
        for _ in range(5):
            build_pack(Workspace(Path(root)), SPEC, force=True)
    except Exception as error:  # whatever it is, the test shows it
        return repr(error)
    return ""


def test_several_at_once(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC)
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(pack_alone, [str(tmp_path)] * 4, [time.time() + 2] * 4)) == [""] * 4
    assert stored_images(workspace) == source_images(workspace)
    assert not list(SPEC.root(workspace).glob(".pack-*"))


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    workspace = write_dataset(tmp_path, SPEC, lengths=(9, 9))
    build_index(workspace, SPEC)
    code = f"""
import resource; from pathlib import Path; from small_data import make_spec; from dm05_prep.pack import build_pack
from dm05_schemas.cli import run; from dm05_schemas.workspace import Workspace
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
run(lambda: build_pack(Workspace(Path({str(tmp_path)!r})), make_spec()) and 0, "dm05-prep")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    folder = SPEC.root(workspace) / "pack"
    assert done.returncode == 1 and done.stderr.startswith(f"dm05-prep: error: {folder}: File too large. ")
    assert len(done.stderr.splitlines()) == 1
    assert not folder.exists() and not list(folder.parent.glob(".pack-*"))


class TestArchive:
    @pytest.mark.parametrize("part_bytes", [600, 4096, 10**7])
    def test_images_stay_in_the_parts(self, tmp_path: Path, part_bytes: int) -> None:
        workspace = write_dataset(tmp_path / "w", SPEC, sizes=((24, 32), (60, 60)), kinds=("JPEG", "PNG"))
        due = source_images(workspace)
        result = pack_archive(workspace, SPEC, write_parts(workspace, SPEC, tmp_path / "parts", part_bytes))
        shutil.rmtree(SPEC.images(workspace))
        assert stored_images(workspace) == due
        assert not build_pack(workspace, SPEC).computed
        with pytest.raises(DataError, match=r"no folder of images to copy from.*--layout pack --force"):
            build_pack(workspace, SPEC, force=True)
        assert stored_images(workspace) == due
        assert not list(result.folder.glob("*.bin")) and not (result.folder / "members.log").exists()
        assert all(Path(record.path).is_absolute() for record in result.info.blobs)

    def test_parts_in_the_workspace_move_with_it(self, tmp_path: Path) -> None:
        workspace = write_dataset(tmp_path / "w", SPEC)
        due = source_images(workspace)
        parts = write_parts(workspace, SPEC, workspace.root / "parts", 2000)
        pack_archive(workspace, SPEC, parts)
        shutil.rmtree(SPEC.images(workspace))
        (tmp_path / "w").rename(tmp_path / "moved")
        assert stored_images(Workspace(tmp_path / "moved")) == due

    def test_copied_while_it_streams_when_the_parts_will_not_stay(self, tmp_path: Path) -> None:
        workspace = write_dataset(tmp_path / "w", SPEC)
        due = source_images(workspace)
        parts = write_parts(workspace, SPEC, tmp_path / "parts", 2000)
        result = pack_archive(workspace, SPEC, parts, keep=False)
        shutil.rmtree(tmp_path / "parts")
        shutil.rmtree(SPEC.images(workspace))
        assert stored_images(workspace) == due
        assert [record.path for record in result.info.blobs] == ["images-00000.bin"]

    @pytest.mark.parametrize("keep", [True, False])
    def test_continues_after_a_crash(self, tmp_path: Path, keep: bool) -> None:
        """Every state that was made durable can be continued, whatever was written after it."""
        workspace = write_dataset(tmp_path / "w", SPEC, lengths=(6,))
        due = source_images(workspace)
        urls = [url for urls in read_episode(SPEC.jsonl(workspace) / "ep_0.jsonl", SPEC).urls for url in urls]
        contents = [(url, (SPEC.images(workspace) / url).read_bytes()) for url in urls]
        part = tmp_path / "x.part"
        part.write_bytes(b"".join(data for _, data in contents))
        folder = SPEC.root(workspace) / PACK_DIR
        records = part_records([(part, part.stat().st_size)], folder, workspace) if keep else []
        offsets = np.cumsum([0, *(len(data) for _, data in contents)]).tolist()
        for stop in (0, 1, 5, len(contents)):
            staging = SPEC.root(workspace) / "staging"
            staging.mkdir()
            first = ArchiveImages(staging, records)
            state = ArchiveState(0, ())
            for i, (url, data) in enumerate(contents):
                if i == stop:
                    state = first.sync()
                first.member(url, 0, offsets[i], data)
            if stop == len(contents):
                state = first.sync()
            first.sync()
            second = ArchiveImages(staging, records, ArchiveState(*json.loads(json.dumps(state))))
            for (url, data), offset in list(zip(contents, offsets, strict=False))[stop:]:
                second.member(url, 0, offset, data)
            publish_archive_pack(workspace, SPEC, second, staging, rebuild="Run dm05-prep dataset")
            assert stored_images(workspace) == due and not staging.exists()

    def test_what_is_missing_or_no_image(self, tmp_path: Path) -> None:
        workspace = write_dataset(tmp_path / "w", SPEC, lengths=(3,))
        (SPEC.images(workspace) / "README.txt").write_text("not an image, and no frame names it")
        victim = SPEC.images(workspace) / "ep_0/camera_1/000001.jpg"
        data = victim.read_bytes()
        victim.write_bytes(b"hello")
        with pytest.raises(DataError, match=r"ep_0\.jsonl:2: .*camera_1/000001\.jpg: not an image"):
            pack_archive(workspace, SPEC, write_parts(workspace, SPEC, tmp_path / "a", 2000))
        victim.unlink()
        with pytest.raises(DataError, match=r"ep_0\.jsonl:2: the archive holds no ep_0/camera_1/000001\.jpg"):
            pack_archive(workspace, SPEC, write_parts(workspace, SPEC, tmp_path / "b", 2000))
        victim.write_bytes(data)
        pack_archive(workspace, SPEC, write_parts(workspace, SPEC, tmp_path / "c", 2000))

    def test_hard_links(self, tmp_path: Path) -> None:
        workspace = write_dataset(tmp_path, SPEC, lengths=(2,))
        build_index(workspace, SPEC)
        image = picture(np.random.default_rng(0), (8, 8))
        staging = tmp_path / "staging"
        staging.mkdir()
        images = ArchiveImages(staging)
        images.member("ep_0/camera_0/000000.jpg", 0, 0, image)
        for url in ("ep_0/camera_0/000001.jpg", "ep_0/camera_1/000000.jpg", "ep_0/camera_1/000001.jpg"):
            images.link(url, "ep_0/camera_0/000000.jpg")
        publish_archive_pack(workspace, SPEC, images, staging, rebuild="Run dm05-prep dataset")
        assert stored_images(workspace) == [image] * 4


class TestVideo:
    """Frames of videos: exact by number, as JPEGs in a pack."""

    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Workspace:
        av = pytest.importorskip("av", reason="PyAV (the video extra) is not installed")
        workspace = Workspace(tmp_path)
        spec = make_spec(image_dir="video")
        rng = np.random.default_rng(1)
        for camera in (0, 1):
            path = spec.images(workspace) / f"ep_0/camera_{camera}.mp4"
            path.parent.mkdir(parents=True, exist_ok=True)
            with av.open(str(path), "w") as container:
                stream = container.add_stream("mpeg4", rate=10, options={"g": "5", "bf": "2"})
                stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
                stream.bit_rate = 4_000_000
                for t in range(23):
                    pixels = np.asarray(Image.open(io.BytesIO(picture(rng, (48, 64)))))
                    pixels = pixels // 4 + np.uint8(8 * t)
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
                container.mux(stream.encode())
        frames = [
            {f"images_{c + 1}": {"type": "video", "url": f"./ep_0/camera_{c}.mp4", "frame_idx": t} for c in (0, 1)}
            | {"state": [0.1 * t] * 4, "action": [0.2] * 3, "prompt": "put"}
            for t in (0, 3, 4, 5, 22, 21, 9, 2)
        ]
        jsonl = spec.jsonl(workspace) / "ep_0.jsonl"
        jsonl.parent.mkdir(parents=True)
        jsonl.write_text("".join(json.dumps(frame) + "\n" for frame in frames))
        build_index(workspace, spec)
        return workspace

    def test_frames_are_exact(self, workspace: Workspace) -> None:
        from dm05_schemas.video import VideoReader, all_frames

        path = make_spec(image_dir="video").images(workspace) / "ep_0/camera_0.mp4"
        every = list(all_frames(path, "x"))
        assert len(every) == 23
        reader = VideoReader()
        for t in (0, 1, 2, 22, 7, 7, 8, 0, 21, 15, 16, 3):
            assert np.array_equal(reader.read(path, t, "x"), every[t])
        with pytest.raises(DataError, match="has 23 frames, frame_idx 23 is not there"):
            reader.read(path, 23, "where")
        reader.close()
        path.write_bytes(path.read_bytes()[:500])
        with pytest.raises(DataError, match="where: cannot read the video"):
            reader.read(path, 0, "where")

    def test_pack_holds_every_frame_that_is_named(self, workspace: Workspace, tmp_path: Path) -> None:
        from dm05_schemas.video import all_frames

        spec = make_spec(image_dir="video")
        build_pack(workspace, spec)
        copied = stored_images(workspace, spec)
        every = [list(all_frames(spec.images(workspace) / f"ep_0/camera_{c}.mp4", "x")) for c in (0, 1)]
        named = [every[c][t] for t in (0, 3, 4, 5, 22, 21, 9, 2) for c in (0, 1)]
        for data, due in zip(copied, named, strict=True):
            assert np.abs(decode_rgb(data).astype(int) - due).mean() < 2
        pack_archive(workspace, spec, write_parts(workspace, spec, tmp_path / "parts", 5000))
        assert stored_images(workspace, spec) == copied

    def test_training_reads_the_exact_frames(self, workspace: Workspace) -> None:
        from dm05_schemas.video import all_frames
        from dm05_train.data.dataset import open_dataset

        spec = make_spec(image_dir="video")
        every = [list(all_frames(spec.images(workspace) / f"ep_0/camera_{c}.mp4", "x")) for c in (0, 1)]
        dataset = open_dataset(workspace, spec, make_stats(spec), 4, "absolute", "jsonl")
        for i, t in enumerate((0, 3, 4, 5, 22, 21, 9)):
            buffer = np.zeros(64 * 48 * 3, dtype=np.uint8)
            for camera, image in enumerate(dataset[i].images):
                assert np.array_equal(image, every[camera][t])
                assert dataset.image_into(i, camera, buffer) == (48, 64)
                assert np.array_equal(buffer.reshape(48, 64, 3), image)
                assert dataset.image_into(i, camera, buffer[:9]) == buffer.size

    def test_a_frame_past_the_end(self, workspace: Workspace) -> None:
        spec = make_spec(image_dir="video")
        path = spec.jsonl(workspace) / "ep_0.jsonl"
        path.write_text(path.read_text().replace('"frame_idx": 9', '"frame_idx": 23'))
        with pytest.raises(DataError, match=r"ep_0\.jsonl:7: .*camera_0\.mp4 has no frame 23"):
            build_pack(workspace, spec)
