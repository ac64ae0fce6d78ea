"""The page around the sections: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources

from dm05_schemas.registry import DatasetSpec
from dm05_schemas.report import Report
from dm05_schemas.stats import tool_version

from dm05_prep.report.charts import number
from dm05_prep.report.facts import Facts
from dm05_prep.report.markup import picture, plural, text
from dm05_prep.report.pictures import Picture

MOSAIC_ROWS = 3
NAV = (
    ("layout", "Layout"),
    ("episodes", "Episodes"),
    ("tasks", "Tasks"),
    ("strips", "Pictures"),
    ("vectors", "State and action"),
    ("outliers", "Outliers"),
    ("findings", "Warnings"),
)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What the top of the page says."""

    spec: DatasetSpec
    facts: Facts
    checks: Report
    mosaic: Sequence[Picture]


def document(head: Head, sections: Sequence[str]) -> str:
    """The whole document."""
    style = resources.files("dm05_prep.report").joinpath("style.css").read_text("utf-8")
    name = text(head.spec.name)
    shown = "".join(sections)
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in NAV if f'id="{anchor}"' in shown)
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}: dataset report</title>\n<style>\n{style}</style>\n</head>\n<body>\n{_hero(head)}"
        f"<nav>{links}</nav>\n<main>{shown}</main>\n"
        f"<footer>{name} · dm05-prep report {text(tool_version())} · {made}</footer>\n</body>\n</html>\n"
    )


def _hero(head: Head) -> str:
    facts, spec = head.facts, head.spec
    columns = len(head.mosaic) // MOSAIC_ROWS
    mosaic, kind = "", ""
    if columns >= 4:
        tiles = "".join(picture(item, f"frame {item.frame}") for item in head.mosaic[: columns * MOSAIC_ROWS])
        mosaic, kind = f'<div class="mosaic" style="--columns:{columns}">{tiles}</div>', " pictured"
    figures = {
        "episode": len(facts.episodes),
        "frame": facts.frames,
        "sample": sum(episode.frames - 1 for episode in facts.episodes),
        "task": len(facts.tasks),
        "camera": len(spec.image_keys),
    }
    cells = [
        f'<div class="figure"><strong>{n:,}</strong><span>{noun}{"" if n == 1 else "s"}</span></div>'
        for noun, n in figures.items()
    ]
    dims = f"{spec.state_dim} → {spec.action_dim}"
    cells.append(f'<div class="figure"><strong>{dims}</strong><span>state → action dims</span></div>')
    return (
        f'<header class="hero{kind}">{mosaic}<div class="hero-text">'
        f'<p class="kicker">Dataset report</p><h1>{text(spec.name)}</h1>'
        f'<div class="badges">{_badges(head)}</div><div class="figures">{"".join(cells)}</div></div></header>\n'
    )


def _badges(head: Head) -> str:
    facts, spec = head.facts, head.spec
    counts = ((head.checks.errors, "error"), (head.checks.warnings, "warning"))
    verdict = ", ".join(plural(count, noun) for count, noun in counts if count) or "nothing to warn about"
    mood = next((noun for count, noun in counts if count), "good")
    badges = [f'<span class="badge {mood}"><i class="dot"></i><b>{verdict}</b></span>']
    if spec.robot_type:
        badges.append(f'<span class="badge">robot <b>{text(spec.robot_type)}</b></span>')
    badges.append(
        f'<span class="badge">actions <b>{spec.action_mode if facts.has_action else "none: next states"}</b></span>'
    )
    human = sum(episode.human_frames for episode in facts.episodes)
    if human:
        badges.append(f'<span class="badge">without a robot <b>{number(human)} frames</b></span>')
    return "".join(badges)
