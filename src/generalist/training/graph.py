"""The graph engine: the same iteration, recorded once as a CUDA graph and replayed without host work.

Data, augmentation, attacks, every learner's step, averaging and mixing are in the graph. What changes from one
iteration to the next (sample indices, learning rates, gammas, step, epoch) lies in device tensors that are refilled
before each replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from generalist.data.augment import AugmentOptions
from generalist.data.sets import Images
from generalist.training.engine import EagerEngine
from generalist.training.global_learner import GlobalLearner
from generalist.training.learner import Learner
from generalist.training.options import Job

WARM_UP = 3  # iterations before recording: cuDNN picks its kernels, torch.compile compiles, caches are filled


def why_not_graph(job: Job, images: Images, device: torch.device, learners: Sequence[Learner] = ()) -> str | None:
    """Why this run cannot be recorded; None where it can."""
    fixed = [learner.options.objective.kind for learner in learners if not learner.objective.capturable]
    if device.type != "cuda":
        return "it needs a CUDA device"
    if not images.resident:
        return "the images are streamed from files"
    if job.train.last_batch == "keep":
        return "train.last_batch is keep, so batches differ in size"
    return f"objective {fixed[0]!r} cannot be recorded" if fixed else None


class GraphEngine(EagerEngine):
    """Records an iteration and replays it. Between replays the state may be changed in place.

    Objectives whose batches take several shapes have one graph for each combination of their variants.
    """

    def __init__(self, job: Job, learners: Sequence[Learner], global_learner: GlobalLearner) -> None:
        super().__init__(job, learners, global_learner)
        self.graphs: dict[tuple[str, ...], torch.cuda.CUDAGraph] = {}

    def feed(
        self, images: Images, batches: Sequence[Tensor], *, epoch: int, seed: int, options: AugmentOptions
    ) -> Iterator[Any]:
        """Sample indices; the graph itself fetches and augments the images."""
        self._source = (images, seed, options)
        return iter([batch.to(self.device) for batch in batches])

    def iteration(self, batch: Any) -> None:
        if not self.graphs:
            self.index = batch.clone()
        self.index.copy_(batch)
        if self.variants not in self.graphs:
            self.graphs[self.variants] = self._record()
        self.graphs[self.variants].replay()

    def _whole_iteration(self) -> None:
        images, seed, options = self._source
        super().iteration(images.augmented(self.index, epoch=self.epoch, seed=seed, options=options))

    def _record(self) -> torch.cuda.CUDAGraph:
        """Warm up, record, and put everything that these iterations changed back in place."""
        before = {key: tensor.clone() for key, tensor in self._state().items()}
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._whole_iteration()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._whole_iteration()
        for key, tensor in self._state().items():
            if key in before:
                tensor.copy_(before[key])
            else:
                tensor.zero_()  # a sum that the warm-up began
        return graph

    def _state(self) -> dict[str, Tensor]:
        state = {"first_bad": self.first_bad, **{f"sum.{name}": total for name, total in self.sums.items()}}
        state |= {f"global.{name}": tensor for name, tensor in self.global_learner.state().items()}
        for learner in self.learners:
            state |= {f"{learner.name}.{name}": tensor for name, tensor in learner.state().items()}
            own = learner.objective.state_dict()
            state |= {f"{learner.name}.objective.{name}": tensor for name, tensor in own.items()}
        return state
