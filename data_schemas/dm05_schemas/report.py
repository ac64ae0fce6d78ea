"""The report of a validation and its JSON form (``schemas/validate_report.schema.json``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dm05_schemas.commands import aimed
from dm05_schemas.findings import KINDS, Finding
from dm05_schemas.workspace import Workspace

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a validation looked at (None: not known how much), and everything it found; ``seconds`` it took."""

    dataset: str
    workspace: str
    deep: bool
    episodes: int | None
    frames: int | None
    images: int
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        """Findings that make training refuse the data."""
        return sum(item.severity == "error" for item in self.findings)

    @property
    def warnings(self) -> int:
        """Findings that a person should look at."""
        return len(self.findings) - self.errors

    def fix(self, kind: str) -> str | None:
        """What mends a kind of finding: the command as it is to be run here."""
        fix = KINDS[kind].fix
        return fix and aimed(fix, self.dataset, Workspace(Path(self.workspace)))

    def groups(self) -> dict[str, list[Finding]]:
        """Findings by kind: errors first, in the order of the table of kinds."""
        found: dict[str, list[Finding]] = {}
        for item in self.findings:
            found.setdefault(item.kind, []).append(item)
        order = {kind: (entry.severity != "error", place) for place, (kind, entry) in enumerate(KINDS.items())}
        return dict(sorted(found.items(), key=lambda group: order[group[0]]))

    def relative(self, path: str) -> str:
        """``path`` below the workspace, as it is when it lies elsewhere."""
        inside = path.startswith(self.workspace.rstrip(os.sep) + os.sep)
        return os.path.relpath(path, self.workspace) if inside else path

    def document(self) -> Mapping[str, Any]:
        """The report as JSON values."""
        return {
            "format": FORMAT,
            "dataset": self.dataset,
            "workspace": self.workspace,
            "deep": self.deep,
            "episodes": self.episodes,
            "frames": self.frames,
            "images": self.images,
            "seconds": round(self.seconds, 3),
            "errors": self.errors,
            "warnings": self.warnings,
            "groups": [
                {
                    "kind": kind,
                    "severity": KINDS[kind].severity,
                    "title": KINDS[kind].title,
                    "count": len(items),
                    "fix": self.fix(kind),
                }
                for kind, items in self.groups().items()
            ],
            "findings": [
                {
                    "kind": item.kind,
                    "severity": item.severity,
                    "path": self.relative(item.path),
                    "line": item.line,
                    "detail": item.detail,
                }
                for item in self.findings
            ],
        }
