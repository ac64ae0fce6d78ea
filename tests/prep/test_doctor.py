"""dm05-prep doctor: what works from here, and what to do about what does not."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.cli import dispatch
from dm05_prep.demo.checkpoint import write_checkpoint
from dm05_schemas.errors import UsageError
from fake_secrets import KEYS, SECRETS
from process import Service

pytestmark = pytest.mark.usefixtures("quiet_environment")


@pytest.fixture
def world(
    bos_process: tuple[Service, Path], hub_process: tuple[Service, Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[Service, Service]:
    """Both services with the released names, keys and token in the environment."""
    (bos, bos_root), (hub, hub_root) = bos_process, hub_process
    folders = [bos_root / "aihc-rdw-bj/huggingface.co/datasets/Dexmal/libero", hub_root / "datasets/Dexmal/libero"]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "libero.tar.part-000").write_bytes(bytes(5000))
    for folder in (bos_root / "aihc-models-bj/Dexmal/DM05", hub_root / "models/Dexmal/DM05"):
        if not folder.exists():
            folder.mkdir(parents=True)
            write_checkpoint(folder, 0)
    for service in (bos, hub):
        service.order(reset=True, forget=True)
    bos.order(keys=KEYS)
    hub.order(token=SECRETS["hub"])
    monkeypatch.setenv("BCE_ACCESS_KEY_ID", SECRETS["access"])
    monkeypatch.setenv("BCE_SECRET_ACCESS_KEY", SECRETS["secret"])
    monkeypatch.setenv("HF_TOKEN", SECRETS["hub"])
    monkeypatch.setenv("BOS_ENDPOINT", bos.url)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    return bos, hub


def doctor(*words: Any) -> tuple[int | None, str]:
    """Exit code and lines; never a secret in them."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = dispatch(["doctor", *map(str, words)])
    assert not any(secret in out.getvalue() for secret in SECRETS.values())
    return code, out.getvalue()


def line(text: str, subject: str) -> str:
    (found,) = [line for line in text.splitlines() if line[6:].startswith(f"{subject} ")]
    return found


def test_all_is_well(world: Any, tmp_path: Path) -> None:
    code, text = doctor("--workspace", tmp_path)
    assert code == 0
    for subject in ("bos dataset", "bos model", "hf dataset", "hf model", "clock", "BOS keys", "hub settings", "proxy"):
        assert line(text, subject).startswith("ok"), text
    assert "bytes come from localhost" in line(text, "hf model"), "the storage host was asked for a byte"
    place = f"--workspace {tmp_path}"
    for kind in ("dataset", "model"):
        words = f"dm05-prep {kind} --source bos {place} | dm05-prep {kind} --source hf {place}"
        assert words in line(text, kind)
    assert "from $BCE_ACCESS_KEY_ID" in line(text, "BOS keys") and "token from $HF_TOKEN" in line(text, "hub settings")
    assert [path.name for path in tmp_path.iterdir()] == ["home"], "it writes nothing"


def test_nothing_but_a_byte_is_fetched(world: tuple[Service, Service], tmp_path: Path) -> None:
    doctor("--workspace", tmp_path)
    for service in world:
        assert service.sent("libero.tar") + service.sent("model.safetensors") == 2


def test_one_source_is_enough(world: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_someone_else")
    code, text = doctor()
    assert code == 0
    assert line(text, "hf dataset").startswith("fail") and "HF_TOKEN" in line(text, "hf dataset")
    assert line(text, "dataset").endswith("dm05-prep dataset --source bos")


def test_nothing_works(world: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    bos, hub = world
    bos.order(clock_offset_s=-5000)
    hub.order(gated=True)
    code, text = doctor()
    assert code == 1
    assert "clock" in line(text, "bos dataset") and "83 minutes ahead" in line(text, "bos dataset")
    assert "gated" in line(text, "hf model")
    assert text.count("cannot be fetched from here") == 2


def test_a_wrong_clock(world: tuple[Service, Service]) -> None:
    world[0].order(clock_offset_s=-5000)
    _, text = doctor("--only", "bos")
    assert line(text, "clock").startswith("fail") and "ahead of the servers" in line(text, "clock")


def test_the_storage_host_is_out_of_reach(world: tuple[Service, Service]) -> None:
    world[1].order(faults=[{"kind": "reset", "match": "/cdn/", "times": -1}])
    code, text = doctor("--only", "hf")
    assert code == 1
    assert "localhost" in line(text, "hf dataset") and line(text, "hf dataset").startswith("fail")


def test_proxies_are_shown_without_password(monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:pass-word@proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    _, text = doctor()
    assert line(text, "https proxy") == "ok    https proxy    proxy.example:3128 with user and password"
    assert "127.0.0.1,localhost" in line(text, "no proxy for") and "pass-word" not in text
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:1")
    assert "cannot be used" in line(doctor()[1], "https proxy")


def test_half_a_key_pair(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCE_SECRET_ACCESS_KEY")
    code, text = doctor()
    assert code == 0 and "half of the key pair is missing" in line(text, "BOS keys")
    assert line(text, "bos model").startswith("fail")


def test_quiet_says_failures_alone(world: tuple[Service, Service], monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor("--quiet") == (0, "")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    code, text = doctor("--quiet", "--only", "hf")
    assert code == 1 and {line.split()[0] for line in text.splitlines()} == {"fail", "none"}


def test_wrong_words() -> None:
    with pytest.raises(UsageError, match="--only bos or --only hf"):
        doctor("--endpoint", "http://127.0.0.1:9")


def test_settings_that_cannot_be_read(world: Any, monkeypatch: pytest.MonkeyPatch, quiet_environment: Path) -> None:
    monkeypatch.delenv("BCE_ACCESS_KEY_ID")
    monkeypatch.delenv("BCE_SECRET_ACCESS_KEY")
    (quiet_environment / ".go-bcecli" / "credentials").mkdir(parents=True)
    code, text = doctor()
    assert code == 0
    assert "cannot be read: Is a directory" in line(text, "BOS keys")
    assert line(text, "bos model").startswith("fail") and line(text, "hf model").startswith("ok")
