"""Optional augmentation on the batch's device, drawn from (seed, epoch, sample) alone.

Every image is cropped to 95% at a random place, turned by up to 2 degrees, and with probability 0.5 changed in
brightness, contrast and saturation by up to 20%. The draws depend on nothing else, so a run repeats them on any number
of ranks, workers or after a restart.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dm05_train.data.sampler import uniform

CROP = 0.95
TURN_DEGREES = 2.0
COLOUR_SHARE = 0.5
COLOUR_RANGE = 0.2
DRAWS = 7  # place x, y; turn; colour or not; brightness, contrast, saturation
LUMA = (0.299, 0.587, 0.114)


def draws(seed: int, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64], cameras: int) -> NDArray[np.float32]:
    """Uniform numbers [B * cameras, DRAWS] in [0, 1) for the images of samples [B]."""
    return uniform(seed, epochs, sample_ids, cameras * DRAWS).reshape(-1, DRAWS).astype(np.float32)


def augment(levels: Tensor, numbers: Tensor) -> Tensor:
    """Augment images.

    Args:
        levels: float32 [N, 3, S, S], 0..255.
        numbers: float32 [N, DRAWS] from `draws`, on the same device.

    Returns:
        float32 [N, 3, S, S], whole numbers 0..255. What a turn brings in from outside repeats the border.
    """
    shift = (numbers[:, :2] * 2 - 1) * (1 - CROP)
    angle = (numbers[:, 2] * 2 - 1) * math.radians(TURN_DEGREES)
    cos, sin = torch.cos(angle) * CROP, torch.sin(angle) * CROP
    theta = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
    grid = functional.affine_grid(theta, list(levels.shape), align_corners=False)
    moved = functional.grid_sample(levels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return _recolour(moved, numbers).round_().clamp_(0, 255)


def _recolour(levels: Tensor, numbers: Tensor) -> Tensor:
    chosen = (numbers[:, 3] < COLOUR_SHARE).float()
    brightness, contrast, saturation = (1 + (numbers[:, 4:] * 2 - 1) * COLOUR_RANGE * chosen[:, None]).unbind(1)
    weights = torch.tensor(LUMA, device=levels.device).view(1, 3, 1, 1)
    levels = (levels * brightness.view(-1, 1, 1, 1)).clamp(0, 255)
    mean = (levels * weights).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    levels = torch.lerp(mean, levels, contrast.view(-1, 1, 1, 1)).clamp(0, 255)
    grey = (levels * weights).sum(1, keepdim=True)
    return torch.lerp(grey, levels, saturation.view(-1, 1, 1, 1)).clamp(0, 255)
