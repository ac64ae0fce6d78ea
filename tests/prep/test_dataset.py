"""``dm05-prep dataset`` as a person runs it: what it makes, what it says, what a fault leaves behind."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from dm05_prep.extract import ExtractOptions
from dm05_prep.lock import WorkspaceLock
from fake_secrets import KEYS, SECRETS
from PIL import Image
from process import Service
from tars import HOME, honest, killed_at, run, split, tree, wanted, write_parts

PREP = Path(sys.executable).with_name("dm05-prep")
PART_BYTES = 20_000


def libero(episodes: int = 3, frames: int = 5) -> dict[str, bytes]:
    """A dataset like libero_pi0_all, and a member of another one."""
    rnd = random.Random(7)
    files = {"libero/libero_goal/jsonl/other.jsonl": b"{}\n"}
    for episode in range(episodes):
        lines = []
        for frame in range(frames):
            row: dict[str, object] = {}
            for camera in (0, 1):
                url = f"ep_{episode}/camera_{camera}/{frame:06d}.jpg"
                picture = io.BytesIO()
                color = (rnd.randrange(256), rnd.randrange(256), rnd.randrange(256))
                Image.new("RGB", (16, 16), color).save(picture, "JPEG")
                files[f"{HOME}image/{url}"] = picture.getvalue()
                row[f"images_{camera + 1}"] = {"type": "image", "url": f"./{url}"}
            row |= {"state": [rnd.random() for _ in range(8)], "action": [rnd.random() for _ in range(7)]}
            lines.append(json.dumps(row | {"prompt": "put the bowl on the plate", "is_robot": True}))
        files[f"{HOME}jsonl/ep_{episode}.jsonl"] = ("\n".join(lines) + "\n").encode()
    return files


FILES = libero()
PARTS = split(honest(FILES), PART_BYTES)


class Run:
    """A finished command."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("WORKSPACE_DIR", "DATA_PATH"))
        }
        command = [str(PREP), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=kept | environment, timeout=120)
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        assert "Traceback" not in self.out + self.err


def dataset(source: Path, workspace: Path, *more: object, **environment: str) -> Run:
    return Run("dataset", "--source", "local", "--uri", source, "--workspace", workspace, *more, **environment)


def laid_out(workspace: Path) -> dict[str, bytes]:
    """The dataset's own files: episodes and images."""
    files = tree(workspace / "data/libero/libero_pi0_all")
    return {name: data for name, data in files.items() if name.startswith(("jsonl/", "image/"))}


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_all_stages_then_nothing(tmp_path: Path) -> None:
    write_parts(tmp_path / "p", PARTS)
    first = dataset(tmp_path / "p", tmp_path / "w")
    assert (first.code, first.err) == (0, "")
    assert [line.split()[0] for line in first.out.splitlines()] == [
        "extract", "index", "norm-stats", "summary", "next", "dm05-train",
    ]  # fmt: skip
    assert "3 episodes, 15 frames, 33 files" in first.out
    assert laid_out(tmp_path / "w") == wanted(FILES)
    index = json.loads((tmp_path / "w/index_cache.json").read_text())["data"]
    assert index == {f"data/libero/libero_pi0_all/jsonl/ep_{episode}.jsonl": 5 for episode in range(3)}
    assert len(list((tmp_path / "w/norm_stats").iterdir())) == 2
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["data", "index_cache.json", "norm_stats"]
    before = times(tmp_path)
    again = dataset(tmp_path / "p", tmp_path / "w")
    assert again.code == 0 and "already complete (3 episodes, 15 frames): nothing to do" in again.out
    assert times(tmp_path) == before
    assert dataset(tmp_path / "p", tmp_path / "w", "--quiet").out == ""


@pytest.mark.parametrize("gone", ["norm_stats", "index_cache.json", "data/libero/libero_pi0_all/index_cache.json"])
def test_only_what_is_missing(tmp_path: Path, gone: str) -> None:
    write_parts(tmp_path / "p", PARTS)
    dataset(tmp_path / "p", tmp_path / "w")
    due = tree(tmp_path / "w")
    path = tmp_path / "w" / gone
    if path.is_dir():
        for file in path.iterdir():
            file.unlink()
    else:
        path.unlink()
    again = dataset(tmp_path / "p", tmp_path / "w")
    assert "extract" not in again.out and again.code == 0
    assert tree(tmp_path / "w") == due


def test_force_starts_over(tmp_path: Path) -> None:
    write_parts(tmp_path / "p", PARTS)
    dataset(tmp_path / "p", tmp_path / "w")
    more = libero(4)
    write_parts(tmp_path / "p2", split(honest(more), PART_BYTES))
    assert "nothing to do" in dataset(tmp_path / "p2", tmp_path / "w").out
    forced = dataset(tmp_path / "p2", tmp_path / "w", "--force")
    assert "4 episodes, 20 frames" in forced.out and laid_out(tmp_path / "w") == wanted(more)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    write_parts(tmp_path / "p", PARTS)
    dry = dataset(tmp_path / "p", tmp_path / "w", "--dry-run")
    assert dry.code == 0 and "libero.tar.part-001" in dry.out and "index, norm stats" in dry.out
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_another_subset_and_a_data_folder_elsewhere(tmp_path: Path) -> None:
    files = {
        name.replace("libero_pi0_all", "libero_10").replace("image/", "video/"): data for name, data in FILES.items()
    }
    write_parts(tmp_path / "p", split(honest(files), PART_BYTES))
    done = dataset(tmp_path / "p", tmp_path / "w", "--subset", "libero_10", DATA_PATH=str(tmp_path / "d"))
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "d/libero/libero_10").iterdir() if path.name[0] != ".") == [
        "index_cache.json", "jsonl", "video",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["index_cache.json", "norm_stats"]


class TestFaults:
    """One clear line, the right exit code, nothing left behind."""

    def check(self, done: Run, code: int, tmp_path: Path, *words: str) -> None:
        assert done.code == code, done.err
        assert len(done.err.splitlines()) == 1 and done.err.startswith("dm05-prep: error: ")
        for word in words:
            assert word in done.err
        assert not (tmp_path / "w").exists()

    def test_wrong_words(self, tmp_path: Path) -> None:
        for arguments, word in [
            (("datset",), "Did you mean: dm05-prep dataset"),
            (("dataset", "--source", "loca"), "'loca'"),
            (("dataset", "--urii", "x"), "--urii"),
            (("dataset", "--source", "local"), "--uri"),
            (("dataset", "--jobs", "0"), "--jobs"),
            (
                ("dataset", "--action-mode", "relative"),
                "--action-mode: relative mode needs as many of both, libero_pi0_all has 7 action and 8 state",
            ),
            ((), "no command"),
        ]:
            self.check(Run(*arguments, WORKSPACE_DIR=str(tmp_path / "w")), 2, tmp_path, word)

    def test_an_unknown_subset(self, tmp_path: Path) -> None:
        done = dataset(tmp_path, tmp_path / "w", "--subset", "libero_pi0")
        self.check(done, 1, tmp_path, "Did you mean", "libero_pi0_all")

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        self.check(dataset(tmp_path / "nowhere", tmp_path / "w"), 1, tmp_path, "nowhere: no such folder")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "p").mkdir()
        self.check(dataset(tmp_path / "p", tmp_path / "w"), 1, tmp_path, "the folder is empty")

    def test_a_missing_middle_part(self, tmp_path: Path) -> None:
        write_parts(tmp_path / "p", PARTS)
        (tmp_path / "p/libero.tar.part-001").unlink()
        self.check(dataset(tmp_path / "p", tmp_path / "w"), 1, tmp_path, "missing: libero.tar.part-001")

    @pytest.mark.parametrize("index", range(len(PARTS)))
    def test_a_part_cut_short(self, tmp_path: Path, index: int) -> None:
        write_parts(tmp_path / "p", [part[:-9999] if i == index else part for i, part in enumerate(PARTS)])
        self.check(dataset(tmp_path / "p", tmp_path / "w"), 1, tmp_path, "libero.tar.part-00")

    def test_a_flipped_header(self, tmp_path: Path) -> None:
        archive = bytearray(b"".join(PARTS))
        archive[archive.index(b"libero/libero_pi0_all/image/ep_1/camera_0/000003.jpg")] ^= 1
        write_parts(tmp_path / "p", split(bytes(archive), PART_BYTES))
        self.check(dataset(tmp_path / "p", tmp_path / "w"), 1, tmp_path, "no member starts where one must")

    def test_no_such_subset_in_the_archive(self, tmp_path: Path) -> None:
        write_parts(tmp_path / "p", PARTS)
        done = dataset(tmp_path / "p", tmp_path / "w", "--subset", "libero_spatial")
        self.check(done, 1, tmp_path, "holds nothing of libero_spatial", "libero/libero_goal")

    def test_a_folder_of_the_users(self, tmp_path: Path) -> None:
        write_parts(tmp_path / "p", PARTS)
        folder = tmp_path / "w/data/libero/libero_pi0_all"
        folder.mkdir(parents=True)
        (folder / "mine").write_text("keep me")
        done = dataset(tmp_path / "p", tmp_path / "w")
        assert done.code == 1 and "was not completed by this tool" in done.err
        assert tree(tmp_path / "w") == {"data/libero/libero_pi0_all/mine": b"keep me"}

    def test_another_run_holds_the_workspace(self, tmp_path: Path) -> None:
        write_parts(tmp_path / "p", PARTS)
        (tmp_path / "w").mkdir()
        with WorkspaceLock(tmp_path / "w"):
            done = dataset(tmp_path / "p", tmp_path / "w")
        assert done.code == 1 and f"another run works in this workspace: process {os.getpid()}" in done.err
        assert list((tmp_path / "w").iterdir()) == []

    def test_a_frame_at_fault_stops_after_extraction(self, tmp_path: Path) -> None:
        files = dict(FILES)
        name = f"{HOME}jsonl/ep_1.jsonl"
        rows = [json.loads(line) for line in files[name].splitlines()]
        rows[2]["action"].pop()
        files[name] = "".join(json.dumps(row) + "\n" for row in rows).encode()
        write_parts(tmp_path / "p", split(honest(files), PART_BYTES))
        done = dataset(tmp_path / "p", tmp_path / "w")
        assert done.code == 1 and "ep_1.jsonl:3" in done.err and len(done.err.splitlines()) == 1
        assert not list((tmp_path / "w").rglob("*.tmp")) and not list((tmp_path / "w/norm_stats").glob("*"))


BIG = {f"{HOME}image/pad/{index:04d}.jpg": random.Random(index).randbytes(40_000) for index in range(600)} | FILES


def kill_and_finish(workspace: Path, *arguments: object, **environment: str) -> None:
    """Start the command again and again, end it by SIGKILL or Ctrl-C, then let it finish; :data:`BIG` comes out."""
    rnd = random.Random(1)
    command = [PREP, "dataset", *arguments, "--workspace", workspace]
    for index in range(6):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        ) as child:
            time.sleep(0.25 + rnd.random() * 0.5)
            child.send_signal(signal.SIGINT if index % 3 == 2 else signal.SIGKILL)
            _, error = child.communicate()
        assert "Traceback" not in error
        if (workspace / "data/libero/libero_pi0_all").exists():
            assert laid_out(workspace) == wanted(BIG)
    last = Run("dataset", *arguments, "--workspace", workspace, **environment)
    assert last.code == 0, last.err
    assert laid_out(workspace) == wanted(BIG)
    assert sorted(path.name for path in (workspace / "data/libero").iterdir()) == ["libero_pi0_all"]
    assert sorted(path.name for path in workspace.iterdir() if path.name[0] != ".") == [
        "data", "index_cache.json", "norm_stats",
    ]  # fmt: skip


def test_killed_at_random_moments(tmp_path: Path) -> None:
    write_parts(tmp_path / "p", split(honest(BIG), 3 << 20))
    kill_and_finish(tmp_path / "w", "--source", "local", "--uri", tmp_path / "p")


class TestSmallDisk:
    """On a filesystem that is too small, made for the test: told before, or stopped cleanly."""

    def on_disk(self, tmp_path: Path, options: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run a command in a namespace where tmp_path/w is a file system of its own; its tree comes back as output."""
        disk = tmp_path / "w"
        disk.mkdir()
        command = " ".join(shlex.quote(str(word)) for word in (PREP, *arguments, "--workspace", disk))
        script = f"mount -t tmpfs -o {options} none {disk} || exit 77; {command}; echo $?; cd {disk} && find . -type f"
        done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120)
        if done.returncode == 77 or "unshare" in done.stderr:
            pytest.skip(f"no private file systems here: {done.stderr.strip()}")
        assert "Traceback" not in done.stderr
        return done

    @pytest.mark.parametrize(
        ("options", "why"), [("size=256k", "no space: "), ("size=80m,nr_inodes=30", "no inodes: 4")]
    )
    def test_told_before_the_start(self, tmp_path: Path, options: str, why: str) -> None:
        write_parts(tmp_path / "p", split(honest({**FILES, f"{HOME}big": bytes(300_000)}), PART_BYTES))
        done = self.on_disk(tmp_path, options, "dataset", "--uri", tmp_path / "p")
        assert done.stdout.split() == ["1"] and why in done.stderr and "are needed" in done.stderr

    @pytest.mark.parametrize(
        ("options", "why"), [("size=66m", "no space left"), ("size=80m,nr_inodes=1100", "no inodes left")]
    )
    def test_full_on_the_way(self, tmp_path: Path, options: str, why: str) -> None:
        """How much is in a compressed archive shows only when it is unpacked."""
        big = {f"{HOME}pad{index}": bytes(6_000_000) for index in range(15)} if "66m" in options else {}
        many = {f"{HOME}{index}": b"" for index in range(1200)} if not big else {}
        write_parts(tmp_path / "p", [gzip.compress(honest({**FILES, **big, **many}))], name="libero.tar.gz")
        done = self.on_disk(tmp_path, options, "dataset", "--uri", tmp_path / "p")
        assert why in done.stderr and len(done.stderr.splitlines()) <= 2, done.stderr
        assert done.stdout.split()[0] == "1" and "./data/libero/libero_pi0_all/" not in done.stdout


@dataclass(frozen=True)
class Remote:
    """A service that holds parts: the folder behind it, and the flags and environment to fetch from it."""

    folder: Path
    arguments: list[str]
    environment: dict[str, str]


class TestRemote:
    """Parts that are fetched: deleted when extracted, kept when asked."""

    @pytest.fixture(params=["hf", "bos"])
    def place(
        self,
        request: pytest.FixtureRequest,
        hub_process: tuple[Service, Path],
        bos_process: tuple[Service, Path],
        quiet_environment: Path,
    ) -> Remote:
        service, root = hub_process if request.param == "hf" else bos_process
        service.order(reset=True, forget=True)
        uri, environment = "owner/name", dict[str, str]()
        if request.param == "bos":
            service.order(keys=KEYS)
            uri = "bos://bucket/p/"
            environment = {"BCE_ACCESS_KEY_ID": SECRETS["access"], "BCE_SECRET_ACCESS_KEY": SECRETS["secret"]}
        folder = root / ("datasets/owner/name" if request.param == "hf" else "bucket/p")
        shutil.rmtree(folder, ignore_errors=True)
        write_parts(folder, PARTS)
        return Remote(folder, ["--source", request.param, "--uri", uri, "--endpoint", service.url], environment)

    @pytest.fixture
    def fetch(self, place: Remote) -> Callable[..., Run]:
        return lambda workspace, *more: Run(
            "dataset", *place.arguments, "--workspace", workspace, *more, **place.environment
        )

    def test_killed_while_parts_arrive(self, tmp_path: Path, place: Remote) -> None:
        write_parts(place.folder, split(honest(BIG), 3 << 20))
        kill_and_finish(tmp_path / "w", *place.arguments, **place.environment)

    def test_parts_are_gone_when_done(self, tmp_path: Path, fetch: Callable[..., Run]) -> None:
        done = fetch(tmp_path / "w")
        assert done.code == 0, done.err
        assert laid_out(tmp_path / "w") == wanted(FILES)
        assert not (tmp_path / "w/parts").exists()
        assert "nothing to do" in fetch(tmp_path / "w").out

    def test_kept_parts_serve_the_pack(self, tmp_path: Path, fetch: Callable[..., Run]) -> None:
        done = fetch(tmp_path / "w", "--keep-parts", "--layout", "pack")
        assert done.code == 0, done.err
        kept = sorted((tmp_path / "w/parts").rglob("libero.tar.part-*"))
        assert [path.read_bytes() for path in kept] == PARTS
        pack = json.loads((tmp_path / "w/data/libero/libero_pi0_all/pack/pack.json").read_text())
        assert pack["blobs"][0]["path"].startswith("../../../../parts/")
        assert "nothing to do" in fetch(tmp_path / "w", "--layout", "pack").out

    @pytest.mark.parametrize("inodes", [4, 5, 6])
    def test_the_disk_of_the_parts_is_named(
        self, tmp_path: Path, place: Remote, inodes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not the other one, which the dataset goes to; also when it is the state of a download that does not fit."""
        for name, value in {**place.environment, "DATA_PATH": str(tmp_path / "d")}.items():
            monkeypatch.setenv(name, value)
        done = TestSmallDisk().on_disk(tmp_path, f"size=80m,nr_inodes={inodes}", "dataset", *place.arguments)
        assert f"{tmp_path}/w/parts" in done.stderr and "no inodes left on the disk" in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1 and done.stdout.split()[0] == "1"

    def test_copied_images_when_parts_are_not_kept(self, tmp_path: Path, fetch: Callable[..., Run]) -> None:
        assert fetch(tmp_path / "w", "--layout", "pack").code == 0
        pack = json.loads((tmp_path / "w/data/libero/libero_pi0_all/pack/pack.json").read_text())
        assert [blob["path"] for blob in pack["blobs"]] == ["images-00000.bin"]
        assert not (tmp_path / "w/parts").exists()


def test_parts_in_the_folder_that_would_be_replaced_are_kept(tmp_path: Path) -> None:
    home = tmp_path / "data/libero/libero_pi0_all"
    write_parts(home, PARTS)
    before = tree(home)
    done = dataset(home, tmp_path, "--force")
    assert done.code == 1 and "Move the parts elsewhere" in done.err
    assert tree(home) == before


@pytest.mark.parametrize("place", ["w", "w/data", "w/data/libero", "w/data/libero/libero_pi0_all"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_in_the_way_is_named(tmp_path: Path, place: str, kind: str) -> None:
    write_parts(tmp_path / "p", PARTS)
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to("nowhere")
    done = dataset(tmp_path / "p", tmp_path / "w/below" if place == "w" else tmp_path / "w")
    what = "a file" if kind == "file" else "a link that leads nowhere"
    fix = "Move it away, or choose another folder with --workspace"
    assert (done.code, done.err) == (1, f"dm05-prep: error: {path}: {what} stands where a folder must be. {fix}\n")
    assert os.path.lexists(path) and not path.is_dir()


def test_resuming_is_said_only_where_it_is_done(tmp_path: Path) -> None:
    target, half = tmp_path / "w/data/libero/libero_pi0_all", ExtractOptions(batch_bytes=0)
    source = write_parts(tmp_path / "p", PARTS)
    write_parts(tmp_path / "other", split(honest(FILES), PART_BYTES - 512))
    assert killed_at(150, lambda: run(source, target, half))
    other = dataset(tmp_path / "other", tmp_path / "w")
    assert (other.code, other.out) == (1, "") and "is of another archive" in other.err
    assert "going on at" in dataset(tmp_path / "p", tmp_path / "w", "--dry-run").out
    anew = dataset(tmp_path / "p", tmp_path / "w", "--force")
    assert anew.code == 0 and "resume" not in anew.out
    shutil.rmtree(target)
    assert killed_at(150, lambda: run(source, target, half))
    assert dataset(tmp_path / "p", tmp_path / "w").out.startswith("resume ")
    assert laid_out(tmp_path / "w") == wanted(FILES)


@pytest.mark.parametrize("index", [0, 2, len(PARTS) - 1])
def test_what_stands_in_place_of_a_part_is_named_whatever_its_size(tmp_path: Path, index: int) -> None:
    write_parts(tmp_path / "p", PARTS)
    part = tmp_path / f"p/libero.tar.part-{index:03d}"
    part.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    done = dataset(tmp_path / "p", tmp_path / "w")
    assert done.code == 1 and f"{part}: a large-file pointer" in done.err and "git lfs pull" in done.err
    part.write_bytes(b"?" * 100)
    done = dataset(tmp_path / "p", tmp_path / "w")
    assert done.code == 1 and part.name in done.err and not (tmp_path / "w").exists()
