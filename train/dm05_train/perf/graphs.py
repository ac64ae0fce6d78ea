"""R18: forward and backward of one micro-batch as a CUDA graph.

A graph replays fixed addresses, so everything that changes from step to step goes in through static tensors: the
batch, and the global sample positions from which noise and times are drawn inside the graph. There are two
graphs: one writes the gradients (the first micro-batch of a step), one adds to them; under DDP with accumulation the
micro-batch that sums over ranks has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    loss: Tensor


class GraphedBackward:
    """``loss_of(batch, positions)`` and its backward, replayed for the first batch shape it meets; others run eagerly.

    Args:
        loss_of: gives the scalar loss of a micro-batch, without any host synchronisation.
        parameters: those that get a gradient.
        syncs: whether a backward now would sum gradients over ranks (that is recorded too).
        warm_up: eager passes before a recording, for what compiles, tunes or rebuilds itself at first.
        say: told once that a batch cannot be replayed, and why.
    """

    def __init__(
        self,
        loss_of: Callable[[Batch, Tensor], Tensor],
        parameters: list[nn.Parameter],
        *,
        syncs: Callable[[], bool] = lambda: True,
        warm_up: int = 3,
        say: Callable[[str], None] = print,
    ) -> None:
        self.loss_of, self.parameters, self.syncs, self.warm_up, self.say = loss_of, parameters, syncs, warm_up, say
        self.inputs: dict[str, Tensor] = {}
        self.graphs: dict[tuple[bool, bool], _Graph] = {}
        self.gradients: list[Tensor | None] = []
        self.told = False

    def __call__(self, batch: Batch, positions: Tensor, *, first: bool) -> Tensor:
        """Forward and backward; gradients are written (``first``) or added to.

        Returns:
            The loss, a scalar on the device.
        """
        tensors = {name: t for name, t in batch.items() if t.is_cuda} | {"positions": positions}
        if not self.inputs:
            self.inputs = {name: torch.empty_like(t) for name, t in tensors.items()}
        shape, known = ({n: tuple(t.shape) for n, t in each.items()} for each in (tensors, self.inputs))
        if shape != known:
            return self._eager(tensors, first=first)
        for name, static in self.inputs.items():
            static.copy_(tensors[name], non_blocking=True)
        key = (first, self.syncs())
        if key not in self.graphs:
            self.graphs[key] = self._capture(first=first)
        self._restore()
        self.graphs[key].graph.replay()
        return self.graphs[key].loss.clone()

    def _restore(self) -> None:
        """Put the graphs' own gradient tensors in place."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    def _eager(self, tensors: dict[str, Tensor], *, first: bool) -> Tensor:
        if not self.told:
            new, old = tuple(tensors["input_ids"].shape), tuple(self.inputs["input_ids"].shape)
            self.say(f"a batch of {new} tokens runs without the CUDA graph, which was made for {old}")
            self.told = True
        self._restore()
        if first:
            torch._foreach_zero_([g for g in self.gradients if g is not None])
        return self._run(tensors)

    def _run(self, tensors: dict[str, Tensor]) -> Tensor:
        loss = self.loss_of({n: t for n, t in tensors.items() if n != "positions"}, tensors["positions"])
        loss.backward()
        return loss.detach()

    def _capture(self, *, first: bool) -> _Graph:
        """Warm up on a side stream, then record. The first recording makes the gradient tensors of all."""
        kept = [p.grad for p in self.parameters]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.warm_up):
                for parameter in self.parameters:
                    parameter.grad = None
                self._run(self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = None if first else gradient
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values())).graph.pool() if self.graphs else None
        # The loader's pinning thread may call CUDA meanwhile: only this thread's calls are checked.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            loss = self._run(self.inputs)
        if not self.gradients:
            self.gradients = [p.grad for p in self.parameters]
        return _Graph(graph, loss)
