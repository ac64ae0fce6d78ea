"""Where the float32 value of a weight lives between two steps.

- ``fp32``: the weight itself is float32.
- ``bf16``: nowhere. The weight is BF16, and an update smaller than half its last bit (2**-9 of its size) is rounded
  away.
- ``bf16_compensated``: the float32 value ("master") split in 16 + 16 bits. The weight is the master rounded to BF16,
  nearest, ties away from zero; the remainder is ``bits(master) - (bits(weight) << 16)``, a signed 16-bit integer.
  Together they are the master to the last bit.
- ``fp32_master``: a float32 copy in the optimizer state; the weight is its rounding to BF16 (nearest, ties to even).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Mode = Literal["fp32", "bf16", "bf16_compensated", "fp32_master"]


def resolve(precision: str, weights: str) -> Mode:
    """The mode for ``--trainer-config.precision``; ``auto`` follows the dtype of the weights in config.json."""
    if precision != "auto":
        return precision  # type: ignore[return-value]
    return "fp32" if weights == "float32" else "bf16_compensated"


def weight_dtype(mode: Mode) -> torch.dtype:
    """Dtype of the model's weights and gradients."""
    return torch.float32 if mode == "fp32" else torch.bfloat16


def moment_dtype(mode: Mode) -> torch.dtype:
    """Dtype of the running means of the gradient and its square."""
    return torch.bfloat16 if mode in ("bf16", "bf16_compensated") else torch.float32


def split16(master: Tensor) -> tuple[Tensor, Tensor]:
    """A finite float32 tensor as (weight bfloat16, remainder int16) of the same shape; ``join16`` gives it back
    exactly."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join16(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a BF16 weight and its int16 remainder."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def extra_state(weight: Tensor, mode: Mode) -> dict[str, Tensor]:
    """What a mode keeps beside a weight and its moments: nothing, ``remainder`` or ``master``."""
    if mode == "bf16_compensated":
        return {"remainder": torch.zeros_like(weight, dtype=torch.int16)}
    if mode == "fp32_master":
        return {"master": weight.detach().to(torch.float32, copy=True)}
    return {}


def read_master(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The float32 value to update (a new tensor, or for ``fp32`` the weight itself)."""
    if "remainder" in state:
        return join16(weight, state["remainder"])
    if "master" in state:
        return state["master"]
    return weight.float()


def write_master(weight: Tensor, state: dict[str, Tensor], master: Tensor) -> None:
    """Store an updated float32 value back into the weight and its extra state, in place."""
    if "remainder" in state:
        upper, remainder = split16(master)
        weight.copy_(upper)
        state["remainder"].copy_(remainder)
        return
    if "master" in state:
        state["master"].copy_(master)
    weight.copy_(master)
