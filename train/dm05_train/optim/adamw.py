"""AdamW with decoupled weight decay, one parameter after another: the reference that the fused step must agree with.

State layout, shared with every other implementation of this step:

- ``state[parameter]["exp_avg"]``, ``["exp_avg_sq"]``: running means of the gradient and of its square, shaped like the
  parameter, in ``precision.moment_dtype``.
- ``state[parameter]["remainder"]`` (int16) or ``["master"]`` (float32) where the precision mode has one
  (``precision.extra_state``).
- ``steps``: float64 scalar on the device, the updates made so far (a skipped step does not count), for the bias
  correction.

``names[parameter]`` is the parameter's name in the model; checkpoints are keyed by it. All arithmetic is float32, and
results are rounded once when stored. ``grad_scale`` is the clip coefficient on the device, multiplied into each
gradient as it is read; 0 or a non-finite value means that the step is skipped: nothing changes. Nothing here waits for
the device, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dm05_train.optim.base import NamedOptimizer
from dm05_train.optim.clip import local
from dm05_train.optim.precision import Mode, read_master, write_master


class AdamW(NamedOptimizer):
    """AdamW over named parameters.

    Args:
        named_parameters: (name, parameter) pairs; all must require gradients.
        betas: decay of the first and second moment.
        eps: added to the root of the bias-corrected second moment.
        weight_decay: the weight shrinks by ``lr * weight_decay`` of itself each step.
        mode: the precision mode.

    ``blocks``: how many thread blocks a fused step may use, so that other work on the device goes on beside it.
    """

    blocks: int | None = None

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        mode: Mode,
    ) -> None:
        super().__init__({p: name for name, p in named_parameters}, ("exp_avg", "exp_avg_sq"), mode)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    @torch.no_grad()
    def step(self, lr: Tensor, grad_scale: Tensor) -> None:
        """One update from the gradients as they stand.

        Args:
            lr: scalar on the device.
            grad_scale: scalar on the device, multiplied into each gradient; 0, infinite or NaN skips the step.
        """
        go = self.accept(grad_scale)
        beta1, beta2 = self.betas
        correction1 = (1 - beta1**self.steps).float()
        correction2 = (1 - beta2**self.steps).float().sqrt()
        for parameter, state in self.state.items():
            if parameter.grad is None:
                continue
            weight, gradient = local(parameter.detach()), local(parameter.grad).float() * grad_scale
            mean = state["exp_avg"].float().lerp(gradient, 1 - beta1)
            square = state["exp_avg_sq"].float().mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            old = read_master(weight, state)
            new = old * (1 - lr * self.weight_decay) - (lr / correction1) * (
                mean / (square.sqrt() / correction2 + self.eps)
            )
            write_master(weight, state, torch.where(go, new, old))
            state["exp_avg"].copy_(torch.where(go, mean, state["exp_avg"]))
            state["exp_avg_sq"].copy_(torch.where(go, square, state["exp_avg_sq"]))
