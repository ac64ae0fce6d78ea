"""The HTML report: it parses, needs nothing beside it, and says what the data say; also on odd data."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from dm05_prep.index import build_index
from dm05_prep.norm_stats import compute
from dm05_prep.pack import build_pack
from dm05_prep.report import ReportCommand, charts, write_report
from dm05_prep.report.dims import measure
from dm05_prep.report.facts import Facts, gather
from dm05_prep.report.markup import prompt, text
from dm05_prep.report.outliers import find_outliers
from dm05_prep.validate import validate
from dm05_schemas.errors import DataError, UsageError
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.workspace import Workspace
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from workspaces import make_frame, make_spec, random_episodes, write_lines, write_vectors

VOID = {"meta", "img", "br", "link", "hr", "input"}
NASTY = "放进<b>篮子</b> & \"quoted\" </style><script>alert('x')</script>"


class Page(HTMLParser):
    """Checks that elements nest, and collects ids, links, sources, texts and picture sizes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def visible(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(path: Path) -> Page:
    """The page in ``path``, found to stand alone."""
    source = path.read_text("utf-8")
    page = Page(source)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "use", "image"}
    for _, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "srcset", "data", "poster", "action", "xlink:href"):
                assert (value or "").startswith("data:image/jpeg;base64,")
            if name == "href":
                assert (value or "").startswith("#")
            assert not name.startswith("on")
    style = source[source.index("<style>") : source.index("</style>")]
    assert "url(" not in style and "@import" not in style and "http" not in style
    anchors = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {a["href"] for tag, a in page.elements if tag == "a"} == {f"#{anchor}" for anchor in anchors}
    return page


def pictures(page: Page) -> list[Image.Image]:
    """Every picture of a page, decoded."""
    found = [a["src"] or "" for tag, a in page.elements if tag == "img"]
    return [Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) for source in found]


def write_images(
    workspace: Workspace, spec: DatasetSpec, lengths: Sequence[int], size: tuple[int, int] = (64, 48)
) -> None:
    for number, length in enumerate(lengths):
        for camera in (0, 1):
            folder = spec.images(workspace) / f"episode_{number:03d}" / f"camera_{camera}"
            folder.mkdir(parents=True)
            for t in range(length):
                Image.new("RGB", (64, 48), (40 * number % 256, 5 * t % 256, 90 * camera)).save(folder / f"{t:06d}.jpg")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_page_of_a_good_dataset(workspace: Workspace) -> None:
    """Everything is there, the numbers are those of the data, and nothing is warned about."""
    spec = make_spec()
    lengths = [12, 15, 20, 31, 9]
    write_vectors(workspace, spec, random_episodes(0, lengths, spec))
    write_images(workspace, spec, lengths)
    build_index(workspace, spec)
    stats = compute(workspace, spec, 10, "absolute").stats
    out = workspace.root / "deep" / "er" / "report.html"
    result = write_report(workspace, spec, out, strips=3)
    assert (result.checks.episodes, result.checks.frames, result.checks.findings) == (5, 87, ())
    page = read(out)
    for words in (
        "5 episodes 87 frames 82 samples 1 task 2 cameras",
        "nothing to warn about",
        "1 prompt in 5 episodes",
        "median 15",
        "From 9 frames (episode_004.jsonl) to 31 (episode_003.jsonl), 17.4 on average",
        "174 pictures named: Head, Wrist",
        "current: 87 frames",
        "absolute, chunk size 10, 82 samples",
        f"q01 {charts.number(stats.state.q01[0], 3)}",
        "those that training clips to (norm stats, chunk size 10)",
    ):
        assert words in page.visible, words
    # Three strips of two cameras (12, 12 and 9 frames), five tiles and a thumbnail, no more than the strip size.
    shown = pictures(page)
    assert all(max(picture.size) <= 128 and picture.size[0] * 48 == picture.size[1] * 64 for picture in shown)
    assert len([a for tag, a in page.elements if a.get("class") == "reel"]) >= 6
    assert out.stat().st_size < 400_000


def test_numbers_agree_with_numpy(workspace: Workspace) -> None:
    spec = make_spec()
    episodes = random_episodes(3, [11, 17, 23], spec)
    write_vectors(workspace, spec, episodes)
    facts = gather(workspace, spec)
    state = np.concatenate([s for s, _ in episodes]).astype(np.float32)
    action = np.concatenate([a for _, a in episodes if a is not None]).astype(np.float32)
    assert np.array_equal(facts.state, state) and np.array_equal(facts.action, action)
    vectors = measure(facts, spec, None)
    for dims, rows in ((vectors.state, state), (vectors.action, action)):
        for dim in dims:
            column = rows[:, dim.number].astype(np.float64)
            assert [dim.low, dim.high] == pytest.approx(np.quantile(column, (0.01, 0.99)))
            assert (dim.mean, dim.std) == pytest.approx((column.mean(), column.std()))
            first = [s[0, dim.number] for s in (np.split(rows, [11, 28]))]
            assert dim.course[1][0] == pytest.approx(np.median(first))


def test_prompts_are_text(workspace: Workspace) -> None:
    """Markup in a prompt stays text; Chinese is marked as such; each prompt is counted."""
    spec = make_spec()
    rng = np.random.default_rng(0)
    prompts = [NASTY, "put it down", "put it down", " "]
    for number, words in enumerate(prompts):
        frames = [make_frame("e", t, rng.normal(size=4), rng.normal(size=3), prompt=words) for t in range(5)]
        frames[-1]["prompt"] = "and rest"
        write_lines(spec.jsonl(workspace) / f"e{number}.jsonl", frames)
    out = workspace.root / "r.html"
    write_report(workspace, spec, out)
    page = read(out)
    assert " ".join(NASTY.split()) in page.visible
    assert "(empty prompt)" in page.visible
    assert "4 prompts in 4 episodes ; 4 episodes with more than one" in page.visible.replace("episodes;", "episodes ;")
    assert "2 episodes · 8 frames" in page.visible and "0 episodes · 4 frames" in page.visible
    assert next(a["lang"] for tag, a in page.elements if tag == "span" and "lang" in a) == "zh-Hans"


def test_a_prompt_for_every_episode(workspace: Workspace) -> None:
    """Rare prompts are folded, the rest of very many counted, and long ones cut."""
    spec = make_spec()
    for number in range(430):
        frames = [
            make_frame("e", t, [0.1 * t] * 4, [0.1] * 3, prompt=f"prompt {number} " + "x" * number) for t in (0, 1)
        ]
        write_lines(spec.jsonl(workspace) / f"e{number:03d}.jsonl", frames)
    write_report(workspace, spec, workspace.root / "r.html", strips=0)
    page = read(workspace.root / "r.html")
    assert "400 more" in page.visible and "and 6 rarer prompts" in page.visible
    assert "x" * 289 + " …" in page.visible and "x" * 290 not in page.visible
    assert "What the cameras saw" not in page.visible


def test_one_episode_without_actions_or_images(workspace: Workspace) -> None:
    spec = make_spec(action_dim=4)
    write_vectors(workspace, spec, random_episodes(1, [2], spec, with_action=False))
    out = workspace.root / "r.html"
    checks = write_report(workspace, spec, out).checks
    page = read(out)
    assert "1 episode 2 frames 1 sample" in page.visible
    assert "training takes the following states as targets" in page.visible
    assert "No episode stands out" in page.visible
    assert pictures(page) == [] and "missing" in page.visible
    assert {item.kind for item in checks.findings} == {"no-images", "image-missing", "index-missing", "stats-missing"}


def test_broken_pictures_and_odd_ones(workspace: Workspace) -> None:
    """Files that are no picture, one that is gone, a grey one and one of another shape: tiles, and validate's words."""
    spec = make_spec()
    write_vectors(workspace, spec, random_episodes(1, [5], spec))
    write_images(workspace, spec, [5])
    folder = spec.images(workspace) / "episode_000" / "camera_0"
    whole = (folder / "000000.jpg").read_bytes()
    for number, data in enumerate((b"<html>not found</html>", b"", whole[:-40])):
        (folder / f"{number:06d}.jpg").write_bytes(data)
    (folder / "000003.jpg").unlink()
    Image.new("L", (30, 90)).save(folder / "000004.jpg")
    checks = write_report(workspace, spec, workspace.root / "r.html").checks
    found = {item for item in checks.findings if item.kind.startswith("image-")}
    assert {item.kind for item in found} == {"image-foreign", "image-empty", "image-truncated", "image-missing"}
    assert found < set(validate(workspace, spec, deep=True).findings)
    page = read(workspace.root / "r.html")
    assert "unreadable" in page.visible and "missing" in page.visible and len(pictures(page)) > 4


@pytest.mark.parametrize("decoder", [True, False])
def test_videos_are_judged_as_validate_does(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, decoder: bool
) -> None:
    spec = make_spec()
    view = {"type": "video", "url": "./noise.mp4"}
    views = {"images_1": view, "images_2": view | {"url": "./gone.mp4"}}
    write_lines(
        spec.jsonl(workspace) / "a.jsonl",
        [
            make_frame("a", n, [0.0] * 4, [0.0] * 3, **{key: view | {"frame_idx": n} for key, view in views.items()})
            for n in range(3)
        ],
    )
    spec.images(workspace).mkdir()
    (spec.images(workspace) / "noise.mp4").write_bytes(b"no video" * 99)
    if decoder:
        pytest.importorskip("av")
    else:
        monkeypatch.setitem(sys.modules, "av", None)
    due = {("image-missing", "error"), ("video-broken", "error") if decoder else ("video-unchecked", "warning")}
    for report in (
        write_report(workspace, spec, workspace.root / "r.html").checks,
        validate(workspace, spec, deep=True),
    ):
        found = [(item.kind, item.severity) for item in report.findings if item.kind.startswith(("image", "video"))]
        assert sorted(found) == sorted(due)


def test_refused_episodes_are_named(workspace: Workspace) -> None:
    """What the loader refuses is left out of the numbers and listed; a page is written even when nothing is left."""
    spec = make_spec()
    write_vectors(workspace, spec, random_episodes(1, [6, 7], spec))
    bad = spec.jsonl(workspace) / "bad.jsonl"
    bad.write_text(json.dumps(make_frame("bad", 0, [1, 2, 3], [1, 2, 3])) + "\nnot json\n", encoding="utf-8")
    out = workspace.root / "r.html"
    checks = write_report(workspace, spec, out).checks
    assert (checks.episodes, checks.frames) == (2, 13)
    page = read(out)
    assert "1 more that the loader refuses" in page.visible
    assert "Wrong number of dims data/toy/jsonl/bad.jsonl:1" in page.visible
    assert "Line that is not JSON data/toy/jsonl/bad.jsonl:2" in page.visible
    for path in spec.jsonl(workspace).glob("episode_*"):
        path.unlink()
    assert write_report(workspace, spec, out).checks.frames == 0
    assert "0 episodes 0 frames" in read(out).visible


def test_no_episodes_is_an_error(workspace: Workspace) -> None:
    spec = make_spec()
    with pytest.raises(DataError, match="no such folder"):
        write_report(workspace, spec, workspace.root / "r.html")
    spec.jsonl(workspace).mkdir(parents=True)
    with pytest.raises(DataError, match=r"has no \.jsonl files"):
        write_report(workspace, spec, workspace.root / "r.html")
    assert not (workspace.root / "r.html").exists()


def test_values_that_stand_still(workspace: Workspace) -> None:
    """Constant dims, in cards and warnings; mixed episodes with and without actions."""
    spec = make_spec(action_dim=4)
    states = np.zeros((30, 4))
    states[:, 1] = np.linspace(-1e-7, 1e-7, 30)
    write_vectors(workspace, spec, [(states, None), (states + 1, np.full((30, 4), 0.5))])
    facts = gather(workspace, spec)
    assert facts.has_action == 1
    write_report(workspace, spec, workspace.root / "r.html")
    page = read(workspace.root / "r.html")
    assert "Near-constant dim" in page.visible and "action 0: always 0.5" in page.visible


def outliers(workspace: Workspace, spec: DatasetSpec) -> dict[str, tuple[str, ...]]:
    facts: Facts = gather(workspace, spec)
    vectors = measure(facts, spec, None)
    low, high = (np.array([getattr(dim, end) for dim in vectors.state]) for end in ("low", "high"))
    return {outlier.episode.name: outlier.reasons for outlier in find_outliers(facts, low, high)}


def test_outliers_are_those_planted(workspace: Workspace) -> None:
    spec = make_spec()
    rng = np.random.default_rng(5)

    def walk(length: int) -> tuple[np.ndarray, np.ndarray]:
        phase = rng.uniform(0, 6.3, 4)
        return np.sin(np.linspace(0, 6, length)[:, None] + phase), rng.normal(size=(length, 3))

    episodes = [walk(int(n)) for n in rng.integers(90, 111, 40)]
    episodes[3] = walk(400)
    episodes[7][0][80:, 2] += 9.0
    episodes[11][0][10:] = episodes[11][0][10]
    write_vectors(workspace, spec, episodes)
    twin = spec.jsonl(workspace) / "episode_020.jsonl"
    (spec.jsonl(workspace) / "twin.jsonl").write_bytes(twin.read_bytes())
    found = outliers(workspace, spec)
    assert set(found) == {"episode_003.jsonl", "episode_007.jsonl", "episode_011.jsonl", "twin.jsonl"}
    assert re.fullmatch(r"400 frames long, [34]\.\d times the median", found["episode_003.jsonl"][0])
    assert any("state 2 jumps" in reason for reason in found["episode_007.jsonl"])
    assert any("state 2 leaves its usual range" in reason for reason in found["episode_007.jsonl"])
    assert "nothing moves in" in found["episode_011.jsonl"][0]
    assert found["twin.jsonl"] == ("the same bytes as episode_020.jsonl",)


def test_command_writes_where_it_says(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    libero = make_spec(
        "libero_pi0_all", state_desc=("joint",) * 8, action_dim=7, folder=Path("data/libero/libero_pi0_all")
    )
    write_vectors(workspace, libero, random_episodes(0, [4, 5], libero))
    ReportCommand(workspace=workspace.root).run()
    out = workspace.root / "reports" / "libero_pi0_all.html"
    line = capsys.readouterr().out.strip()
    assert line.startswith("report     2 episodes, 9 frames, ") and line.endswith(str(out))
    read(out)
    ReportCommand(workspace=workspace.root, out=workspace.root / "x.html", quiet=True).run()
    assert capsys.readouterr().out == "" and (workspace.root / "x.html").is_file()


def test_any_jobs_give_the_same_page(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    write_vectors(workspace, spec, random_episodes(9, [20] * 6, spec))
    monkeypatch.setattr("dm05_prep.report.facts.PARALLEL_BYTES", 0)
    monkeypatch.setattr("dm05_prep.report.facts.BATCH_BYTES", 1)
    alone, three = (gather(workspace, spec, jobs=jobs) for jobs in (1, 3))
    assert alone.episodes == three.episodes and alone.tasks == three.tasks
    assert np.array_equal(alone.state, three.state) and np.array_equal(alone.action, three.action)


@given(st.floats(-1e300, 1e300) | st.sampled_from([float("nan"), float("inf"), -float("inf")]), st.integers(2, 6))
def test_number_keeps_the_value(value: float, digits: int) -> None:
    shown = charts.number(value, digits)
    if not np.isfinite(value):
        assert shown == "–"
        return
    back = float(shown.replace("−", "-").replace(",", ""))
    assert back == pytest.approx(value, rel=0.06 if "e" in shown else 0.5 * 10 ** (1 - digits) * 1.01)


@given(st.lists(st.integers(2, 100_000), min_size=1, max_size=200))
def test_length_histogram_counts_every_episode(lengths: list[int]) -> None:
    drawn = charts.length_histogram(np.array(lengths))
    assert sum(int(n.replace(",", "")) for n in re.findall(r"frames: ([\d,]+) episodes", drawn)) == len(lengths)


@given(st.text())
def test_text_survives_escaping(value: str) -> None:
    page = Page(f"<p title='{text(value)}'>{prompt(value)}</p>")
    if value.strip() and value.isprintable():
        assert "".join(page.words) == value
        assert page.elements[0][1]["title"] == value


@pytest.mark.parametrize("total", [1, 2, 7, 40])
def test_colours_differ(total: int) -> None:
    colours = [charts.colour(i, total) for i in range(total)]
    assert len(set(colours)) == total and all(re.fullmatch("#[0-9a-f]{6}", c) for c in colours)


def test_flags_that_cannot_be(workspace: Workspace, tmp_path: Path) -> None:
    for command, message in (
        (ReportCommand(workspace=workspace.root, strips=-1), "--strips must be 0 or more, not -1"),
        (ReportCommand(workspace=workspace.root, jobs=0), "--jobs must be 1 or more, not 0"),
        (
            ReportCommand(workspace=workspace.root, out=tmp_path),
            f"{tmp_path}: is a folder. Give --out the name of a file",
        ),
    ):
        with pytest.raises(UsageError) as caught:
            command.run()
        assert str(caught.value) == message


@pytest.mark.parametrize("damaged", [False, True])
def test_pictures_come_from_the_pack_where_there_is_no_image_folder(workspace: Workspace, damaged: bool) -> None:
    spec = make_spec()
    lengths = [12, 15]
    write_vectors(workspace, spec, random_episodes(0, lengths, spec))
    write_images(workspace, spec, lengths)
    build_index(workspace, spec)
    compute(workspace, spec, 10, "absolute")
    write_report(workspace, spec, workspace.root / "files.html")
    pack = build_pack(workspace, spec).folder
    shutil.rmtree(spec.images(workspace))
    if damaged:
        (pack / "images-00000.bin").unlink()
    result = write_report(workspace, spec, workspace.root / "packed.html")
    shown = [picture.tobytes() for picture in pictures(read(result.path))]
    if damaged:
        assert [found.kind for found in result.checks.findings] == ["pack-broken"] and not shown
    else:
        assert result.checks.findings == ()
        assert shown == [picture.tobytes() for picture in pictures(read(workspace.root / "files.html"))]
