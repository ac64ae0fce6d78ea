"""The datasets by name: where they lie, what their frames hold, how their prompts read.

The six LIBERO subsets are built in. A user adds datasets in ``WORKSPACE/datasets.toml`` (or ``datasets.json`` with the
same keys, or the file that $DM05_DATASETS names), one table a dataset; only the first five keys are required::

    [my_robot]
    folder = "data/my_robot"            # relative to the workspace, inside it
    image_keys = ["images_1"]           # keys of a frame, one a camera
    image_prompts = ["Head"]            # their labels in the prompt
    state_desc = ["joint", "joint", "gripper"]   # one word a state dimension: joint, eef or gripper
    action_dim = 3
    jsonl_dir = "jsonl"                 # folder of the episode files
    image_dir = "image"                 # folder that urls start from: image, video, or "." for the dataset's own
    action_mode = "absolute"            # or "relative"
    robot_type = "Franka"               # first line of the prompt, left out when not given
    control_mode = "..."                # second line, left out when not given
    speed = "0.5"
    state_in_prompt = false
"""

from __future__ import annotations

import difflib
import re
import sys
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from dm05_schemas import strict_json
from dm05_schemas.errors import DataError
from dm05_schemas.workspace import Workspace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ActionMode = Literal["absolute", "relative"]
ACTION_MODES: tuple[ActionMode, ...] = ("absolute", "relative")
STATE_WORDS = ("joint", "eef", "gripper")
MAX_DIM = 32


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """What the tools know of one dataset; see the module's text for each field."""

    name: str
    folder: Path
    jsonl_dir: str = "jsonl"
    image_dir: str = "image"
    image_keys: tuple[str, ...]
    image_prompts: tuple[str, ...]
    robot_type: str | None = None
    control_mode: str | None = None
    speed: str = "0.5"
    state_desc: tuple[str, ...]
    action_dim: int
    action_mode: ActionMode = "absolute"
    state_in_prompt: bool = False

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise DataError(problem, where=f"dataset {self.name}")

    @property
    def state_dim(self) -> int:
        """Number of state dimensions S."""
        return len(self.state_desc)

    @property
    def gripper_dims(self) -> tuple[int, ...]:
        """The state dimensions that stay absolute in relative mode."""
        return tuple(dim for dim, word in enumerate(self.state_desc) if word == "gripper")

    def root(self, workspace: Workspace) -> Path:
        """The dataset's folder."""
        return workspace.locate(PurePosixPath(self.folder.as_posix()))

    def jsonl(self, workspace: Workspace) -> Path:
        """The folder of the episode files."""
        return self.root(workspace) / self.jsonl_dir

    def images(self, workspace: Workspace) -> Path:
        """The folder that urls of frames start from."""
        return self.root(workspace) / self.image_dir


def lookup(name: str, workspace: Workspace) -> DatasetSpec:
    """The dataset called ``name``, the user's own entries first.

    Raises:
        DataError: no such dataset (the nearest names are offered), or the user's file is not right.
    """
    specs = all_specs(workspace)
    if name in specs:
        return specs[name]
    near = difflib.get_close_matches(name, specs, n=3, cutoff=0.5)
    offer = f"Did you mean {' or '.join(near)}? " if near else ""
    raise DataError(f"no dataset is called {name!r}", fix=f"{offer}dm05-prep datasets lists them all")


def all_specs(workspace: Workspace) -> dict[str, DatasetSpec]:
    """Every dataset by name: the built-in ones, then the user's (which may replace a built-in one)."""
    path = workspace.datasets_file
    return {spec.name: spec for spec in BUILT_IN} | (read_specs(path) if path else {})


def read_specs(path: Path) -> dict[str, DatasetSpec]:
    """The entries of a user's TOML or JSON file.

    Raises:
        DataError: not readable, an unknown or missing key, or a value of the wrong kind, named with its dataset.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        tables = strict_json.parse(text.encode()) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # decoding errors of UTF-8, TOML and JSON are all ValueErrors
        raise DataError(f"cannot be read: {error}", where=path, fix="Mend the file") from error
    if not isinstance(tables, dict):
        raise DataError("must hold one table a dataset", where=path)
    return {name: _spec_of(name, table, path) for name, table in tables.items()}


def _spec_of(name: str, table: object, path: Path) -> DatasetSpec:
    where = f"{path}: [{name}]"
    if not isinstance(table, dict):
        raise DataError("must be a table of keys and values", where=where)
    known = {field.name: field for field in fields(DatasetSpec) if field.name != "name"}
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            offer = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(known)}"
            raise DataError(f"unknown key {key!r}", where=where, fix=offer)
    missing = [key for key, field in known.items() if field.default is MISSING and key not in table]
    if missing:
        raise DataError(f"{', '.join(missing)} must be given", where=where)
    values = {key: _value(key, value, where) for key, value in table.items()}
    try:
        return DatasetSpec(name=name, **values)
    except DataError as error:
        raise DataError(error.what, where=where) from None


def _value(key: str, value: object, where: str) -> Any:
    """``value`` as the type of the field ``key``; numbers and booleans are not read out of strings."""
    if key in ("image_keys", "image_prompts", "state_desc"):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise DataError(f"{key} must be a list of strings", where=where)
    expected: type = {"action_dim": int, "state_in_prompt": bool}.get(key, str)
    if type(value) is not expected:
        kind = {int: "an integer", bool: "true or false", str: "a string"}[expected]
        raise DataError(f"{key} must be {kind}, not {value!r}", where=where)
    return Path(value) if key == "folder" else value  # type: ignore[arg-type]


def _problems(spec: DatasetSpec) -> list[str]:
    found = []
    if not re.fullmatch(r"\w[\w.\-]*", spec.name):
        found.append("a name holds letters, digits, '_', '-' and '.' only")
    for key, value in (
        ("folder", spec.folder.as_posix()),
        ("jsonl_dir", spec.jsonl_dir),
        ("image_dir", spec.image_dir),
    ):
        if not _inside(value) and (key, value) != ("image_dir", "."):
            found.append(f"{key} must be a relative path that stays inside, not {value!r}")
    if not spec.image_keys or len(set(spec.image_keys)) != len(spec.image_keys):
        found.append("image_keys must name at least one camera, each once")
    taken = sorted({"state", "action", "prompt", "is_robot"}.intersection(spec.image_keys))
    if taken:
        found.append(f"image_keys must not name {taken[0]!r}, which is another part of a frame")
    if len(spec.image_prompts) != len(spec.image_keys):
        found.append(f"{len(spec.image_keys)} image_keys need as many image_prompts, not {len(spec.image_prompts)}")
    if not spec.state_desc or any(word not in STATE_WORDS for word in spec.state_desc):
        found.append(f"state_desc must name every state dimension with one of {', '.join(STATE_WORDS)}")
    if not 1 <= spec.action_dim <= MAX_DIM:
        found.append(f"action_dim must be 1 to {MAX_DIM}, not {spec.action_dim}")
    if spec.action_mode not in ACTION_MODES:
        found.append(f"action_mode must be absolute or relative, not {spec.action_mode!r}")
    if spec.action_mode == "relative" and spec.state_dim != spec.action_dim:
        found.append(
            f"relative mode needs as many action as state dimensions, not {spec.action_dim} and {spec.state_dim}"
        )
    return found


def _inside(text: str) -> bool:
    path = PurePosixPath(text)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in text


_PI0_ALL = DatasetSpec(
    name="libero_pi0_all",
    folder=Path("data/libero/libero_pi0_all"),
    image_keys=("images_1", "images_2"),
    image_prompts=("Head", "Left wrist"),
    robot_type="Franka",
    state_desc=("joint",) * 6 + ("gripper",) * 2,
    action_dim=7,
)


def _libero(name: str, image_dir: str) -> DatasetSpec:
    return replace(_PI0_ALL, name=name, folder=Path("data/libero") / name, image_dir=image_dir)


BUILT_IN: tuple[DatasetSpec, ...] = (
    _PI0_ALL,
    *(_libero(name, "video") for name in ("libero_goal", "libero_10", "libero_spatial", "libero_object")),
    _libero("libero_oft_all", "."),
)
