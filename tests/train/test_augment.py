"""Augmentation: within its bounds, drawn from seed, epoch and sample alone."""

from __future__ import annotations

import numpy as np
import torch
from dm05_train.data.augment import COLOUR_SHARE, DRAWS, augment, draws
from dm05_train.data.images import resize_square


def smooth(size: int = 64) -> torch.Tensor:
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    image = torch.stack([xx * 3, yy * 3, 255 - xx * 2], dim=-1).clamp(0, 255).to(torch.uint8)
    return resize_square(image[None], size)


def plain(count: int = 1) -> torch.Tensor:
    """Draws of no shift, no turn, no recolouring."""
    numbers = torch.full((count, DRAWS), 0.5)
    numbers[:, 3] = 0.99
    return numbers


def test_draws_are_a_function_of_seed_epoch_and_sample() -> None:
    ids, epochs = np.arange(50), np.zeros(50, dtype=np.int64)
    first = draws(1, epochs, ids, cameras=2)
    assert first.shape == (100, DRAWS) and first.min() >= 0 and first.max() < 1
    assert (draws(1, epochs[7:9], ids[7:9], cameras=2) == first[14:18]).all()
    for other in (draws(2, epochs, ids, 2), draws(1, epochs + 1, ids, 2)):
        assert (other != first).mean() > 0.99
    assert len(np.unique(first)) > 0.99 * first.size
    many = draws(0, np.zeros(4000, dtype=np.int64), np.arange(4000), cameras=1)
    assert np.abs(many.mean(0) - 0.5).max() < 0.03 and np.abs((many < COLOUR_SHARE).mean(0) - 0.5).max() < 0.04
    assert np.abs(np.corrcoef(many.T) - np.eye(DRAWS)).max() < 0.06


def test_centre_crop_keeps_the_centre_and_enlarges() -> None:
    image = smooth()
    out = augment(image, plain())
    assert out.shape == image.shape and torch.equal(out, out.round()) and out.min() >= 0 and out.max() <= 255
    assert (out[..., 32, 32] - image[..., 32, 32]).abs().max() <= 3
    assert out[0, 0, 32, 0] > image[0, 0, 32, 0]  # the left edge shows what lay 2.5% further in
    slope = (out[0, 0, 32, 40] - out[0, 0, 32, 20]) / (image[0, 0, 32, 40] - image[0, 0, 32, 20])
    assert abs(float(slope) - 0.95) < 0.04


def test_shift_and_turn_stay_in_their_bounds() -> None:
    image = smooth()
    numbers = plain(2)
    numbers[0, 0], numbers[1, 0] = 0.0, 1.0
    left, right = augment(image.expand(2, -1, -1, -1), numbers)
    moved = float(right[0, 32, 32] - left[0, 32, 32]) / 3
    assert 2.0 < moved < 4.5  # 5% of 64 pixels between the outermost places
    numbers = plain(2)
    numbers[0, 2], numbers[1, 2] = 0.0, 1.0
    one, other = augment(image.expand(2, -1, -1, -1), numbers)
    turned = float((one[1, 32, 60] - one[1, 32, 4]) - (other[1, 32, 60] - other[1, 32, 4])) / 3
    assert 3.0 < abs(turned) / 0.95 < 5.0  # 2 x sin(2 degrees) x 56 pixels


def test_colour_changes_only_when_drawn() -> None:
    grey = torch.full((1, 3, 8, 8), 100.0)
    assert torch.equal(augment(grey, plain()), grey)
    numbers = plain()
    numbers[0, 3], numbers[0, 4] = 0.1, 1.0
    assert torch.equal(augment(grey, numbers), torch.full_like(grey, 120))
    numbers[0, 4] = 0.0
    assert torch.equal(augment(grey, numbers), torch.full_like(grey, 80))
    coloured = smooth()
    numbers = plain()
    numbers[0, 3], numbers[0, 6] = 0.1, 0.0
    less = augment(coloured, numbers)
    assert (less.max(1).values - less.min(1).values).mean() < (coloured.max(1).values - coloured.min(1).values).mean()
