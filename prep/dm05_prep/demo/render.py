"""Draws a moment of the demo world as two 256x256 pictures: a fixed camera across the table and one on the wrist.

A plain pinhole camera and flat-shaded convex solids, drawn back to front with Pillow at twice the size and halved.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from dm05_prep.demo.world import BASE, BLOCK, Moment, Scene, Vector

SIZE = 256
_SCALE = 2  # drawn this many times larger, then averaged down
_LIGHT = np.array([0.35, 0.45, 0.82])
_JPEG_QUALITY = 90

Colour = tuple[int, int, int]
FLOOR: Colour = (58, 66, 78)
TABLE: Colour = (196, 168, 132)
SEAM: Colour = (178, 150, 115)
PLATE: Colour = (240, 240, 236)
BASKET: Colour = (112, 74, 42)
ARM: Colour = (232, 236, 240)
JOINT: Colour = (70, 84, 104)
FINGER: Colour = (40, 44, 52)
SHADOW: Colour = (128, 106, 80)


@dataclass(frozen=True, kw_only=True)
class Camera:
    """A pinhole camera; ``axes`` rows are right, down and forward in world coordinates."""

    position: Vector  # [3]
    axes: Vector  # [3, 3]
    focal: float  # pixels of the final picture

    @classmethod
    def looking(cls, position: Vector, at: Vector, up: Vector, focal: float) -> Camera:
        forward = (at - position) / np.linalg.norm(at - position)
        right = np.cross(forward, up)
        right /= np.linalg.norm(right)
        return cls(position=position, axes=np.stack([right, np.cross(forward, right), forward]), focal=focal)

    def project(self, points: Vector) -> Vector:
        """World points [n, 3] to pixels of the enlarged picture [n, 2]; all must lie in front of the camera."""
        seen = (points - self.position) @ self.axes.T
        return (seen[:, :2] / np.maximum(seen[:, 2:], 0.02) * self.focal + SIZE / 2) * _SCALE


HEAD = Camera.looking(np.array([0.0, 0.72, 0.62]), np.array([0.0, -0.03, 0.10]), np.array([0.0, 0.0, 1.0]), 370.0)


def wrist_camera(gripper: Vector) -> Camera:
    """The wrist camera: above the finger tips, level, looking straight down."""
    eye = gripper + np.array([0.0, 0.0, 0.14])
    return Camera.looking(eye, gripper, np.array([0.0, 1.0, 0.0]), 150.0)


def up(metres: float) -> Vector:
    """A step upwards, [3]."""
    return np.array([0.0, 0.0, metres])


def _shade(colour: Colour, normal: Vector) -> Colour:
    bright = 0.62 + 0.38 * max(0.0, float(normal @ _LIGHT))
    red, green, blue = (round(c * bright) for c in colour)
    return red, green, blue


class Canvas:
    """One picture being drawn through one camera."""

    def __init__(self, camera: Camera) -> None:
        self.camera = camera
        self.image = Image.new("RGB", (SIZE * _SCALE, SIZE * _SCALE), FLOOR)
        self.draw = ImageDraw.Draw(self.image)

    def polygon(self, points: Vector, colour: Colour) -> None:
        self.draw.polygon([(x, y) for x, y in self.camera.project(points).tolist()], fill=colour)

    def disc(self, centre: Vector, radius: float, colour: Colour) -> None:
        """A level disc around ``centre`` [3]."""
        angle = np.linspace(0, 2 * np.pi, 28, endpoint=False)
        rim = np.stack([np.cos(angle) * radius, np.sin(angle) * radius, np.zeros_like(angle)], axis=1)
        self.polygon(centre + rim, colour)

    def box(self, centre: Vector, half: Vector, colour: Colour) -> None:
        """A solid box with edges along the axes; only the faces turned to the camera are drawn."""
        for axis in range(3):
            for sign in (-1.0, 1.0):
                normal = np.zeros(3)
                normal[axis] = sign
                middle = centre + normal * half
                if (self.camera.position - middle) @ normal <= 0:
                    continue
                first, second = (i for i in range(3) if i != axis)
                corners = np.repeat(middle[None], 4, axis=0)
                corners[:, first] += half[first] * np.array([-1, 1, 1, -1])
                corners[:, second] += half[second] * np.array([-1, -1, 1, 1])
                self.polygon(corners, _shade(colour, normal))

    def limb(self, ends: Sequence[Vector], radius: float, colour: Colour, joint: Colour) -> None:
        """A chain of rods through ``ends`` with a ball at each joint."""
        pixels = self.camera.project(np.stack(ends))
        depth = (np.stack(ends) - self.camera.position) @ self.camera.axes[2]
        width = radius / depth * self.camera.focal * _SCALE
        for a, b, w in zip(pixels[:-1], pixels[1:], width[1:], strict=True):
            self.draw.line([tuple(a), tuple(b)], fill=colour, width=max(2, round(2 * w)))
        for (x, y), w in zip(pixels, width * 1.15, strict=True):
            self.draw.ellipse([x - w, y - w, x + w, y + w], fill=joint)

    def jpeg(self) -> bytes:
        """The finished picture, encoded."""
        buffer = io.BytesIO()
        self.image.reduce(_SCALE).save(buffer, format="JPEG", quality=_JPEG_QUALITY)
        return buffer.getvalue()


def _table(canvas: Canvas, scene: Scene) -> None:
    def quad(x0: float, x1: float, y0: float, y1: float) -> Vector:
        return np.array([[x0, y0, 0.0], [x1, y0, 0.0], [x1, y1, 0.0], [x0, y1, 0.0]])

    canvas.polygon(quad(-0.42, 0.42, -0.52, 0.36), TABLE)
    for y in np.arange(-0.44, 0.36, 0.08):
        canvas.polygon(quad(-0.42, 0.42, y, y + 0.004), SEAM)
    plate = np.array([*scene.plate, 0.004])
    canvas.disc(plate, 0.075, (206, 206, 204))
    canvas.disc(plate + up(0.006), 0.070, PLATE)
    canvas.disc(plate + up(0.006), 0.046, (222, 226, 228))
    basket = np.array([*scene.basket, 0.0])
    canvas.box(basket + up(0.008), np.array([0.068, 0.068, 0.008]), BASKET)
    canvas.box(basket + up(0.016), np.array([0.056, 0.056, 0.001]), (78, 48, 26))


def _gripper(canvas: Canvas, moment: Moment, *, palm: bool) -> None:
    tip = moment.gripper
    for side in (-1.0, 1.0):
        centre = tip + np.array([side * (moment.opening + 0.007 + BLOCK * 0.45), 0.0, 0.03])
        canvas.box(centre, np.array([0.007, 0.012, 0.03]), FINGER)
    if palm:
        canvas.box(tip + up(0.075), np.array([0.062, 0.022, 0.016]), ARM)


def _draw(canvas: Canvas, scene: Scene, moment: Moment, *, arm: bool) -> bytes:
    _table(canvas, scene)
    ground = np.array([1.0, 1.0, 0.0])
    canvas.disc(moment.block * ground + up(0.001), 0.040, SHADOW)
    if arm:
        canvas.disc(moment.gripper * ground + up(0.001), 0.045, SHADOW)
        shoulder, wrist = BASE + up(0.34), moment.gripper + up(0.11)
        elbow = (shoulder + wrist) / 2 + up(0.14)
        canvas.box(BASE + up(0.02), np.array([0.07, 0.05, 0.02]), JOINT)
        canvas.limb([BASE + up(0.04), shoulder], 0.036, ARM, JOINT)
        canvas.limb([shoulder, elbow, wrist], 0.026, ARM, JOINT)
    block = (moment.block, np.full(3, BLOCK), scene.task.colour)
    # The farther of two solids goes first: across the table that is the one with the smaller y, from above the block.
    gripper_first = arm and moment.gripper[1] <= moment.block[1]
    if gripper_first:
        _gripper(canvas, moment, palm=arm)
    canvas.box(*block)
    if not gripper_first:
        _gripper(canvas, moment, palm=arm)
    return canvas.jpeg()


def render(scene: Scene, moment: Moment) -> tuple[bytes, bytes]:
    """Encoded pictures of one moment: head camera, wrist camera (JPEG, RGB, 256x256)."""
    wrist = wrist_camera(moment.gripper)
    return _draw(Canvas(HEAD), scene, moment, arm=True), _draw(Canvas(wrist), scene, moment, arm=False)
