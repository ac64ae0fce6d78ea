"""When kernels apply, and how work is cut."""

from __future__ import annotations

import importlib.util

from torch import Tensor

HAVE_TRITON = importlib.util.find_spec("triton") is not None
# Programs that walk rows and keep a partial sum each: a few per multiprocessor.
WALKERS = 264


def use_kernels(x: Tensor) -> bool:
    """Whether ``x`` goes through the kernels rather than their plain twins."""
    return HAVE_TRITON and x.is_cuda


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
