"""From decoded pictures to what the vision tower sees; the same code on the CPU and on a GPU."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def to_pixels(images: Tensor, size: int) -> Tensor:
    """Pad to a centred square with black, resize, scale to [-1, 1].

    Args:
        images: uint8 [..., H, W, 3], RGB.
        size: side of the result in pixels.

    Returns:
        float32 [..., 3, size, size]: bilinear without antialiasing, rounded to 1/255 steps, `x / 127.5 - 1`. An odd
        pixel of padding goes to the bottom or right.
    """
    return scale(resize_square(images, size))


def resize_square(images: Tensor, size: int) -> Tensor:
    """uint8 [..., H, W, 3] -> whole numbers 0..255 as float32 [..., 3, size, size]."""
    *lead, height, width, channels = images.shape
    planes = images.reshape(-1, height, width, channels).permute(0, 3, 1, 2).float()
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    if height != width:
        planes = functional.pad(planes, (left, side - width - left, top, side - height - top))
    if side != size:
        planes = functional.interpolate(planes, size=(size, size), mode="bilinear", align_corners=False)
    return planes.round_().clamp_(0, 255).reshape(*lead, channels, size, size)


def scale(levels: Tensor) -> Tensor:
    """float32 0..255 -> [-1, 1]."""
    return levels / 127.5 - 1
