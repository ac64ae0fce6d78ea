"""Helper processes: what they load, and that their answers and errors arrive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dm05_prep
import pytest
from dm05_prep.child import Child
from dm05_prep.errors import PrepError


@pytest.mark.parametrize("module", ["copier", "hasher"])
def test_helpers_load_nothing_that_makes_starting_slow(module: str) -> None:
    text = f"import sys; sys.path.append(sys.argv[1]); import dm05_prep.{module}; print(*sys.modules)"
    (root,) = [str(Path(folder).parent) for folder in dm05_prep.__path__]
    shown = subprocess.run([sys.executable, "-I", "-S", "-c", text, root], capture_output=True, text=True, check=True)
    loaded = set(shown.stdout.split())
    ours = {name for name in loaded if name.startswith("dm05")}
    assert ours == {"dm05_prep", "dm05_prep.pipe", f"dm05_prep.{module}"}
    assert not {"typing", "collections.abc", "re", "dataclasses", "pathlib", "subprocess"} & loaded


def test_answers_come_in_order_and_the_first_error_is_the_last(tmp_path: Path) -> None:
    path, gone = tmp_path / "a", tmp_path / "gone"
    path.write_bytes(b"123456789")
    child = Child("computes checksums", "hasher")
    try:
        told: list[int] = []
        for task in (("crc32", str(path)), ("md5", str(path)), ("crc32", str(gone)), ("crc32", str(path))):
            child.send(*task)
        assert child.answer(told.append) == "cbf43926" and told == [9]
        assert child.answer() == "25f9e794323b453885f5181f1b624d0b"
        with pytest.raises(FileNotFoundError) as caught:
            child.answer()
        assert caught.value.filename == str(gone)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child.send("crc32", str(path))
        with pytest.raises(PrepError, match=r"computes checksums .* has ended, 0"):
            child.answer()
    finally:
        child.close()
