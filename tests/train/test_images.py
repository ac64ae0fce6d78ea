"""Image preprocessing against the golden pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dm05_schemas.image import decode_rgb
from dm05_train.data.images import resize_square, to_pixels
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "images"
CASES = json.loads((GOLDEN / "cases.json").read_text())
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def picture(name: str) -> Tensor:
    return torch.from_numpy(decode_rgb((GOLDEN / name).read_bytes(), name).copy())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=[c["input"] for c in CASES])
def test_golden(case: dict[str, str], device: str) -> None:
    expected = picture(case["expected"]).permute(2, 0, 1).float()
    levels = resize_square(picture(case["input"]).to(device), 448).cpu()
    assert (levels - expected).abs().max() <= 1
    pixels = to_pixels(picture(case["input"]).to(device), 448).cpu()
    assert torch.equal(pixels, levels / 127.5 - 1)
    assert pixels.dtype == torch.float32 and pixels.shape == (3, 448, 448)


def test_leading_axes_and_odd_padding() -> None:
    images = torch.randint(0, 256, (2, 3, 5, 8, 3), dtype=torch.uint8)
    pixels = to_pixels(images, 8)
    assert pixels.shape == (2, 3, 3, 8, 8)
    levels = ((pixels + 1) * 127.5).round()
    assert (levels[..., :1, :] == 0).all() and (levels[..., 6:, :] == 0).all()
    assert torch.equal(levels[..., 1:6, :], images.permute(0, 1, 4, 2, 3).float())


def test_matches_pillow_free_reference_on_random_sizes() -> None:
    """Sampling positions written out by hand, in float64."""
    rng = np.random.default_rng(0)
    for height, width, size in [(7, 7, 14), (9, 5, 12), (30, 40, 17)]:
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        side = max(height, width)
        square = np.zeros((side, side, 3))
        top, left = (side - height) // 2, (side - width) // 2
        square[top : top + height, left : left + width] = image
        at = np.clip((np.arange(size) + 0.5) * side / size - 0.5, 0, side - 1)
        low = np.floor(at).astype(int)
        high, share = np.minimum(low + 1, side - 1), at - low
        rows = square[low] * (1 - share)[:, None, None] + square[high] * share[:, None, None]
        expected = rows[:, low] * (1 - share)[None, :, None] + rows[:, high] * share[None, :, None]
        got = resize_square(torch.from_numpy(image), size).permute(1, 2, 0).numpy()
        assert np.abs(got - expected).max() <= 0.51
