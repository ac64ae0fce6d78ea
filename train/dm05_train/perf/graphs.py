"""R18: forward and backward of one micro-batch as a CUDA graph.

A graph replays fixed addresses, so everything that changes from step to step goes in through static tensors: the
batch, and the global sample positions from which noise and times are drawn inside the graph. There are two
graphs: one writes the gradients (the first micro-batch of a step), one adds to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WARM_UP = 3

Batch = Mapping[str, Tensor]
Shape = dict[str, tuple[int, ...]]


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    loss: Tensor


class GraphedBackward:
    """``loss_of(batch, positions)`` and its backward, replayed for the first batch shape it meets; others run eagerly.

    Args:
        loss_of: gives the scalar loss of a micro-batch, without any host synchronisation.
        parameters: those that get a gradient.
        say: told once when a batch cannot be replayed, and why.
    """

    def __init__(
        self,
        loss_of: Callable[[Batch, Tensor], Tensor],
        parameters: list[nn.Parameter],
        say: Callable[[str], None] = print,
    ) -> None:
        self.loss_of, self.parameters, self.say = loss_of, parameters, say
        self.inputs: dict[str, Tensor] = {}
        self.graphs: dict[bool, _Graph] = {}
        self.gradients: list[Tensor | None] = []

    def __call__(self, batch: Batch, positions: Tensor, *, first: bool) -> Tensor:
        """Forward and backward; gradients are written (``first``) or added to.

        Returns:
            The loss, a scalar on the device.
        """
        tensors = {**batch, "positions": positions}
        if not self.inputs:
            self.inputs = {name: torch.empty_like(t) for name, t in tensors.items()}
        shape, known = ({n: tuple(t.shape) for n, t in each.items()} for each in (tensors, self.inputs))
        if shape != known:
            self.say(
                f"a batch of shape {shape['input_ids']} runs without its CUDA graph, made for {known['input_ids']}"
            )
            self._restore(first)
            return self._run(tensors)
        for name, static in self.inputs.items():
            static.copy_(tensors[name], non_blocking=True)
        if first not in self.graphs:
            self.graphs[first] = self._capture(first)
        self._restore(first=False)
        self.graphs[first].graph.replay()
        return self.graphs[first].loss.clone()

    def _restore(self, first: bool) -> None:
        """Put the graph's own gradient tensors in place; an eager first micro-batch finds them zeroed."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
            if first and gradient is not None:
                gradient.zero_()

    def _run(self, tensors: dict[str, Tensor]) -> Tensor:
        loss = self.loss_of({n: t for n, t in tensors.items() if n != "positions"}, tensors["positions"])
        loss.backward()
        return loss.detach()

    def _capture(self, first: bool) -> _Graph:
        """Warm up (compile, autotune) on a side stream, then record. The first recording makes the gradient tensors."""
        kept = [p.grad for p in self.parameters]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP if first else 1):
                for parameter in self.parameters:
                    parameter.grad = None
                self._run(self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = None if first else gradient
        graph = torch.cuda.CUDAGraph()
        pool = self.graphs[True].graph.pool() if self.graphs else None
        # The loader's pinning thread may call CUDA meanwhile: only this thread's calls are checked.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            loss = self._run(self.inputs)
        if first:
            self.gradients = [p.grad for p in self.parameters]
        return _Graph(graph, loss)
