"""Small charts as inline SVG. All take plain numbers and give a string; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float64]

WIDTH = 260.0
# The Oklab colour space: to cone responses (cube roots), and from those to linear sRGB.
_OKLAB_TO_CONES = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.2914855480],
    ]
)
_CONES_TO_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


def number(value: float, digits: int = 4) -> str:
    """A number for reading: ``digits`` significant ones, a real minus sign, exponents only far from 1."""
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace("-", "−")
    if not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def share(part: float, whole: float) -> str:
    """A percentage for reading."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def svg(width: float, height: float, label: str, body: str, kind: str = "", stretch: bool = False) -> str:
    """An SVG element with a text for those who cannot see it. ``stretch`` fills any width, without keeping shape."""
    aspect = ' preserveAspectRatio="none"' if stretch else ""
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}"{aspect} role="img" aria-label="{escape(label)}">'
        f"{body}</svg>"
    )


def tick_step(span: float, ticks: int) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts ``span`` into about ``ticks`` parts."""
    raw = span / max(1, ticks)
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if raw <= step * power * 1.2)


def length_histogram(lengths: NDArray[np.int64]) -> str:
    """How many episodes have how many frames: bars over round bins, with the median marked."""
    low, high = int(lengths.min()), int(lengths.max())
    step = max(1.0, tick_step(max(1, high - low), min(36, max(6, int(4 * math.sqrt(len(lengths)))))))
    edges = np.arange(math.floor(low / step) * step, high + step + 1e-9, step)
    if edges[-1] <= high:
        edges = np.append(edges, edges[-1] + step)
    counts, _ = np.histogram(lengths, edges)
    width, height, top, base = 720.0, 210.0, 22.0, 182.0
    slot = width / len(counts)
    scale = (base - top) / max(1, counts.max())
    parts = []
    for i, count in enumerate(counts.tolist()):
        tip = f"{edges[i]:g} to {edges[i + 1] - 1:g} frames: {count:,} episodes"
        tall = count * scale
        parts.append(
            f'<g class="bar"><rect class="hit" x="{i * slot:.2f}" y="{top}" width="{slot:.2f}" height="{base - top}"/>'
            f'<rect class="fill" x="{i * slot + 0.8:.2f}" y="{base - tall:.2f}" width="{max(0.5, slot - 1.6):.2f}" '
            f'height="{tall:.2f}" rx="1.5"/><title>{tip}</title></g>'
        )
    parts.append(f'<line class="axis" x1="0" x2="{width}" y1="{base}" y2="{base}"/>')
    parts += _axis(edges[0], edges[-1], width, base + 16)
    median = float(np.median(lengths))
    x = (median - edges[0]) / (edges[-1] - edges[0]) * width
    anchor = "start" if x < width * 0.75 else "end"
    parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 10}" y2="{base}"/>')
    shift = 5 if anchor == "start" else -5
    parts.append(
        f'<text class="note" x="{x + shift:.1f}" y="{top - 3}" text-anchor="{anchor}">median {number(median)}</text>'
    )
    return svg(width, height, f"Histogram of episode lengths, {low} to {high} frames", "".join(parts), "lengths")


def _axis(low: float, high: float, width: float, y: float) -> list[str]:
    step = tick_step(high - low, 8)
    ticks = np.arange(math.ceil(low / step) * step, high + step * 1e-6, step)
    labels = []
    for tick in ticks.tolist():
        x = (tick - low) / (high - low) * width
        anchor = "start" if x < 12 else "end" if x > width - 12 else "middle"
        labels.append(f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="{anchor}">{number(tick)}</text>')
    return labels


def ribbon(lengths: NDArray[np.int64], colours: Sequence[str]) -> str:
    """Episodes as thin bars as tall as they are long, in the order and colours given.

    Above 2,400 episodes neighbours share a bar: the longest of them, in its colour.
    """
    group = -(-len(lengths) // 2400)
    picks = [i + int(lengths[i : i + group].argmax()) for i in range(0, len(lengths), group)]
    tallest = float(lengths.max())
    paths: dict[str, list[str]] = {}
    for x, i in enumerate(picks):
        tall = 100 * float(lengths[i]) / tallest
        paths.setdefault(colours[i], []).append(f"M{x} 100v-{tall:.1f}h1v{tall:.1f}z")
    body = "".join(f'<path fill="{colour}" d="{"".join(path)}"/>' for colour, path in paths.items())
    return svg(len(picks), 100, f"Lengths of {len(lengths)} episodes by task", body, "ribbon", stretch=True)


def distribution(values: Float, low: float, high: float, mean: float) -> str:
    """Histogram of finite values with the part outside [low, high] pale, and lines at low, high and the mean."""
    height, base = 78.0, 64.0
    left, right = float(values.min()), float(values.max())
    if left == right:
        pad = max(1e-3, abs(left) * 0.1)
        left, right = left - pad, right + pad
    bins = int(min(64, max(12, 2 * math.sqrt(len(values)))))
    counts, _ = np.histogram(values, bins, (left, right))
    slot = WIDTH / bins
    # Roots, so that a peak (a gripper that rests) does not flatten all else.
    tall = np.sqrt(counts) / math.sqrt(max(1, counts.max())) * (base - 6)

    def at(value: float) -> float:
        return min(WIDTH, max(0.0, (value - left) / (right - left) * WIDTH))

    outline = "".join(f"V{base - t:.1f}H{(i + 1) * slot:.1f}" for i, t in enumerate(tall.tolist()))
    shape = f"M0 {base}{outline}V{base}z"
    a, b = at(low), at(high)
    body = (
        f'<path class="outside" d="{shape}"/>'
        f'<svg x="{a:.1f}" y="0" width="{max(0.5, b - a):.1f}" height="{base}" '
        f'viewBox="{a:.1f} 0 {max(0.5, b - a):.1f} {base}"><path class="inside" d="{shape}"/></svg>'
        f'<line class="axis" x1="0" x2="{WIDTH}" y1="{base}" y2="{base}"/>'
        f'<line class="quantile" x1="{a:.1f}" x2="{a:.1f}" y1="2" y2="{base}"/>'
        f'<line class="quantile" x1="{b:.1f}" x2="{b:.1f}" y1="2" y2="{base}"/>'
        f'<path class="mean" d="M{at(mean):.1f} {base}l-3.5 6h7z"/>'
        f'<text class="tick" x="0" y="{height - 1}">{number(left, 3)}</text>'
        f'<text class="tick" x="{WIDTH}" y="{height - 1}" text-anchor="end">{number(right, 3)}</text>'
    )
    label = f"Histogram from {number(left)} to {number(right)}, q01 {number(low)}, q99 {number(high)}"
    return svg(WIDTH, height, label, body, "distribution")


def band(low: Float, middle: Float, high: Float) -> str:
    """How a value goes from the first to the last frame: the middle of all episodes, and where most of them are."""
    height = 44.0
    bottom, top = float(low.min()), float(high.max())
    if bottom == top:
        bottom, top = bottom - 1, top + 1

    def points(values: Float) -> list[str]:
        x = np.linspace(0, WIDTH, len(values))
        y = height - 2 - (values - bottom) / (top - bottom) * (height - 4)
        return [f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True)]

    body = (
        f'<path class="spread" d="M{"L".join(points(low) + points(high)[::-1])}z"/>'
        f'<path class="middle" d="M{"L".join(points(middle))}"/>'
    )
    return svg(WIDTH, height, "Median and 10 to 90 percent band over the course of an episode", body, "band")


def traces(series: Float, colours: Sequence[str], pictures: int) -> str:
    """Several values over one episode, each within -1 .. 1, below a row of equally spaced pictures of it.

    Args:
        series: [n, D].
        colours: of each dim.
        pictures: how many pictures stand above; the first frame is drawn under the middle of the first one, the last
            frame under the middle of the last.
    """
    width, height = 1000.0, 90.0
    tile = width / pictures
    x = np.linspace(tile / 2, width - tile / 2, len(series))
    parts = [f'<line class="axis" x1="0" x2="{width}" y1="{height / 2}" y2="{height / 2}"/>']
    for at in (np.arange(pictures) + 0.5) * tile:
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}"/>')
    for values, colour in zip(series.T, colours, strict=True):
        y = height / 2 - np.clip(values, -1.05, 1.05) * (height / 2 - 4)
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
        parts.append(f'<path class="trace" stroke="{colour}" d="M{path}"/>')
    return svg(width, height, "Normalised values over the episode", "".join(parts), "traces", stretch=True)


def colour(index: int, total: int, lightness: float = 0.66) -> str:
    """One of ``total`` hues of equal brightness, as #rrggbb; neighbours in number are far apart in hue when many."""
    turn = index / total if total <= 10 else (index * 0.61803398875) % 1.0
    hue, chroma = 2 * math.pi * (turn + 0.07), 0.125
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    cones = (_OKLAB_TO_CONES @ (lightness, a, b)) ** 3
    linear = (_CONES_TO_RGB @ cones).tolist()
    channels = [12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055 for v in linear]
    return "#" + "".join(f"{round(255 * min(1.0, max(0.0, v))):02x}" for v in channels)
