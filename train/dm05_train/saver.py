"""Saving while the run goes on: a snapshot in host memory, then a background thread that writes and publishes it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dm05_train.checkpoint import checkpoint_name, publish, rotate, write_tensors
from dm05_train.env import World
from dm05_train.errors import TrainError
from dm05_train.model.weights import EMBEDDING, LM_HEAD
from dm05_train.snapshot import Snapshot


class Saver:
    """Writes one checkpoint at a time in the background.

    Args:
        output: where checkpoints go.
        extras: small files of every checkpoint: place in the folder -> content.
        keep: how many of the run's checkpoints to keep (None: all).
        say: gets a line when a checkpoint is published.
        last: the last good checkpoint of the run so far.
    """

    def __init__(
        self, world: World, output: Path, *, extras: Mapping[str, bytes], keep: int | None, say: Callable[[str], None]
    ) -> None:
        self.world, self.output, self.keep, self.say = world, output, keep, say
        self.extras = dict(extras)
        self.last = last
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Start writing; waits for the one before to be published.

        Raises:
            TrainError: the one before could not be written.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until nothing is being written.

        Raises:
            TrainError: it could not be written (disk full, folder gone).
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            where = getattr(error, "filename", None) or self.output
            reason = getattr(error, "strerror", None) or error
            good = f"The last good checkpoint is {self.last}" if self.last else "There is no earlier checkpoint"
            raise TrainError(f"cannot write a checkpoint: {reason}", where=where, fix=good) from None

    def _run(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        except BaseException as error:  # handed to the training thread by wait()
            self._error = error

    def _write(self, snapshot: Snapshot) -> None:
        began = time.monotonic()
        state = snapshot.state
        final = self.output / checkpoint_name(state.step)
        temporary = self.output / f".{final.name}.{state.run}"
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "training").mkdir(parents=True)
        try:
            write_tensors(temporary / "model.safetensors", snapshot.weights, {LM_HEAD: EMBEDDING})
            write_tensors(temporary / "training" / "optimizer-00000-of-00001.safetensors", snapshot.optimizer)
            write_tensors(temporary / "training" / "rng.safetensors", snapshot.rng)
            for place, content in self.extras.items():
                (temporary / place).parent.mkdir(parents=True, exist_ok=True)
                (temporary / place).write_bytes(content)
            publish(temporary, final, state)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.last = final
        self.say(f"saved {final} ({time.monotonic() - began:.1f} s in the background)")
        for old in rotate(self.output, state.run, self.keep):
            self.say(f"removed {old}")
