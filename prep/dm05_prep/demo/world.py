"""The demo's little world: one arm, one object, a plate and a basket, and a controller that knows where to go.

Positions are metres in a frame whose origin is the middle of the table, x to the arm's left, y away from the arm, z up.
The controller has no memory: the action is a smooth function of what the cameras see (gripper, object, where the task
says to put it), so that a model can learn it from single frames. The next state follows from the state and the action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

BASE = np.array([0.0, -0.46, 0.0])  # where the arm stands
OPEN, CLOSED = 0.040, 0.014  # finger travel from the middle, metres
BLOCK = 0.030  # half the edge of the object, metres
STEP = np.array([0.035, 0.035, 0.035])  # metres moved by an action of 1
TURN = np.array([0.12, 0.12, 0.12])  # radians turned by an action of 1
HOME = np.array([0.0, -0.12, 0.26])
GRASP_HEIGHT = 0.030
CARRY_HEIGHT = 0.22


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to do, in words, and what it means: which object goes where."""

    text: str
    colour: tuple[int, int, int]
    target: str  # "plate" or "basket"


TASKS = (
    Task(text="put the red block on the plate", colour=(214, 48, 49), target="plate"),
    Task(text="put the blue block in the basket", colour=(36, 113, 203), target="basket"),
    Task(text="pick up the yellow block and place it on the plate", colour=(240, 186, 20), target="plate"),
    Task(text="把绿色的方块放进篮子里", colour=(32, 150, 84), target="basket"),
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Where everything is at the start of an episode; positions on the table are (x, y)."""

    task: Task
    start: Vector  # gripper, [3]
    block: Vector  # [2]
    plate: Vector  # [2]
    basket: Vector  # [2]

    @property
    def goal(self) -> Vector:
        """Where the object belongs, [2]."""
        return self.plate if self.task.target == "plate" else self.basket


@dataclass(frozen=True, kw_only=True)
class Moment:
    """All that a camera can see at one instant."""

    gripper: Vector  # the point between the finger tips, [3]
    opening: float  # finger travel from the middle, metres
    block: Vector  # the middle of the object, [3]


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode: n moments with the state seen and the action taken at each."""

    scene: Scene
    moments: tuple[Moment, ...]
    state: Vector  # [n, 8]: x, y, z, roll, pitch, yaw, left finger, right finger
    action: Vector  # [n, 7]: change of the first six in units of STEP and TURN, gripper -1 open or 1 closed


def draw_scene(task: Task, rng: np.random.Generator) -> Scene:
    """A scene with the object somewhere in the middle and both targets near their usual corners."""
    return Scene(
        task=task,
        start=HOME + rng.uniform([-0.16, -0.06, -0.05], [0.16, 0.06, 0.05]),
        block=rng.uniform([-0.12, -0.02], [0.12, 0.20]),
        plate=np.array([0.20, 0.02]) + rng.uniform(-0.02, 0.02, 2),
        basket=np.array([-0.20, 0.02]) + rng.uniform(-0.02, 0.02, 2),
    )


def orientation(gripper: Vector) -> Vector:
    """Roll, pitch and yaw of the wrist at a place, radians: it faces away from the base and tilts as it reaches."""
    reach = gripper[:2] - BASE[:2]
    yaw = np.arctan2(reach[0], reach[1])
    pitch = 0.9 * (gripper[2] - 0.15)
    roll = 0.8 * (np.hypot(*reach) - 0.45)
    return np.array([roll, pitch, yaw])


def _pull(wanted: Vector) -> Vector:
    """A way to go [3], metres, as a velocity in units of STEP, each within (-1, 1)."""
    velocity: Vector = np.tanh(0.35 * wanted / STEP)
    return velocity


def _towards(gripper: Vector, spot: Vector, floor: float) -> Vector:
    """Velocity in units of STEP, each within (-1, 1): sideways to the spot, and down a funnel that ends over it."""
    sideways = spot - gripper[:2]
    distance = float(np.hypot(*sideways))
    height = floor + (CARRY_HEIGHT - floor) * np.tanh(max(distance - 0.015, 0.0) / 0.10)
    wanted = np.array([*sideways, height - gripper[2]])
    return _pull(wanted)


def simulate(scene: Scene, length: int) -> Trajectory:
    """Run the controller for ``length`` frames: reach, grasp, carry, release, go home and wait there."""
    gripper, opening = scene.start.copy(), OPEN
    block = np.array([*scene.block, BLOCK])
    held, done = False, False
    moments, states, actions = [], [], []
    for _ in range(length):
        moments.append(Moment(gripper=gripper.copy(), opening=opening, block=block.copy()))
        states.append(np.array([*gripper, *orientation(gripper), opening, -opening]))
        over = np.hypot(*(gripper[:2] - (scene.goal if held else scene.block)))
        low = gripper[2] < GRASP_HEIGHT + 0.012
        grip = 1.0 if held else -1.0
        if done:
            move = _pull(HOME - gripper)
        elif not held:
            move = _towards(gripper, scene.block, GRASP_HEIGHT)
            if over < 0.012 and low:
                grip = 1.0
        else:
            move = _towards(gripper, scene.goal, GRASP_HEIGHT + 0.01)
            if over < 0.015 and low:
                grip = -1.0
        # Fingers need a few frames; the arm waits for them, as the pictures show.
        waiting = (grip > 0 and opening > CLOSED + 1e-9) or (grip < 0 and opening < OPEN - 1e-9)
        if waiting and not done:
            move = 0.2 * move
        opening = float(np.clip(opening + (-0.010 if grip > 0 else 0.010), CLOSED, OPEN))
        moved = gripper + STEP * move
        turned = (orientation(moved) - orientation(gripper)) / TURN
        actions.append(np.array([*move, *turned, grip]))
        if held and grip < 0:
            held, done = False, True
        elif not done and grip > 0 and opening <= CLOSED:
            held = True
        if held:
            block = block + (moved - gripper)
        elif done:
            block[2] = BLOCK
        gripper = moved
    return Trajectory(scene=scene, moments=tuple(moments), state=np.stack(states), action=np.stack(actions))
