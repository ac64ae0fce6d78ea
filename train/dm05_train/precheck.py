"""What a run needs, looked at before any of its processes is started, so that what is wrong is said once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from dm05_schemas.commands import aiming
from dm05_schemas.registry import lookup
from dm05_schemas.workspace import Workspace

from dm05_train.config import TrainConfig
from dm05_train.data.dataset import check_source
from dm05_train.perf.switches import Switches
from dm05_train.start import find_start


def check_before_start(config: TrainConfig, environ: Mapping[str, str], *, machines: int) -> None:
    """Look at the environment and, on a single machine, at the files; the flags were read already.

    Of several machines one may lack what the others have: there the ranks tell all machines, so that none waits in
    vain for one that has given up.

    Raises:
        DM05Error: the run cannot start.
    """
    with warnings.catch_warnings():  # rank 0 says them
        warnings.simplefilter("ignore")
        Switches.from_env(environ)
    if machines > 1:
        return
    workspace = Workspace.resolve(config.workspace)
    spec = lookup(config.data_config.dataset_name, workspace)
    with aiming(workspace, spec.name):
        find_start(config, workspace)
        check_source(workspace, spec, config.data_config.layout)
