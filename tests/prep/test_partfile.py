"""A file on its way: whatever was written and counted is there for the next run, and only that."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources import partfile
from dm05_prep.sources.checks import Checks, Sums
from dm05_prep.sources.partfile import PartFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SPAN = 1000


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partfile, "SPAN_BYTES", SPAN)


def checks_of(data: bytes) -> Checks:
    return Checks(sha256=hashlib.sha256(data).hexdigest())


def opened(folder: Path, data: bytes, **changes: Any) -> PartFile:
    arguments: dict[str, Any] = {"size": len(data), "checks": checks_of(data), "etag": "1", **changes}
    return PartFile(folder / "f", arguments.pop("size"), arguments.pop("checks"), arguments.pop("etag"), **arguments)


def put(part: PartFile, data: bytes, number: int, count: int) -> None:
    """Write the next ``count`` bytes of span ``number``."""
    span = part.spans[number]
    count = min(count, span.left)
    part.write(span, memoryview(data[span.position : span.position + count]))


STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 700), st.booleans()), max_size=40)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(size=st.integers(0, 5400), steps=STEPS, seed=st.integers(0, 255))
def test_any_order_of_writes_with_restarts_between(tmp_path_factory: Any, size: int, steps: Any, seed: int) -> None:
    """Like a process that is killed between any two writes: nothing counted is lost, the sums are right at the end."""
    folder = tmp_path_factory.mktemp("part")
    data = bytes((seed + 7 * index) % 251 for index in range(size))
    part = opened(folder, data)
    sums = Sums(checks_of(data), size)
    for number, count, killed in steps:
        if number < len(part.spans):
            put(part, data, number, count)
        part.sum_up(sums)
        assert part.front == next((span.position for span in part.spans if span.left), size)
        assert sums.position <= part.front
        if killed:
            before = [span.position for span in part.spans]
            part.close()
            state = json.loads((folder / "f.part.json").read_text())
            part, sums = opened(folder, data), Sums(checks_of(data), size)
            assert [span.position for span in part.spans] == before
            assert state["done"] == [span.position - span.first for span in part.spans]
            assert part.received == sum(state["done"])
    for number in range(len(part.spans)):
        put(part, data, number, SPAN)
    while part.sum_up(sums):
        pass
    assert sums.differences() == []
    part.publish(folder / "f", durable=True)
    assert (folder / "f").read_bytes() == data
    assert sorted(path.name for path in folder.iterdir()) == ["f"]


@pytest.mark.parametrize(
    "change",
    [{"size": 2001}, {"etag": "2"}, {"checks": Checks(md5="0" * 32)}, {"checks": Checks()}, {"single": True}],
)
def test_another_version_starts_at_the_first_byte(tmp_path: Path, change: dict[str, Any]) -> None:
    data = bytes(2000)
    part = opened(tmp_path, data)
    put(part, data, 1, 500)
    part.close()
    part = opened(tmp_path, data, **change)
    assert part.received == 0 and (tmp_path / "f.part").stat().st_size == 0
    part.close()


@pytest.mark.parametrize(
    "state",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2}',
        '{"version": 1, "done": "x", "span_bytes": 1000, "single": false}',
        "\0" * 300,
    ],
)
def test_a_state_that_cannot_be_read_starts_at_the_first_byte(tmp_path: Path, state: str) -> None:
    data = bytes(2000)
    (tmp_path / "f.part").write_bytes(b"left behind")
    (tmp_path / "f.part.json").write_text(state)
    part = opened(tmp_path, data)
    assert part.received == 0
    part.close()


@pytest.mark.parametrize("field, value", [("done", [1001, 0]), ("done", [-1, 0]), ("done", [5]), ("span_bytes", 0)])
def test_a_state_that_contradicts_itself_starts_at_the_first_byte(tmp_path: Path, field: str, value: Any) -> None:
    data = bytes(2000)
    part = opened(tmp_path, data)
    put(part, data, 0, 500)
    part.close()
    path = tmp_path / "f.part.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    part = opened(tmp_path, data)
    assert part.received == 0
    part.close()


def test_bytes_that_are_gone_are_not_believed(tmp_path: Path) -> None:
    data = bytes(2000)
    part = opened(tmp_path, data)
    put(part, data, 1, 500)
    part.close()
    (tmp_path / "f.part").write_bytes(b"short")
    part = opened(tmp_path, data)
    assert part.received == 0
    part.close()


@pytest.mark.parametrize("published, kept", [(True, 500), (False, 0)])
def test_after_a_power_failure_only_a_published_sum_vouches(tmp_path: Path, published: bool, kept: int) -> None:
    data = bytes(2000)
    sums = checks_of(data) if published else Checks()
    part = opened(tmp_path, data, checks=sums)
    put(part, data, 1, 500)
    part.close()
    path = tmp_path / "f.part.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    part = opened(tmp_path, data, checks=sums)
    assert part.received == kept
    part.close()


def test_the_state_holds_no_address(tmp_path: Path) -> None:
    part = opened(tmp_path, bytes(2000))
    part.close()
    state = json.loads((tmp_path / "f.part.json").read_text())
    assert set(state) == {"version", "identity", "boot", "span_bytes", "single", "done"}
    assert set(state["identity"]) == {"size", "etag", "sha256"}


def test_a_part_cut_short_by_someone_is_noticed(tmp_path: Path) -> None:
    data = bytes(2000)
    part = opened(tmp_path, data)
    put(part, data, 0, 800)
    (tmp_path / "f.part").write_bytes(b"")
    with pytest.raises(PrepError, match="cut short by someone else"):
        part.sum_up(Sums(checks_of(data), 2000))
    part.close()


def test_an_abandoned_part_can_be_opened_again(tmp_path: Path) -> None:
    """A thread that hangs may hold its number; the lock is free all the same."""
    data = bytes(2000)
    part = opened(tmp_path, data)
    put(part, data, 0, 800)
    part.abandon()
    again = opened(tmp_path, data)
    assert again.received == 800
    again.close()
