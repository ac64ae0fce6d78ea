"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup: int,
    total: int,
    shape: Literal["cosine", "constant"] = "cosine",
    floor: float = 0.1,
) -> float:
    """Rate of optimizer step ``step`` (counted from 0): a straight rise over ``warmup`` steps, then a cosine to ``floor
    * peak``.

    The rise gives the first step ``peak / warmup`` and step ``warmup - 1`` the peak; the last step, ``total - 1``, gets
    ``floor * peak``. A run shorter than its warm-up ends on the rise.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "constant":
        return peak
    span = max(1, total - 1 - warmup)
    done = min(1.0, (step - warmup) / span)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
