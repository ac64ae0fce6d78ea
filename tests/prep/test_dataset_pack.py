"""``dm05-prep dataset --layout pack``: a dataset whose images never become files."""

from __future__ import annotations

import gzip
import json
import subprocess
import time
from pathlib import Path

from tars import honest, split, wanted, write_parts
from test_dataset import FILES, PART_BYTES, PARTS, PREP, Run, dataset, laid_out, times


class TestPack:
    """--layout pack keeps images in the parts, or copies them; --layout both has files too."""

    def test_images_stay_in_the_parts(self, tmp_path: Path) -> None:
        write_parts(tmp_path / "p", PARTS)
        done = dataset(tmp_path / "p", tmp_path / "w", "--layout", "pack")
        assert done.code == 0, done.err
        folder = tmp_path / "w/data/libero/libero_pi0_all"
        assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == [
            "index_cache.json",
            "jsonl",
            "pack",
        ]
        blobs = json.loads((folder / "pack/pack.json").read_text())["blobs"]
        assert [Path(blob["path"]).name for blob in blobs][: len(PARTS)] == [
            f"libero.tar.part-{index:03d}" for index in range(len(PARTS))
        ]
        before = times(tmp_path)
        assert "nothing to do" in dataset(tmp_path / "p", tmp_path / "w", "--layout", "pack").out
        assert times(tmp_path) == before
        files = dataset(tmp_path / "p", tmp_path / "w", "--layout", "both")
        assert files.code == 0 and laid_out(tmp_path / "w") == wanted(FILES)

    def test_the_pack_goes_on_after_a_fault(self, tmp_path: Path) -> None:
        """Images that never were files are not lost when a frame names one that is not there."""
        files = {name: data for name, data in FILES.items() if not name.endswith("ep_1/camera_0/000002.jpg")}
        write_parts(tmp_path / "p", split(honest(files), PART_BYTES))
        folder = tmp_path / "w/data/libero/libero_pi0_all"
        for _ in range(2):
            first = dataset(tmp_path / "p", tmp_path / "w", "--layout", "pack")
            assert "ep_1.jsonl:3: the archive holds no ep_1/camera_0/000002.jpg. Correct or remove" in first.err
            assert first.code == 1 and first.err.count("\n") == 1
        (folder / "jsonl/ep_1.jsonl").unlink()
        self.check_goes_on(tmp_path, episodes=2)

    def test_the_pack_goes_on_after_a_kill(self, tmp_path: Path) -> None:
        write_parts(tmp_path / "p", PARTS)
        table = tmp_path / "w/data/libero/libero_pi0_all/.dm05-pack.partial/frames.arrow"
        command = ["dataset", "--source", "local", "--uri", tmp_path / "p", "--workspace", tmp_path / "w"]
        process = subprocess.Popen(
            [str(PREP), *map(str, command), "--layout", "pack"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not table.exists():
            time.sleep(0.0002)
        process.kill()
        process.wait()
        self.check_goes_on(tmp_path, episodes=3)

    def check_goes_on(self, tmp_path: Path, *, episodes: int) -> None:
        """The pack is completed without the source, and knows where it came from."""
        done = Run("dataset", "--layout", "pack", "--workspace", tmp_path / "w")
        assert done.code == 0, done.err
        folder = tmp_path / "w/data/libero/libero_pi0_all"
        assert sorted(path.name for path in (folder / "pack").iterdir()) == ["frames.arrow", "pack.json"]
        info = json.loads((folder / "pack/pack.json").read_text())
        assert len(info["episodes"]) == episodes
        origin = f"--layout pack --force --source local --uri {tmp_path / 'p'} --workspace WORKSPACE"
        assert info["rebuild"].endswith(origin)
        assert not (folder / ".dm05-pack.partial").exists()

    def test_both(self, tmp_path: Path) -> None:
        write_parts(tmp_path / "p", PARTS)
        assert dataset(tmp_path / "p", tmp_path / "w", "--layout", "both").code == 0
        assert laid_out(tmp_path / "w") == wanted(FILES)
        assert (tmp_path / "w/data/libero/libero_pi0_all/pack/pack.json").exists()

    def test_from_a_compressed_archive(self, tmp_path: Path) -> None:
        write_parts(tmp_path / "p", [gzip.compress(honest(FILES))], name="libero.tar.gz")
        assert dataset(tmp_path / "p", tmp_path / "w", "--layout", "pack").code == 0
        folder = tmp_path / "w/data/libero/libero_pi0_all/pack"
        assert [blob["path"] for blob in json.loads((folder / "pack.json").read_text())["blobs"]] == [
            "images-00000.bin"
        ]
