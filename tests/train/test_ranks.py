"""A global batch gives the same losses and gradients however it is split over ranks and accumulation steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import rank_equal


@pytest.mark.slow
def test_losses_do_not_depend_on_the_split(tmp_path: Path) -> None:
    program = Path(rank_equal.__file__)
    ranks = [subprocess.Popen([sys.executable, str(program), str(r), str(tmp_path)]) for r in range(4)]
    assert [process.wait() for process in ranks] == [0, 0, 0, 0]
    curves = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(curves) == len(rank_equal.SPLITS)
    whole = curves["ddp-1-1"]
    for name, found in curves.items():
        assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6), name
        assert found["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5), name
