"""The loss curve: rows in, a picture out, and one line for a file that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dm05_train.errors import TrainError
from dm05_train.plot import last_mean, main, plot_curves, read_curve, smoothed
from PIL import Image


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [{"step": step, "loss": 2.0 / step, "lr": 1e-3} for step in range(1, 41)]
    rows[7] = {"step": 8, "loss": None, "skipped": True}
    write_rows(tmp_path / "run" / "metrics.jsonl", rows)
    return tmp_path / "run"


def test_a_curve_leaves_out_skipped_steps(run_folder: Path) -> None:
    curve = read_curve(run_folder)
    assert curve.label == "run"
    assert len(curve.steps) == 39 and 8 not in curve.steps
    assert curve == read_curve(run_folder / "metrics.jsonl")


def test_smoothing_is_the_mean_of_the_neighbours() -> None:
    assert smoothed([4.0, 2.0, 0.0, 6.0], width=2) == [3.0, 2.0, 8 / 3, 3.0]
    assert smoothed([5.0]) == [5.0]


def test_the_end_of_a_curve_is_the_mean_of_its_last_steps(run_folder: Path) -> None:
    curve = read_curve(run_folder)
    assert last_mean(curve) == pytest.approx(sum(2.0 / step for step in range(31, 41)) / 10)


@pytest.mark.parametrize("count", [1, 2])
def test_the_picture_is_a_png(run_folder: Path, tmp_path: Path, count: int) -> None:
    out = plot_curves([read_curve(run_folder)] * count, tmp_path / "deep" / "loss.png")
    with Image.open(out) as image:
        assert image.format == "PNG" and image.size == (960, 540)
        assert len(image.convert("RGB").getcolors(1 << 20)) > 10  # type: ignore[arg-type]
    assert [path.name for path in out.parent.iterdir()] == ["loss.png"]


def test_the_command_says_where_the_picture_is(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_folder), "--out", str(tmp_path / "loss.png")]) == 0
    assert str(tmp_path / "loss.png") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no loss"),
        ('{"step": 1, "loss": 1.0}\nnot json\n', r"metrics.jsonl:2: not a row"),
        ("[]\n", ":1: not a row"),
    ],
)
def test_what_is_no_metrics_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(TrainError, match=message):
        read_curve(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"metrics\.jsonl: no such file"):
        read_curve(tmp_path / "metrics.jsonl")
