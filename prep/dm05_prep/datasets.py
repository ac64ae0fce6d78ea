"""``dm05-prep datasets``: the registered datasets, built in and the user's."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from dm05_schemas.registry import BUILT_IN, DatasetSpec, all_specs, lookup
from dm05_schemas.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class DatasetsCommand:
    """List the datasets that --dataset-name takes: six of LIBERO, and those of your datasets.toml or datasets.json.

    To add one, write a table to WORKSPACE/datasets.toml (or name another file in $DM05_DATASETS):

      [my_robot]
      folder = "data/my_robot"
      image_keys = ["images_1"]
      image_prompts = ["Head"]
      state_desc = ["joint", "joint", "joint", "joint", "joint", "joint", "gripper"]
      action_dim = 7

    Examples:
      dm05-prep datasets
      dm05-prep datasets --name libero_pi0_all      everything known of one
    """

    name: str | None = None
    """Show everything known of this one."""
    workspace: Path | None = None
    """Workspace folder (default: $WORKSPACE_DIR, else the current folder)."""
    quiet: bool = False
    """Names alone, one a line."""

    def run(self) -> None:
        """Do it."""
        workspace = Workspace.resolve(self.workspace)
        if self.name is not None:
            print(details(lookup(self.name, workspace)))
            return
        specs = all_specs(workspace)
        if self.quiet:
            print("\n".join(specs))
            return
        print(table(list(specs.values()), workspace))


def table(specs: list[DatasetSpec], workspace: Workspace) -> str:
    """One line a dataset: name, dims, mode, cameras, folder, whether it is here and who registered it."""
    rows = [("name", "state", "action", "mode", "cameras", "here", "registered", "folder")]
    for spec in specs:
        rows.append(
            (
                spec.name,
                str(spec.state_dim),
                str(spec.action_dim),
                spec.action_mode,
                str(len(spec.image_keys)),
                "yes" if spec.jsonl(workspace).is_dir() else "no",
                "built in" if spec in BUILT_IN else "yours",
                spec.folder.as_posix(),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def details(spec: DatasetSpec) -> str:
    """The entry of one dataset as it would stand in datasets.toml."""
    bare = re.fullmatch(r"[A-Za-z0-9_\-]+", spec.name)
    lines = [f"[{spec.name if bare else json.dumps(spec.name, ensure_ascii=False)}]"]
    for key, value in vars(spec).items():
        if key == "name" or value is None:
            continue
        lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(json.dumps(item, ensure_ascii=False) for item in value) + "]"
    if isinstance(value, Path):
        return json.dumps(value.as_posix(), ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)
