"""SGD and Adam(W) on flat vectors, with the learning rate as a device scalar.

The arithmetic is that of torch.optim (a test compares them); the state is a few named vectors, so that a checkpoint is
plain tensors and a captured iteration can be replayed with a new learning rate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from generalist.core.compiling import compiled
from generalist.core.options import Decay, Number, Options, Positive, parse_number

LEAD: Literal["lead"] = "lead"


class OptimizerOptions(Options):
    """How a learner's weights are updated from its gradients."""

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    """`sgd` (with momentum), `adam` or `adamw`. The papers' ablation uses Adam at a learning rate of 1e-4."""

    lr: Annotated[Positive | Literal["lead"], BeforeValidator(parse_number)] = LEAD
    """Initial learning rate, or `lead`: that of the lead learner (`mixing.lead`). Papers: 0.1 for the natural
    learner, which the published code overwrites with the adversarial learner's; ours: equal."""

    momentum: Decay = 0.9
    """SGD's momentum."""

    nesterov: bool = False
    """Nesterov's form of SGD's momentum."""

    betas: list[Decay] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """Adam's decay rates of the first and second moment."""

    adam_eps: Positive = 1e-8
    """Added to Adam's denominator."""

    weight_decay: Annotated[Number, Field(ge=0)] = 5e-4
    """L2 penalty on every parameter (decoupled for adamw). Papers: 5e-4 for natural learners; 3.5e-3 (ResNet-18)
    or 7e-4 (WRN-32-10) for adversarial ones."""

    @model_validator(mode="after")
    def _nothing_idle(self) -> Self:
        for name in ("betas", "adam_eps") if self.kind == "sgd" else ("momentum", "nesterov"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: {self.kind} has none; leave it out")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov: it is a form of momentum, which is 0; leave one of the two out")
        return self


class Optimizer(ABC):
    """Holds `state`: named tensors, all zero at the start and after a reset."""

    def __init__(self, options: OptimizerOptions, state: dict[str, Tensor]) -> None:
        self.options = options
        self.state = state

    @abstractmethod
    def step(self, weights: Tensor, gradient: Tensor, lr: Tensor) -> None:
        """Update `weights` in place. `gradient` may be overwritten."""

    def compile(self) -> None:  # noqa: B027 - most need nothing
        """Turn the step into a single pass over memory, if that pays off."""

    def reset(self) -> None:
        for tensor in self.state.values():
            tensor.zero_()


class SGD(Optimizer):
    """Stochastic gradient descent with momentum."""

    def __init__(self, options: OptimizerOptions, weights: Tensor) -> None:
        super().__init__(options, {"momentum": torch.zeros_like(weights)})
        self._pass = _sgd_pass

    def compile(self) -> None:
        self._pass = compiled(_sgd_pass)

    def step(self, weights: Tensor, gradient: Tensor, lr: Tensor) -> None:
        options, momentum = self.options, self.state["momentum"]
        self._pass(weights, gradient, momentum, lr, options.momentum, options.weight_decay, options.nesterov)


def _sgd_pass(
    weights: Tensor, gradient: Tensor, momentum: Tensor, lr: Tensor, decay: float, weight_decay: float, nesterov: bool
) -> None:
    gradient.add_(weights, alpha=weight_decay)
    momentum.mul_(decay).add_(gradient)
    if nesterov:
        weights.addcmul_(gradient.add_(momentum, alpha=decay), lr, value=-1)
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
