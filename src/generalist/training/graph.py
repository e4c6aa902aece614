"""The graph engine: the same iteration, recorded once as a CUDA graph and replayed without host work.

Data, augmentation, attacks, every learner's step, averaging and mixing are in the graph. What changes from one
iteration to the next (sample indices, learning rates, gammas, decay, step, epoch) lies in device tensors that are
refilled before each replay. A learner that cannot be recorded takes its step behind each replay, operation by
operation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from generalist.attacks.pgd import input_gradient
from generalist.core.compiling import compiled
from generalist.data.augment import AugmentOptions
from generalist.data.sets import Batch, Images
from generalist.objectives.base import LearnerView, Metrics
from generalist.tensors.modes import computing_in
from generalist.training.engine import EagerEngine
from generalist.training.global_learner import GlobalLearner
from generalist.training.learner import Learner
from generalist.training.options import Job
from generalist.training.parallel import Parallel

WARM_UP = 3  # iterations before recording: cuDNN picks its kernels, torch.compile compiles, caches are filled


def why_not_graph(
    job: Job, images: Images, device: torch.device, learners: Sequence[Learner] = (), parallel: Parallel | None = None
) -> str | None:
    """Why this run cannot be recorded; None where it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if not images.resident:
        return "the images are streamed from files"
    if job.train.last_batch == "keep":
        return "train.last_batch is keep, so batches differ in size"
    counted = parallel is not None and parallel.groups > 1 and job.mixing.counters == "truncate"
    if parallel is not None and (parallel.ranks > 1 or counted) and not parallel.group.direct:
        return "ranks share a GPU, so that what they send in an iteration passes through their hosts"
    if counted and any(len(learner.objective.variants) > 1 for learner in learners):
        # Recording runs a few iterations more, on the ranks that record: others would not answer their sums.
        return "groups of learners add counters up at each step (mixing.counters), and an objective has variants"
    if learners and not any(learner.objective.capturable for learner in learners):
        return _unrecordable(learners[0])
    return None


def _unrecordable(learner: Learner) -> str:
    return f"objective {learner.options.objective.kind!r} cannot be recorded"


class GraphEngine(EagerEngine):
    """Records an iteration and replays it. Between replays the state may be changed in place.

    Objectives whose batches take several shapes have one graph for each combination of their variants.
    """

    def __init__(
        self,
        job: Job,
        learners: Sequence[Learner],
        global_learner: GlobalLearner,
        parallel: Parallel | None = None,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(job, learners, global_learner, parallel)
        self.graphs: dict[tuple[str, ...], torch.cuda.CUDAGraph] = {}
        self.compiled = False
        self.say = say
        self.outside: list[int] = []
        """The numbers of the learners that are not recorded."""
        for a in self.parallel.own:
            if not learners[a].objective.capturable:
                self._leave_out(a, _unrecordable(learners[a]))
        self._made: dict[tuple[str, ...], tuple[Batch, dict[int, Metrics]]] = {}
        """For each graph what it leaves to the learners outside: the batch, and what those inside report."""
        self._augmented: Callable[..., Batch] | None = None
        self.streams = {a: torch.cuda.Stream(self.device) for a in self.parallel.own}  # type: ignore[no-untyped-call]

    def feed(
        self, images: Images, batches: Sequence[Tensor], *, epoch: int, seed: int, options: AugmentOptions
    ) -> Iterator[Any]:
        """Sample indices; the graph itself fetches and augments the images."""
        self._source = (images, seed, options)
        return iter([self.parallel.part_of(batch).to(self.device) for batch in batches])

    def iteration(self, batch: Any) -> None:
        if not self.graphs:
            self.index = batch.clone()
        self.index.copy_(batch)
        if self.variants not in self.graphs:
            self.graphs[self.variants] = self._record()
        self.graphs[self.variants].replay()
        self._step_outside()

    def compile(self) -> None:
        super().compile()
        self.compiled = True

    def step_learners(self, batch: Batch, among: Sequence[int]) -> dict[int, Metrics]:
        """Each learner on a stream of its own, so that one fills the gaps that another's small kernels leave.

        Not where gradients are summed over ranks: these sums must come in the same order on every rank.
        """
        if len(among) < 2 or self.parallel.ranks > 1:
            return super().step_learners(batch, among)
        joint = torch.cuda.current_stream(self.device)
        metrics = {}
        for a in among:
            self.streams[a].wait_stream(joint)
            with torch.cuda.stream(self.streams[a]):
                metrics[a] = self.step_learner(a, batch)
        for a in among:
            joint.wait_stream(self.streams[a])
        return metrics

    def _step_inside(self) -> None:
        """What is recorded: an iteration, or what comes in front of the learners outside."""
        batch = self._batch()
        found = self.step_learners(batch, [a for a in self.parallel.own if a not in self.outside])
        self._made[self.variants] = batch, found
        if not self.outside:
            self.conclude(found)

    def _step_outside(self) -> None:
        """The rest of an iteration of which not all is recorded."""
        if self.outside:
            batch, found = self._made[self.variants]
            self.conclude(found | EagerEngine.step_learners(self, batch, self.outside))

    def _batch(self) -> Batch:
        images, seed, options = self._source
        if self._augmented is None:
            self._augmented = compiled(images.augmented) if self.compiled else images.augmented
        return self.prepared(self._augmented(self.index, epoch=self.epoch, seed=seed, options=options))

    def _record(self) -> torch.cuda.CUDAGraph:
        """Warm up, record, and put everything that these iterations changed back in place."""
        before = {key: tensor.clone() for key, tensor in self._state().items()}
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # dropout and its like draw in each of these iterations
            self._warm_up()
            graph = torch.cuda.CUDAGraph()
            # What ranks send is watched by a thread of NCCL's, whose questions to the device are no part of the
            # recording.
            several = self.parallel.group.world > 1
            with torch.cuda.graph(graph, capture_error_mode="thread_local" if several else "global"):
                self._step_inside()
        for key, tensor in self._state().items():
            if key in before:
                tensor.copy_(before[key])
            else:
                tensor.zero_()  # a sum that the warm-up began
        return graph

    def _warm_up(self) -> None:
        """Some iterations, the last of them watched: whoever waits for the device in it cannot be recorded."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        from torch._dynamo import config  # the compiler, which no CPU has to wait for

        # What cannot be compiled runs as it is, with a warning of the compiler's.
        with torch.cuda.stream(stream), config.patch(suppress_errors=True):
            self._rehearse()
            for _ in range(WARM_UP - 1):
                self._step_inside()
                self._step_outside()
            batch = self._batch()
            for a in self.parallel.own:
                if a not in self.outside and self._waits(a, batch):
                    self._leave_out(a, "its step waits for the device")
                    self.graphs.clear()  # those of other variants still have it
                    self._made.clear()
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _waits(self, a: int, batch: Batch) -> bool:
        """Whether a step of this learner waits for the device, as reading a tensor's value does."""
        try:
            with waiting_is_an_error():
                self.step_learner(a, batch)
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            return True
        return False

    def _leave_out(self, a: int, why: str) -> None:
        self.outside.append(a)
        self.say(f"learner {self.learners[a].name!r} runs outside of the recording: {why}")

    def _rehearse(self) -> None:
        """Compile the two forms of the network side by side: the one that trains and the one under attack."""
        attacked = [learner.view for learner in self.own if learner.view.constant is not None]
        if not (self.compiled and attacked):
            return
        images, _, _ = self._source
        batch = images.batch(self.index)
        x = batch.x.to(self.dtype).contiguous(memory_format=self.layout)
        with ThreadPoolExecutor(max_workers=1) as worker:
            kernels = worker.submit(self._attack_once, attacked[0], x, torch.cuda.current_stream(self.device))
            view = self.own[0].view
            self.own[0].begin()
            loss = view.cross_entropy(view.forward(x), batch.y)
            torch.autograd.grad(loss, list(view.model.parameters()), allow_unused=True)
            kernels.result()

    def _attack_once(self, view: LearnerView, x: Tensor, before: torch.cuda.Stream) -> None:
        """In the attack's own precision: a thread begins without autocast, and another one would be compiled again.
        `before` has made `x`, and comes after replays that may still read the network which is refreshed here."""
        network = view.constant
        assert network is not None
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(before)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            network.refresh()
            with computing_in(view.autocast, self.device):
                input_gradient(network, x, torch.zeros(len(x)), lambda logits, _: logits.sum())
            torch.cuda.current_stream(self.device).synchronize()

    def _state(self) -> dict[str, Tensor]:
        state = {"first_bad": self.first_bad, **{f"sum.{name}": total for name, total in self.sums.items()}}
        state |= {f"global.{name}": tensor for name, tensor in self.global_learner.changing().items()}
        for learner in self.own:
            state |= {f"{learner.name}.{name}": tensor for name, tensor in learner.state().items()}
            own = learner.objective.state_dict()
            state |= {f"{learner.name}.objective.{name}": tensor for name, tensor in own.items()}
        return state


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """PyTorch raises where an operation would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # PyTorch's, that this finds most operations and not all
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
