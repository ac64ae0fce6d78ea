"""When to try again, and for how long."""

from __future__ import annotations

import email.utils
import threading
import time

import pytest
from dm05_prep.errors import PrepError
from dm05_prep.sources.retry import Backoff, RetryPolicy, Stopped, Trouble, persist, retry_after
from dm05_schemas.errors import UsageError


class Waits(threading.Event):
    """A stop that notes how long it was waited for, and is never set."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        return False


def test_pauses_double_up_to_a_minute_and_are_spread() -> None:
    waits, said = Waits(), list[str]()
    backoff = Backoff(RetryPolicy(tries=10), waits, said.append)
    for _ in range(9):
        backoff.pause(Trouble("no luck"), "place", "mend")
    for seconds, nominal in zip(waits.seconds, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=True):
        assert 0.75 * nominal <= seconds <= 1.25 * nominal
    assert len(set(waits.seconds)) == 9
    assert said and all("place: no luck; try" in line for line in said), "long waits are announced"
    with pytest.raises(PrepError, match=r"place: no luck \(10 tries without progress\). mend"):
        backoff.pause(Trouble("no luck"), "place", "mend")


def test_at_least_eight_tries_by_default() -> None:
    assert RetryPolicy().tries >= 8


def test_progress_starts_the_count_again() -> None:
    backoff = Backoff(RetryPolicy(tries=3), Waits(), lambda line: None)
    for _ in range(20):
        backoff.pause(Trouble("x"), "place", "mend")
        backoff.progressed()


def test_a_stop_ends_a_pause_at_once() -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    started = time.monotonic()
    with pytest.raises(Stopped):
        Backoff(RetryPolicy(), stop, lambda line: None).pause(Trouble("x", 500), "place", "mend")
    assert time.monotonic() - started < 1


def test_what_the_server_asks_for_is_kept_to() -> None:
    waits = Waits()
    Backoff(RetryPolicy(), waits, lambda line: None).pause(Trouble("x", 37.0), "place", "mend")
    assert waits.seconds == [37.0]


@pytest.mark.parametrize(
    "headers, seconds",
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": " 0 "}, 0),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"Retry-After": "3", "RateLimit": '"api";r=0;t=55'}, 3),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "-1"}, None),
        ({}, None),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_retry_after_as_a_date() -> None:
    found = retry_after({"Retry-After": email.utils.formatdate(time.time() + 30, usegmt=True)})
    assert found is not None and 25 < found <= 31


def test_persist_returns_what_comes_in_the_end() -> None:
    answers = iter([Trouble("a"), Trouble("b"), 42])

    def call() -> int:
        answer = next(answers)
        if isinstance(answer, Trouble):
            raise answer
        return answer

    assert persist(call, RetryPolicy(first_pause_s=0), where="place", fix="mend") == 42


@pytest.mark.parametrize("value", ["x", "-1", "nan", "inf"])
def test_settings_must_be_numbers(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DM05_PREP_STALL_S", value)
    with pytest.raises(UsageError, match="DM05_PREP_STALL_S"):
        RetryPolicy.from_environment()
