"""What a checkpoint of this moment holds, copied out of reach of the next step without holding it up.

The ranks of machine 0 share out the tensors by size; each copies and writes its own files. A copy is made in the
cheapest place there is room for: on the GPU (milliseconds), else in page-locked host memory by a stream of its own,
which the next update of the weights waits for (the forward and backward pass before it do not). Sharded tensors are
gathered one by one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dm05_train.checkpoint import RunState
from dm05_train.config import as_plain
from dm05_train.env import World
from dm05_train.model.weights import EMBEDDING, LM_HEAD, Packed, released_tensors
from dm05_train.optim.state import state_tensors
from dm05_train.parallel import is_sharded, whole

if TYPE_CHECKING:
    from dm05_train.loop import Run

MODEL_FILE = "model.safetensors"
RNG_FILE = "training/rng.safetensors"
LARGE_BYTES = 1 << 30
PARTS_WHEN_LARGE = 4
SPARE_GPU_BYTES = 3 << 30
ALIGN = 256

Key = tuple[str, str]
"""Kind of state ("" for a weight) and the parameter's name in this run."""


class Ready(Protocol):
    """Something to wait for."""

    def synchronize(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A rank's part of a checkpoint: file -> name -> tensor, free to be read at leisure once ``ready``."""

    state: RunState
    files: Mapping[str, Mapping[str, Tensor]]
    ready: Ready | None = None
    aliases: Mapping[str, str] = field(default_factory=lambda: {LM_HEAD: EMBEDDING})

    def aliases_of(self, file: str) -> Mapping[str, str]:
        """Further names for tensors of a file."""
        return self.aliases if file == MODEL_FILE else {}


class HostBuffer:
    """Page-locked host memory of exactly this size (torch's own would round it up to a power of two)."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8)
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self.locked = int(cudart.cudaHostRegister(self.bytes.data_ptr(), size, 0)) == 0

    def __del__(self) -> None:
        if self.locked:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())  # type: ignore[no-untyped-call]


class HostCopy:
    """Tensors of a GPU on their way into a host buffer, in a stream and a thread of their own.

    The thread is there because a stream takes about a thousand copies and then makes the one who asks for more wait.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], device: torch.device) -> None:
        self.done = torch.cuda.Event()
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread = threading.Thread(target=self._ask, args=(pairs,), name="snapshot", daemon=True)
        self._thread.start()

    def _ask(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            for place, tensor in pairs:
                place.copy_(tensor, non_blocking=True)
            self.done.record(self._stream)

    def before_update(self) -> None:
        """To be called before the tensors change: the GPU's later work waits for the copies."""
        self._thread.join()
        torch.cuda.current_stream().wait_event(self.done)

    def synchronize(self) -> None:
        """Wait until the copies are there."""
        self._thread.join()
        self.done.synchronize()


@dataclass(kw_only=True)
class Buffers:
    """Memory for snapshots, kept from one to the next; a snapshot is good until the next is taken."""

    device: Tensor | None = None
    host: HostBuffer | None = None

    def on_device(self, size: int, device: torch.device) -> Tensor | None:
        """That many bytes on the GPU, if there is room."""
        if self.device is not None and self.device.numel() < size:
            self.device = None
        if self.device is None and torch.cuda.mem_get_info(device)[0] > size + SPARE_GPU_BYTES:
            self.device = torch.empty(size, dtype=torch.uint8, device=device)
        return self.device

    def on_host(self, size: int) -> Tensor:
        """That many bytes of page-locked host memory."""
        if self.host is None or self.host.bytes.numel() < size:
            self.host = HostBuffer(size)
        return self.host.bytes


def take_snapshot(run: Run) -> Snapshot:
    """Copy this rank's part of the weights, optimizer state and counters. All ranks call it at the same step."""
    state = RunState(
        run=run.name,
        step=run.step,
        samples=run.samples,
        seed=run.seed,
        updates=int(run.optimizer.steps.item()),
        optimizer=run.config.optimizer_config.optim,
        precision=run.precision,
        dataset=run.config.data_config.dataset_name,
        dataset_samples=run.dataset_size,
        world=run.world.size,
        config=as_plain(run.config),
        saved=time.time(),
    )
    tensors = {("", name): parameter.detach() for name, parameter in run.model.named_parameters()}
    tensors |= state_tensors(run.optimizer)
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
    mine = own_files(run.world, sizes)
    copies, ready = copy_out(tensors, [key for keys in mine.values() for key in keys], run)
    packed = run.model.packed
    files = {file: released({key: copies[key] for key in keys}, packed) for file, keys in mine.items()}
    if run.world.is_main:
        files[RNG_FILE] = {"cpu": torch.get_rng_state()}
    return Snapshot(state=state, files=files, ready=ready)


def own_files(world: World, sizes: Mapping[Key, int]) -> dict[str, list[Key]]:
    """The files this rank writes, and what goes into each."""
    if world.node != 0:
        return {}
    weights = [key for key in sizes if not key[0]]
    state = {key: size for key, size in sizes.items() if key[0]}
    parts = PARTS_WHEN_LARGE if sum(state.values()) >= LARGE_BYTES else 1
    count = world.local_size * parts
    shares = deal(state, sum(sizes[key] for key in weights), count, parts)
    files = {MODEL_FILE: weights} if world.is_main else {}
    for number in range(world.local_rank * parts, (world.local_rank + 1) * parts):
        files[f"training/optimizer-{number:05d}-of-{count:05d}.safetensors"] = shares[number]
    return files


def deal(sizes: Mapping[Key, int], model_bytes: int, files: int, parts: int) -> list[list[Key]]:
    """Share state over files so that each rank writes about as much; rank 0's files count with the model's bytes."""
    loads = [model_bytes // parts if number < parts else 0 for number in range(files)]
    shares: list[list[Key]] = [[] for _ in range(files)]
    for key in sorted(sizes, key=lambda k: (-sizes[k], k)):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[key]
        shares[lightest].append(key)
    return shares


def released(tensors: Mapping[Key, Tensor], packed: Packed) -> dict[str, Tensor]:
    """Tensors by the names they have in a checkpoint's file: ``NAME`` for weights, ``KIND:NAME`` for state."""
    found: dict[str, Tensor] = {}
    for (kind, name), tensor in tensors.items():
        for own, part in released_tensors({name: tensor}, packed):
            found[f"{kind}:{own}" if kind else own] = part
    return found


@torch.no_grad()
def copy_out(tensors: Mapping[Key, Tensor], mine: list[Key], run: Run) -> tuple[dict[Key, Tensor], Ready | None]:
    """Whole copies of this rank's tensors as they are now, and what says that they can be read (None: at once)."""
    if any(is_sharded(tensor) for tensor in tensors.values()):
        return _gather(tensors, set(mine)), None
    if run.world.device.type != "cuda":
        return {key: tensors[key].clone() for key in mine}, None
    size = sum(_room(tensors[key]) for key in mine)
    buffer = run.buffers.on_device(size, run.world.device)
    copies = _places({key: tensors[key] for key in mine}, buffer if buffer is not None else run.buffers.on_host(size))
    if buffer is None:
        run.copying = HostCopy([(copies[key], tensors[key]) for key in mine], run.world.device)
        return copies, run.copying
    for key in mine:
        copies[key].copy_(tensors[key])
    event = torch.cuda.Event()
    event.record()
    return copies, event


def _places(tensors: Mapping[Key, Tensor], buffer: Tensor) -> dict[Key, Tensor]:
    """Views of a buffer in the shapes of the tensors, one after the other."""
    places, offset = {}, 0
    for key, tensor in tensors.items():
        part = buffer[offset : offset + tensor.numel() * tensor.element_size()]
        places[key] = part.view(tensor.dtype).view(tensor.shape)
        offset += _room(tensor)
    return places


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN


def _gather(tensors: Mapping[Key, Tensor], mine: set[Key]) -> dict[Key, Tensor]:
    """Each tensor made whole on all ranks in turn; a rank keeps its own on the host."""
    kept = {}
    for key, tensor in tensors.items():
        full = whole(tensor)
        if key in mine:
            kept[key] = full.to("cpu", copy=True)
    return kept
