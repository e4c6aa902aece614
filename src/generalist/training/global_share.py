"""The global learner where groups of ranks step different learners: each group keeps its share of it.

Mixing is linear, so it splits: e_a <- d e_a + (1 - d) gamma_a source_a for each learner by itself, and the global
learner is the sum of all e_a. No weights are sent until that sum is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from generalist.core.compiling import compiled
from generalist.tensors.averages import truncated_mean, warm_decay
from generalist.training.global_learner import GlobalLearner
from generalist.training.learner import Learner
from generalist.training.mixing_options import MixingOptions
from generalist.training.parallel import Parallel


class GlobalShare(GlobalLearner):
    """Has, besides the vector of the last `gather`, its sum (`whole`) and this group's `share` in double precision.

    In the precision of the weights, the rounding of the shares would change values on which all learners agree, such as
    constants in buffers, which `GlobalLearner` leaves exactly the same. A checkpoint keeps the whole in double
    precision as well, because a resumed run would otherwise be rounded where an uninterrupted one is not.
    """

    def __init__(self, learners: Sequence[Learner], options: MixingOptions, parallel: Parallel) -> None:
        super().__init__(learners, options)
        self.parallel = parallel
        self.whole = self.vector.double()
        self.share = torch.zeros_like(self.whole)
        self._add = _add
        self.divide()

    def compile(self) -> None:
        self._add = compiled(_add)

    def divide(self) -> None:
        """Begin from the vector: the first group keeps all of it."""
        self.whole.copy_(self.vector)
        self.restored()

    def restored(self) -> None:
        self.vector.copy_(self.whole)
        self.share.copy_(self.whole).mul_(self.parallel.row == 0)

    @torch.no_grad()
    def update(self, learners: Sequence[Learner], gammas: Tensor) -> None:
        sources = {a: learners[a].source(self.options.source) for a in self.parallel.own}
        kept = warm_decay(self.count, self.decay, warmup=self.options.warmup)
        # One by one: a list as an index would be copied from the host, which cannot be recorded.
        weights = [(1 - kept) * gammas[a] for a in sources]
        self._add(self.share, [vector for vector, _ in sources.values()], kept, weights)
        if self.options.counters == "truncate":  # not linear, so the groups add up these few numbers at every step
            mixed = torch.zeros_like(self.counters, dtype=torch.float64)
            for a, (_, counters) in sources.items():
                mixed.add_(gammas[a] * counters)
            self.parallel.sum_over_groups(mixed)
            self.counters.copy_(truncated_mean(self.counters, mixed, kept))
        elif self.lead in sources:
            self.counters.copy_(sources[self.lead][1])
        for a, source in sources.items():
            if (part := learners[a].part) is not None:
                part.update(*source, kept=kept, gamma=gammas[a])
        self.count.add_(1)

    def _shift(self, move: Tensor) -> None:
        self.share.add_(move)

    @torch.no_grad()
    def gather(self) -> None:
        """Add up the shares of all groups, by one sum over the ranks."""
        self.whole.copy_(self.share)
        self.parallel.sum_over_groups(self.whole)
        self.vector.copy_(self.whole)
        self.parallel.send(self.lead, [self.counters])

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "weights": self.whole}

    def changing(self) -> dict[str, Tensor]:
        return {**self.state(), "share": self.share}


def _add(share: Tensor, sources: Sequence[Tensor], kept: Tensor, weights: Sequence[Tensor]) -> None:
    share.mul_(kept)
    for source, weight in zip(sources, weights, strict=True):
        share.add_(source.double() * weight)
