"""Saving while the run goes on: a background thread writes a snapshot's files and publishes the checkpoint.

Every rank of machine 0 writes its files into one temporary folder and leaves a note there when it is done; rank 0 waits
for the notes, adds the small files, and publishes.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dm05_train.checkpoint import checkpoint_name, publish, rotate, write_tensors
from dm05_train.env import World
from dm05_train.errors import TrainError
from dm05_train.snapshot import PARTS_WHEN_LARGE, Snapshot
from dm05_train.staging import Staging

POLL_SECONDS = 0.05
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_NOTE = "could not write its part, nor a note of why (the disk may be full)"


class Saver:
    """Writes one checkpoint at a time in the background.

    Args:
        output: where checkpoints go.
        extras: small files of every checkpoint: place in the folder -> content (rank 0).
        keep: how many of the run's checkpoints to keep (None: all).
        say: gets a line when a checkpoint is published.
        last: the last good checkpoint of the run so far.
        minutes: how long rank 0 waits for the files of the others.
    """

    def __init__(
        self,
        world: World,
        output: Path,
        *,
        extras: Mapping[str, bytes],
        keep: int | None,
        say: Callable[[str], None],
        last: Path | None = None,
        minutes: float = 10.0,
    ) -> None:
        self.world, self.output, self.keep, self.say = world, output, keep, say
        self.extras, self.last, self.minutes = dict(extras), last, minutes
        self._staging = Staging(world.device, PARTS_WHEN_LARGE + 1 if world.node == 0 else 0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether what was being written could not be; ``wait`` says why."""
        return self._error is not None

    def save(self, snapshot: Snapshot) -> None:
        """Start writing; waits for the one before to be published.

        Raises:
            TrainError: the one before could not be written.
        """
        self.wait()
        if self.world.node == 0:
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
            mend = "make room there (df, df -i)" if getattr(error, "errno", None) in FULL else "mend that"
            fix = f"There is no earlier checkpoint: {mend}, then start again"
            if self.last:
                go_on = f"continue with --model-config.model-name-or-path {self.last}"
                fix = f"The last good checkpoint is {self.last}: {mend}, then {go_on}"
            raise TrainError(f"cannot write a checkpoint: {reason}", where=where, fix=fix) from None

    def _run(self, snapshot: Snapshot) -> None:
        self._use_own_gpu()
        began = time.monotonic()
        final = self.output / checkpoint_name(snapshot.state.step)
        temporary = self.output / f".{final.name}.{snapshot.state.run}"
        try:
            self._write(temporary, snapshot)
            if self.world.is_main:
                self._await_others(temporary)
                publish(temporary, final, snapshot.state)
        except BaseException as error:  # handed to the training thread by wait()
            self._error = error
            self._note(temporary, f"failed: {error}")
            if self.world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            return
        self.last = final
        if self.world.is_main:
            self.say(f"saved {final} ({time.monotonic() - began:.1f} s in the background)")
            self._rotate(snapshot.state.run)

    def _rotate(self, run: str) -> None:
        try:
            for old in rotate(self.output, run, self.keep):
                self.say(f"removed {old}")
        except OSError as error:  # no reason to end a run whose newest checkpoint is there
            self.say(f"cannot remove an older checkpoint: {error}")

    def _use_own_gpu(self) -> None:
        """A new thread begins on GPU 0, which belongs to another rank."""
        if self.world.device.type == "cuda":
            torch.cuda.set_device(self.world.device)

    def _write(self, temporary: Path, snapshot: Snapshot) -> None:
        """Write this rank's files, several at a time where there are several."""
        (temporary / "training").mkdir(parents=True, exist_ok=True)
        if snapshot.ready is not None:
            snapshot.ready.synchronize()
        with ThreadPoolExecutor(max(1, len(snapshot.files)), initializer=self._use_own_gpu) as pool:
            jobs = [
                pool.submit(write_tensors, temporary / file, tensors, snapshot.aliases_of(file), staging=self._staging)
                for file, tensors in snapshot.files.items()
            ]
            for job in jobs:
                job.result()
        for place, content in self.extras.items():
            (temporary / place).parent.mkdir(parents=True, exist_ok=True)
            (temporary / place).write_bytes(content)
        self._note(temporary, "done")

    def _note(self, temporary: Path, text: str) -> None:
        """Tell rank 0 how this rank fared."""
        if self.world.is_main or not temporary.is_dir():
            return
        part = temporary / f".part-{self.world.rank}"
        with contextlib.suppress(OSError):  # a full disk takes the file, but not the text
            part.write_text(text, "utf-8")
        with contextlib.suppress(OSError):  # rank 0 has failed itself and removed the folder
            part.replace(temporary / f".rank-{self.world.rank}")

    def _await_others(self, temporary: Path) -> None:
        """Wait for the notes of machine 0's other ranks, and remove them."""
        end = time.monotonic() + self.minutes * 60
        for rank in range(1, self.world.local_size):
            note = temporary / f".rank-{rank}"
            while not note.exists():
                if time.monotonic() > end:
                    raise TimeoutError(f"rank {rank} has not written its part after {self.minutes:g} minutes")
                time.sleep(POLL_SECONDS)
            text = note.read_text("utf-8")
            if text != "done":
                raise OSError(f"rank {rank} {text or NO_NOTE}")
            note.unlink()
