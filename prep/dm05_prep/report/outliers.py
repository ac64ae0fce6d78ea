"""Episodes that do not look like the others: too long, too short, jumping, standing still, far out, or twice there."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dm05_prep.report.facts import EpisodeFacts, Facts

FEW = 8
"""With fewer episodes nothing is called unlike the others (but copies are)."""
FAR = 5.0
"""In units of the spread (median distance from the median, scaled to a standard deviation)."""
MUCH = 1.5
"""A length must differ by this factor, however alike all others are."""

Float = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """One episode and every reason it was picked for; ``weight`` orders them."""

    episode: EpisodeFacts
    reasons: tuple[str, ...]
    weight: float


def find_outliers(facts: Facts, low: Float, high: Float) -> list[Outlier]:
    """The odd episodes, oddest first.

    Args:
        facts: the dataset.
        low: [S] first percentile of each state dim.
        high: [S] the 99th.
    """
    reasons: dict[int, list[tuple[float, str]]] = defaultdict(list)
    if len(facts.episodes) >= FEW:
        _lengths(facts, reasons)
        _motion(facts, np.maximum(high - low, 1e-9), low, high, reasons)
    _copies(facts, reasons)
    found = [
        Outlier(
            episode=facts.episodes[number],
            reasons=tuple(text for _, text in sorted(given, reverse=True)),
            weight=sum(weight for weight, _ in given),
        )
        for number, given in reasons.items()
    ]
    return sorted(found, key=lambda outlier: (-outlier.weight, outlier.episode.name))


def distance(values: Float) -> Float:
    """How far each value is from the median, in units of the spread; signed."""
    middle = np.median(values)
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    return (values - middle) / max(spread, 1e-9, 1e-3 * abs(float(middle)))


def _lengths(facts: Facts, reasons: dict[int, list[tuple[float, str]]]) -> None:
    away = distance(np.log(facts.lengths.astype(np.float64)))
    median = float(np.median(facts.lengths))
    unlike = np.maximum(facts.lengths / median, median / facts.lengths) > MUCH
    for number in np.flatnonzero((np.abs(away) > FAR) & unlike).tolist():
        times = facts.lengths[number] / median
        how = f"{times:.1f} times the median" if times > 1 else f"1/{1 / times:.1f} of the median"
        reasons[number].append((abs(float(away[number])) / FAR, f"{facts.lengths[number]:,} frames long, {how}"))


def _motion(facts: Facts, span: Float, low: Float, high: Float, reasons: dict[int, list[tuple[float, str]]]) -> None:
    """Jumps between neighbouring frames, values far outside the usual range, and frames in which nothing moves."""
    episodes, dims = len(facts.episodes), len(span)
    jumps, beyond = np.zeros((episodes, dims)), np.zeros((episodes, dims))
    still = np.zeros(episodes)
    for number, episode in enumerate(facts.episodes):
        state = facts.state[episode.rows].astype(np.float64)
        steps = np.abs(np.diff(state, axis=0)) / span
        jumps[number] = steps.max(axis=0)
        beyond[number] = np.maximum((state - high).max(axis=0), (low - state).max(axis=0)) / span
        still[number] = float((steps.max(axis=1) < 1e-4).mean())
    far = distance(jumps.max(axis=1))
    for number in np.flatnonzero((far > FAR) & (jumps.max(axis=1) > 0.5)).tolist():
        dim = int(jumps[number].argmax())
        text = f"state {dim} jumps by {jumps[number, dim]:.1f} times its usual range between two frames"
        reasons[number].append((float(far[number]) / FAR, text))
    for number in np.flatnonzero(beyond.max(axis=1) > 1.0).tolist():
        dim = int(beyond[number].argmax())
        text = f"state {dim} leaves its usual range by {beyond[number, dim]:.1f} times that range"
        reasons[number].append((float(beyond[number, dim]), text))
    for number in np.flatnonzero((still > 0.5) & (still > np.median(still) + 0.3)).tolist():
        reasons[number].append((1.0, f"nothing moves in {100 * still[number]:.0f} % of its frames"))


def _copies(facts: Facts, reasons: dict[int, list[tuple[float, str]]]) -> None:
    same: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, episode in enumerate(facts.episodes):
        same[episode.frames, episode.checksum].append(number)
    for numbers in same.values():
        for number in numbers[1:]:
            reasons[number].append((2.0, f"the same bytes as {facts.episodes[numbers[0]].name}"))
