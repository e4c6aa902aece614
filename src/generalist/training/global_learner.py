"""The global learner: an average over time of the learners' mixed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from generalist.core.compiling import compiled
from generalist.tensors.averages import evenly, trailing, truncated_mean, warm_decay
from generalist.training.learner import Learner
from generalist.training.mixing_options import MixingOptions
from generalist.training.options import lead_index
from generalist.training.parts import Part


class GlobalLearner:
    """State: the flat weights, the counters and the number of updates. The engine sets `decay` before an iteration."""

    def __init__(self, learners: Sequence[Learner], options: MixingOptions) -> None:
        self.options = options
        self.lead = lead_index(options, [learner.options for learner in learners])
        self.vector = learners[0].flat.vector.clone()
        self.counters = learners[0].flat.counters.clone()
        self.count = torch.zeros((), dtype=torch.float64, device=self.vector.device)
        self.decay = torch.full_like(self.count, options.decay_at(0, 1))
        self._blend = _blend
        if options.parts:
            for a, learner in enumerate(learners):
                learner.part = Part(learner.flat, share=float(a == self.lead))

    def compile(self) -> None:
        """Mix all learners in one pass over memory."""
        self._blend = compiled(_blend)

    @torch.no_grad()
    def update(self, learners: Sequence[Learner], gammas: Tensor) -> None:
        """theta_g <- d theta_g + (1 - d) sum_a gamma_a source_a; `gammas` is a device vector."""
        sources = [learner.source(self.options.source) for learner in learners]
        decay = self._blend(
            self.vector, [vector for vector, _ in sources], gammas, self.count, self.decay, self.options.warmup
        )
        if self.options.counters == "truncate":
            mixed = sum((gammas[a] * counters for a, (_, counters) in enumerate(sources)), torch.zeros_like(gammas[0]))
            self.counters.copy_(truncated_mean(self.counters, mixed, decay))
        else:
            self.counters.copy_(sources[self.lead][1])
        for learner, source, gamma in zip(learners, sources, gammas.unbind(), strict=True):
            if learner.part:
                learner.part.update(*source, kept=decay, gamma=gamma)
        self.count.add_(1)

    @torch.no_grad()
    def follow(self, learners: Sequence[Learner], moved: Mapping[int, Tensor], gammas: Tensor, *, steps: int) -> None:
        """Follow the changes that `Learner.end_epoch` made, as redistribution may come before the next iteration.

        `moved` holds them by learner number. They are weighted as if they had been spread evenly over the epoch's
        `steps` iterations.
        """
        if float(self.decay) == 0:
            self.update(learners, gammas)
            return
        count, decay, warmup = int(self.count), float(self.decay), self.options.warmup
        for a, move in moved.items():
            if move.any():
                average = learners[a].average if self.options.source == "averaged" else None
                path = evenly(steps) if average is None else average.trail(steps)
                shift = gammas[a] * move * trailing(path, count=count, decay=decay, warmup=warmup)[-1]
                self._shift(shift)
                if (part := learners[a].part) is not None:
                    part.follow(shift)

    def _shift(self, move: Tensor) -> None:
        self.vector.add_(move)

    def redistribute(self, learners: Sequence[Learner]) -> None:
        """Restart every learner from the global one."""
        options = self.options.redistribution
        for learner in learners:
            learner.receive(self.vector, self.counters, reset=options.reset, own_batchnorm=options.batchnorm == "own")

    def settle(self, learners: Sequence[Learner]) -> None:
        """With a single learner, take over the network that its objective calls the best, if it names one."""
        if len(learners) == 1 and (state := learners[0].objective.best_network()) is not None:
            vector, counters = learners[0].flat.read(state)
            self.vector.copy_(vector)
            self.counters.copy_(counters)

    def divide(self) -> None:
        """Called when the vector has been set from outside, before training; for subclasses."""

    def restored(self) -> None:
        """Called when the `state` of a checkpoint has been copied in; for subclasses."""

    def gather(self) -> None:
        """Bring the vector up to date, in a subclass that keeps shares of it on several ranks."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        return {"weights": self.vector, "counters": self.counters, "count": self.count}

    def changing(self) -> dict[str, Tensor]:
        """Every tensor that an iteration changes."""
        return self.state()


def _blend(
    vector: Tensor, sources: Sequence[Tensor], gammas: Tensor, count: Tensor, decay: Tensor, warmup: bool
) -> Tensor:
    """Move `vector` towards the sources; returns the share of the old vector that was kept."""
    kept = warm_decay(count, decay, warmup=warmup)
    shares = _lerp_shares((1 - kept) * gammas).to(vector.dtype)
    for source, share in zip(sources, shares.unbind(), strict=True):
        vector.lerp_(source, share)
    return kept


def _lerp_shares(weights: Tensor) -> Tensor:
    """Shares b_a such that successive steps theta += b_a (source_a - theta) give (1 - sum w) theta + sum w_a source_a.

    In this form a value on which all sources agree, such as a constant in a buffer, stays exactly the same.
    """
    left = 1 - (weights.sum() - weights.cumsum(0))  # what is left after the weights of later sources
    return torch.where(left > 1e-12, weights / left.clamp_min(1e-12), torch.zeros_like(weights))


@torch.no_grad()
def mix(vectors: Sequence[Tensor], gammas: Sequence[float]) -> Tensor:
    """sum_a gamma_a theta_a, without averaging over time."""
    mixed = torch.zeros_like(vectors[0])
    for vector, gamma in zip(vectors, gammas, strict=True):
        mixed.add_(vector, alpha=gamma)
    return mixed
