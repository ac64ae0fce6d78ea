"""The parts of the page, each from plain numbers to HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from dm05_schemas.findings import KINDS
from dm05_schemas.registry import DatasetSpec
from dm05_schemas.report import Report
from dm05_schemas.sample import normalise

from dm05_prep.report import charts
from dm05_prep.report.charts import number
from dm05_prep.report.dims import Dim, Vectors
from dm05_prep.report.facts import EpisodeFacts, Facts
from dm05_prep.report.layout import Entry
from dm05_prep.report.markup import picture, plural, prompt, text
from dm05_prep.report.outliers import Outlier
from dm05_prep.report.pictures import Picture, Strip

TASKS_SHOWN, TASKS_FOLDED = 24, 400
OUTLIERS_SHOWN = 10
PLACES_SHOWN = 4
TRACED = 8


def task_colours(facts: Facts) -> list[str]:
    """A colour for every task, the most frequent ones first in line for the most distinct."""
    order = sorted(range(len(facts.tasks)), key=lambda i: (-facts.tasks[i].episodes, i))
    rank = {task: place for place, task in enumerate(order)}
    return [charts.colour(rank[i], len(order)) for i in range(len(order))]


def section(anchor: str, title: str, lead: str, body: str) -> str:
    """A headed part of the page; ``lead`` is HTML."""
    return f'<section id="{anchor}"><h2>{text(title)}</h2><p class="lead">{lead}</p>{body}</section>'


def layout(entries: Sequence[Entry], spec: DatasetSpec, root: str) -> str:
    """Two cards: where everything lies and how it does, and what the registry says of the dataset."""
    lines = []
    for entry in entries:
        dot = "" if entry.mood == "plain" else f'<i class="dot {entry.mood}"></i>'
        lines.append(
            f'<li><span class="path">{text(entry.path)}</span>'
            f'<span class="state">{dot}<span>{text(entry.text)}</span></span></li>'
        )
    words = [f"{word} × {spec.state_desc.count(word)}" for word in dict.fromkeys(spec.state_desc)]
    facts = {
        "robot": spec.robot_type or "not named",
        "control mode": spec.control_mode or "not named",
        "cameras": ", ".join(
            f"{label} ({key})" for key, label in zip(spec.image_keys, spec.image_prompts, strict=True)
        ),
        "state": f"{spec.state_dim} dims: {', '.join(words)}",
        "action": f"{spec.action_dim} dims, {spec.action_mode}",
        "state in the prompt": "yes" if spec.state_in_prompt else "no",
    }
    rows = "".join(
        f'<li><span class="soft">{key}</span><span>{text(value)}</span></li>' for key, value in facts.items()
    )
    body = (
        f'<div class="facts"><div class="card"><ul class="tree">{"".join(lines)}</ul></div>'
        f'<div class="card"><ul class="tree">{rows}</ul></div></div>'
    )
    return section("layout", "Layout", f'<span class="path">{text(root)}</span>', body)


def episodes(facts: Facts, colours: Sequence[str]) -> str:
    """The histogram of lengths, and every episode as a bar."""
    lengths = facts.lengths
    shortest, longest = (facts.episodes[int(pick)] for pick in (lengths.argmin(), lengths.argmax()))
    lead = (
        f"From {number(shortest.frames)} frames ({text(shortest.name)}) to {number(longest.frames)} "
        f"({text(longest.name)}), {number(float(lengths.mean().round(1)))} on average."
    )
    order = sorted(facts.episodes, key=lambda e: (-facts.tasks[e.task].episodes, e.task, -e.frames))
    ribbon = charts.ribbon(np.array([e.frames for e in order]), [colours[e.task] for e in order])
    body = (
        f'<div class="split"><div class="card"><h3>How long they are</h3>{charts.length_histogram(lengths)}</div>'
        f'<div class="card"><h3>All of them, task by task</h3>{ribbon}'
        '<p class="small faint">A bar an episode, a colour a task (those of the cards below); frequent tasks first.</p>'
        "</div></div>"
    )
    return section("episodes", "Episodes", lead, body)


def tasks(facts: Facts, colours: Sequence[str], thumbs: Mapping[int, Picture]) -> str:
    """Every prompt with the episodes it leads in, most frequent first."""
    order = sorted(range(len(facts.tasks)), key=lambda i: (-facts.tasks[i].episodes, -facts.tasks[i].frames, i))
    most = max(task.episodes for task in facts.tasks) or 1
    cards = []
    for i in order:
        task = facts.tasks[i]
        thumb = picture(thumbs[i], f"first frame, {task.text}") if i in thumbs else '<div class="hole"></div>'
        cards.append(
            f'<div class="task" style="--task:{colours[i]}">{thumb}<div><p>{prompt(task.text)}</p>'
            f'<div class="meter"><i style="width:{100 * task.episodes / most:.1f}%"></i></div>'
            f'<span class="small soft">{plural(task.episodes, "episode")} · {plural(task.frames, "frame")}</span>'
            "</div></div>"
        )
    body = f'<div class="tasks">{"".join(cards[:TASKS_SHOWN])}</div>'
    if rest := cards[TASKS_SHOWN : TASKS_SHOWN + TASKS_FOLDED]:
        body += f'<details><summary>{len(rest)} more</summary><div class="tasks">{"".join(rest)}</div></details>'
    if (left := len(cards) - TASKS_SHOWN - TASKS_FOLDED) > 0:
        body += f'<p class="small soft">and {plural(left, "rarer prompt")}</p>'
    several = sum(episode.prompts > 1 for episode in facts.episodes)
    lead = f"{plural(len(facts.tasks), 'prompt')} in {plural(len(facts.episodes), 'episode')}"
    lead += f"; {plural(several, 'episode')} with more than one." if several else "."
    return section("tasks", "Tasks", lead, f'<div class="card">{body}</div>')


def strips(items: Sequence[Strip], facts: Facts, spec: DatasetSpec, vectors: Vectors, colours: Sequence[str]) -> str:
    """Some episodes as film: pictures of each camera over time, and what was commanded meanwhile."""
    dims = vectors.action or vectors.state
    shades = [charts.colour(i, min(TRACED, len(dims)), 0.7) for i in range(min(TRACED, len(dims)))]
    legend = "".join(
        f'<span><i class="key" style="--task:{shade}"></i>{dim.key} {dim.number}</span>'
        for shade, dim in zip(shades, dims, strict=False)
    )
    cards = []
    for strip in items:
        episode = strip.episode
        task = facts.tasks[episode.task]
        rows = "".join(
            f'<div class="label">{text(label)}</div><div class="reel">'
            + "".join(picture(item, f"{label}, frame {item.frame}") for item in row)
            + "</div>"
            for label, row in zip(spec.image_prompts, strip.rows, strict=False)
        )
        rows += (
            f'<div class="label">{dims[0].key}, normalised</div>'
            f"<div>{charts.traces(_normalised(facts, episode, dims[:TRACED]), shades, len(strip.frames))}"
            f'<div class="legend">{legend}</div></div>'
        )
        cards.append(
            f'<article class="card strip" style="--task:{colours[episode.task]}"><header>'
            f'<p><i class="key"></i> {prompt(task.text)}</p><span class="small faint">{text(episode.name)} · '
            f'{plural(episode.frames, "frame")}</span></header><div class="film">{rows}</div></article>'
        )
    lead = f"{plural(len(items), 'episode')} of typical length, from the first frame to the last."
    return section("strips", "What the cameras saw", lead, "".join(cards))


def _normalised(
    facts: Facts, episode: EpisodeFacts, dims: Sequence[Dim]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """[n, D] values of an episode as the model sees them (in frames that hold none: 0)."""
    rows = (facts.action if dims[0].key == "action" else facts.state)[episode.rows, : len(dims)]
    scaled = normalise(rows, [dim.low for dim in dims], [dim.high for dim in dims])
    return np.nan_to_num(scaled.astype(np.float64))


def vectors(found: Vectors) -> str:
    """A card for every dimension of state and action."""
    lead = (
        "Each card: all values (heights are square roots of counts; beyond q01 and q99 in orange), and below it the "
        "usual course from the first to the last frame (median, and the band of 10 to 90 % of the episodes). "
        f"q01 and q99 are those {text(found.source)}."
    )
    body = f'<h3 class="vector">State</h3><div class="dims">{"".join(map(_dim, found.state))}</div>'
    if found.action:
        body += f'<h3 class="vector">Action</h3><div class="dims">{"".join(map(_dim, found.action))}</div>'
    else:
        body += '<p class="soft">The frames hold no actions: training takes the following states as targets.</p>'
    return section("vectors", "State and action", lead, body)


def _dim(dim: Dim) -> str:
    figures = {"q01": dim.low, "mean": dim.mean, "std": dim.std, "q99": dim.high}
    terms = "".join(f"<dt>{name}</dt><dd>{number(value, 3)}</dd>" for name, value in figures.items())
    odd = f'<p class="oddity">{text(dim.oddity)}</p>' if dim.oddity else ""
    return (
        f'<div class="card dim"><header><h3>{dim.key} {dim.number}</h3>'
        f'<span class="small faint">{text(dim.word)}</span></header>'
        f"{charts.distribution(dim.values, dim.low, dim.high, dim.mean)}{charts.band(*dim.course)}"
        f'<dl class="numbers">{terms}</dl>{odd}</div>'
    )


def outliers(found: Sequence[Outlier], facts: Facts, strips_of: Mapping[str, Strip]) -> str:
    """The oddest episodes with their reasons, and a few pictures to judge by."""
    lead = (
        "Episodes that are not like the others in length, motion or range, and copies. Odd is not wrong: look at them."
    )
    if not found:
        calm = '<div class="card calm"><i class="dot good"></i><span>No episode stands out.</span></div>'
        return section("outliers", "Outliers", lead, calm)
    rows = []
    for outlier in found[:OUTLIERS_SHOWN]:
        episode = outlier.episode
        reasons = "".join(f"<li>{text(reason)}</li>" for reason in outlier.reasons)
        strip = strips_of.get(episode.name)
        reel = "".join(picture(item, f"frame {item.frame}") for item in strip.rows[0]) if strip else ""
        rows.append(
            f'<div class="odd"><div><p><b>{text(episode.name)}</b> <span class="faint small">'
            f"{plural(episode.frames, 'frame')}</span><br>{prompt(facts.tasks[episode.task].text)}</p>"
            f"<ul>{reasons}</ul></div>"
            f'<div class="reel">{reel}</div></div>'
        )
    more = len(found) - OUTLIERS_SHOWN
    tail = f'<p class="small soft">and {plural(more, "more episode")}</p>' if more > 0 else ""
    return section("outliers", "Outliers", lead, f'<div class="card">{"".join(rows)}</div>{tail}')


def findings(checks: Report) -> str:
    """What should be looked into, heaviest first."""
    lead = "What was found on the way. Every frame was read; pictures were opened only where this page shows them: "
    lead += "<code>dm05-prep validate --deep</code> checks every one."
    if not checks.findings:
        calm = '<div class="card calm"><i class="dot good"></i><span>Nothing to warn about.</span></div>'
        return section("findings", "Warnings", lead, calm)
    rows = []
    for kind, items in checks.groups().items():
        places = [f"{checks.relative(item.place)}: {item.detail}" for item in items[:PLACES_SHOWN]]
        if len(items) > PLACES_SHOWN:
            places.append(f"and {len(items) - PLACES_SHOWN:,} more")
        (severity, title, _), fix = KINDS[kind], checks.fix(kind)
        count = f' <span class="faint small">× {len(items):,}</span>' if len(items) > 1 else ""
        mend = f'<p class="small"><span class="faint">Mend:</span> {text(fix)}</p>' if fix else ""
        rows.append(
            f'<div class="finding"><i class="dot {severity}"></i><div>'
            f"<b>{text(title[0].upper() + title[1:])}</b>{count}"
            f'<p class="places small">{"<br>".join(map(text, places))}</p>{mend}</div></div>'
        )
    return section("findings", "Warnings", lead, f'<div class="card">{"".join(rows)}</div>')
