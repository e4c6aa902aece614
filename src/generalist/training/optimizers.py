"""SGD and Adam(W) on flat vectors, with the learning rate as a device scalar.

The arithmetic is that of torch.optim (a test compares them); the state is a few named vectors, so that a checkpoint is
plain tensors and a captured iteration can be replayed with a new learning rate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generalist.training.options import OptimizerOptions


class Optimizer:
    """Holds `state`: named tensors, all zero at the start and after a reset."""

    def __init__(self, options: OptimizerOptions, state: dict[str, Tensor]) -> None:
        self.options = options
        self.state = state

    def step(self, weights: Tensor, gradient: Tensor, lr: Tensor) -> None:
        """Update `weights` in place. `gradient` may be overwritten."""
        raise TypeError("use SGD or Adam")

    def reset(self) -> None:
        for tensor in self.state.values():
            tensor.zero_()


class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    def __init__(self, options: OptimizerOptions, weights: Tensor) -> None:
        super().__init__(options, {"momentum": torch.zeros_like(weights)})

    def step(self, weights: Tensor, gradient: Tensor, lr: Tensor) -> None:
        momentum = self.state["momentum"]
        gradient.add_(weights, alpha=self.options.weight_decay)
        momentum.mul_(self.options.momentum).add_(gradient)
        if self.options.nesterov:
            weights.addcmul_(gradient.add_(momentum, alpha=self.options.momentum), lr, value=-1)
        else:
            weights.addcmul_(momentum, lr, value=-1)


class Adam(Optimizer):
    """Adam, with the weight decay in the gradient (`adam`) or decoupled (`adamw`)."""

    def __init__(self, options: OptimizerOptions, weights: Tensor) -> None:
        zeros = torch.zeros_like
        count = torch.zeros((), dtype=weights.dtype, device=weights.device)
        super().__init__(options, {"mean": zeros(weights), "square": zeros(weights), "count": count})

    def step(self, weights: Tensor, gradient: Tensor, lr: Tensor) -> None:
        (beta_1, beta_2), decay = self.options.betas, self.options.weight_decay
        mean, square, count = self.state["mean"], self.state["square"], self.state["count"]
        if self.options.kind == "adamw":
            weights.mul_(1 - lr * decay)
        else:
            gradient.add_(weights, alpha=decay)
        count.add_(1)
        mean.lerp_(gradient, 1 - beta_1)
        square.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
        denominator = (square / (1 - beta_2**count)).sqrt_().add_(self.options.adam_eps)
        weights.sub_((mean / denominator).mul_(lr / (1 - beta_1**count)))


def build_optimizer(options: OptimizerOptions, weights: Tensor) -> Optimizer:
    return SGD(options, weights) if options.kind == "sgd" else Adam(options, weights)
