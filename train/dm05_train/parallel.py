"""One model over several GPUs: DDP (a whole model on each) or FSDP2 (weights, gradients and moments in shards)."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dm05_train.env import World
from dm05_train.model.dm05 import DM05

_RECORDED: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def wrap(
    model: DM05,
    world: World,
    parallel: str,
    *,
    bucket_mb: int | None = None,
    static_graph: bool = False,
    graphed: bool = False,
) -> nn.Module:
    """The model in DDP or FSDP; alone, the model itself.

    Args:
        bucket_mb: size of DDP's buckets, which then are the gradients' memory too; None: as torch has it.
        static_graph: promise DDP that every step uses the same parameters in the same order.
        graphed: its backward will be captured in a CUDA graph.
    """
    if world.size == 1:
        return model
    if parallel == "fsdp":
        return shard(model, world)
    with side_stream() if graphed else contextlib.nullcontext():
        return data_parallel(model, world, bucket_mb=bucket_mb, static_graph=static_graph)


def data_parallel(
    model: nn.Module, world: World, *, bucket_mb: int | None = None, static_graph: bool = False
) -> nn.Module:
    """The model in DDP.

    Parameters that feed nothing do not require gradients, so DDP never waits for them and scans for none.
    """
    on_gpu = world.device.type == "cuda"
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if on_gpu else None,
        gradient_as_bucket_view=bucket_mb is not None,
        bucket_cap_mb=bucket_mb,
        static_graph=static_graph,
    )


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    """A stream beside the current one, in order with it: where torch wants DDP made whose backward is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def shard(model: DM05, world: World) -> DM05:
    """Shard a model in place, layer by layer; its parameters become DTensors split on their first dim."""
    # Keys and values are views that nothing writes to.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    mesh = dist.device_mesh.init_device_mesh(world.device.type, (world.size,))
    for layer in [*model.language.layers, *model.expert.layers, *model.vision.encoder.layers]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Sum gradients over ranks only in the last of the batches that are added up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, DistributedDataParallel) and not (last or _records_its_graph(model)):
        with model.no_sync():
            yield
    else:
        yield


def _records_its_graph(model: DistributedDataParallel) -> bool:
    """Whether this is the backward pass from which DDP learns a static graph, which has to sum over ranks.

    (Summing once more than needed changes nothing: what is summed already is the same on all ranks.)
    """
    if not model.static_graph or model in _RECORDED:
        return False
    _RECORDED.add(model)
    return True


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only a part of a tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded, on every rank (a collective when it is)."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor
