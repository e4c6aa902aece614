"""The objective interface carries what the baselines need; each stand-in here uses one part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_helpers import NATURAL, make_trainer, tiny_recipe, train

from generalist.attacks.threats import ThreatOptions
from generalist.core.errors import RecipeError
from generalist.core.schedule import Schedule
from generalist.data.sets import Batch
from generalist.objectives.base import (
    OBJECTIVES,
    Inputs,
    LearnerView,
    Metrics,
    Objective,
    ObjectiveChoice,
    ObjectiveOptions,
    Progress,
    build_objective,
)
from generalist.training.artefacts import load_weights


class PlainOptions(ObjectiveOptions):
    """No options."""

    kind: str = "plain"
    """The objective's name."""


class Plain(Objective):
    """Natural training, by the name of `kind`."""

    adversarial = False

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        return self.learner.cross_entropy(self.learner.forward(inputs.batch.x), inputs.batch.y), {}


class Alternating(Plain):
    """Two kinds of batches, chosen on the host."""

    variants = ("full", "half")
    seen: ClassVar[list[tuple[int, str]]] = []

    def variant(self, step: int, epoch: int) -> str:
        return self.variants[step % 2]

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        self.seen.append((int(progress.step), progress.variant))
        loss, metrics = super().loss(inputs, progress)
        return (loss if progress.variant == "full" else 0.5 * loss), metrics


class Perturbed(Objective):
    """Wraps another: gradients at perturbed weights, which are restored (the shape of AWP)."""

    class Options(ObjectiveOptions):  # type: ignore[assignment]
        """What is wrapped."""

        kind: str = "perturbed"
        """The objective's name."""

        around: ObjectiveChoice
        """The objective whose gradients are taken."""

    @classmethod
    def needs_threat(cls, options: Any) -> bool:
        return OBJECTIVES.get(options.around.kind).needs_threat(options.around)

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.inner = build_objective(options.around)

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.inner.setup(learner)

    def gradients(self, batch: Batch, progress: Progress) -> tuple[list[Tensor], Metrics]:
        parameters = list(self.learner.model.parameters())
        inputs = self.inner.prepare(batch, progress)  # the attack is on the weights as they are
        with torch.no_grad():
            torch._foreach_add_(parameters, 0.01)
        gradients, metrics = self.inner.gradients_of(inputs, progress)
        with torch.no_grad():
            torch._foreach_sub_(parameters, 0.01)
        return gradients, metrics


class WithCompanion(Plain):
    """Trains a network of its own beside the learner and merges it at an epoch's end (the shape of RAMP)."""

    def setup(self, learner: LearnerView) -> None:
        super().setup(learner)
        self.companion = nn.Linear(4, 1, dtype=torch.float64)
        nn.init.ones_(self.companion.weight)
        self.epochs: list[int] = []

    def schedules(self) -> dict[str, Schedule]:
        return {"tau": Schedule(epochs=[0.0, 2.0, 2.0], values=[0.0, 0.0, 1.0])}

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        with torch.no_grad():
            self.companion.weight.sub_(progress.lr * inputs.batch.x.mean() * (1 + progress.scalars["tau"]))
        loss, _ = super().loss(inputs, progress)
        return loss, {"tau": progress.scalars["tau"].clone()}

    def epoch_end(self, epoch: int) -> None:
        self.epochs.append(epoch)
        with torch.no_grad():
            next(self.learner.model.parameters()).add_(0.01 * self.companion.weight.mean())

    def state_dict(self) -> dict[str, Tensor]:
        return {"companion": self.companion.weight.detach()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.companion.weight.copy_(state["companion"])


class WorstOfTwo(Objective):
    """Attacks in threat models of its own (the shape of at-max and MSD)."""

    adversarial = False
    norms: ClassVar[list[ThreatOptions]] = [ThreatOptions(norm="linf", eps=0.1), ThreatOptions(norm="l2", eps=0.4)]

    @classmethod
    def threats(cls, options: ObjectiveOptions) -> list[ThreatOptions]:
        return cls.norms

    def prepare(self, batch: Batch, progress: Progress) -> Inputs:
        made = {str(t): self.learner.adversarial(batch, progress, threat=t.build()) for t in self.norms}
        return Inputs(batch, made)

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        logits = [self.learner.forward(x) for x in inputs.made.values()]
        losses = torch.stack([F.cross_entropy(each, inputs.batch.y, reduction="none") for each in logits])
        return losses.max(0).values.mean(), {}


class Masked(Plain):
    """Keeps something per sample, made from all training images once an epoch (the shape of PART)."""

    def epoch_start(self, epoch: int) -> None:
        images = self.learner.images.batch(self.learner.index)
        self.brightness = torch.full((len(self.learner.images),), -1.0, dtype=torch.float64)
        self.brightness[images.index] = images.x.double().mean((1, 2, 3))

    def loss(self, inputs: Inputs, progress: Progress) -> tuple[Tensor, Metrics]:
        assert {"top", "left", "flip"} <= inputs.batch.augmentation.keys()
        assert (self.brightness[inputs.batch.index] >= 0).all()  # no held-out image is ever trained on
        return super().loss(inputs, progress)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"plain": Plain, "alternating": Alternating, "perturbed": Perturbed, "companion": WithCompanion}
    for name, objective in {**shapes, "masked": Masked, "worst": WorstOfTwo}.items():
        monkeypatch.setitem(OBJECTIVES._things, name, objective)
    Alternating.seen.clear()


def learner(objective: Any) -> dict[str, Any]:
    return {**NATURAL, "objective": objective}


def test_the_host_picks_a_variant_each_iteration(tmp_path: Path) -> None:
    train(tiny_recipe([learner("alternating")], train={"epochs": 1}), tmp_path)
    assert Alternating.seen == [(0, "full"), (1, "half"), (2, "full")]


def test_an_objective_wraps_another(tmp_path: Path) -> None:
    """Gradients at shifted weights move the weights elsewhere than plain ones, and the shift itself is gone."""
    wrapped = {"kind": "perturbed", "around": "plain"}
    results = [
        train(tiny_recipe([learner(objective)], train={"epochs": 1}), tmp_path / str(i)).global_learner.vector
        for i, objective in enumerate(("plain", wrapped))
    ]
    difference = (results[0] - results[1]).abs().max()
    assert 0 < difference < 0.009


def test_a_wrapper_needs_the_threat_of_what_it_wraps(tmp_path: Path) -> None:
    wrapped = {"kind": "perturbed", "around": "at"}
    with pytest.raises(RecipeError, match="needs a threat"):
        tiny_recipe([learner(wrapped)])
    recipe = tiny_recipe([{**learner(wrapped), "threat": "linf:0.1"}], train={"epochs": 1})
    assert train(recipe, tmp_path).step == 3


def test_threats_of_the_objectives_own_are_attacked_and_validated(tmp_path: Path) -> None:
    trainer = train(tiny_recipe([learner("worst")], train={"epochs": 1}), tmp_path)
    record = trainer.directory.read_metrics()[-1]
    assert set(record["validation"]["accuracy"]["natural"]) == {"natural", "linf:0.1", "l2:0.4"}


def test_a_companion_is_scheduled_merged_and_resumed(tmp_path: Path) -> None:
    recipe = tiny_recipe([learner("companion")], train={"epochs": 4})
    whole = train(recipe, tmp_path / "whole")
    taus = [record["train"]["natural"]["tau"] for record in whole.directory.read_metrics()]
    assert taus == [0.0, 0.0, 1.0, 1.0]
    assert whole.learners[0].objective.epochs == [1, 2, 3, 4]  # type: ignore[attr-defined]
    # Interrupted after two epochs: the companion's weights must come back for the end to be the same.
    early = make_trainer(recipe, tmp_path / "early")
    monitor = early._end_epoch

    class StopError(Exception):
        pass

    def end(epoch: int, *, images: int, seconds: float) -> None:
        monitor(epoch, images=images, seconds=seconds)
        if epoch == 2:
            raise StopError

    early._end_epoch = end  # type: ignore[method-assign]
    with pytest.raises(StopError):
        early.run()
    resumed = make_trainer(recipe, tmp_path / "early")
    assert resumed.resume() and resumed.step == 6
    resumed.run()
    assert torch.equal(resumed.global_learner.vector, whole.global_learner.vector)


def test_per_sample_state_follows_indices(tmp_path: Path) -> None:
    trainer = train(tiny_recipe([learner("masked")], train={"epochs": 1}), tmp_path)
    brightness = trainer.learners[0].objective.brightness  # type: ignore[attr-defined]
    assert int((brightness >= 0).sum()) == len(trainer.train_index) == 18


def test_an_objective_reads_the_weights_of_another_run(tmp_path: Path) -> None:
    source = train(tiny_recipe(), tmp_path / "source")
    source.directory.recipe.write_text("{}")
    view = make_trainer(tiny_recipe(), tmp_path / "other").learners[0].objective.learner
    found = view.artefact(f"{source.directory.path}#natural")
    expected = load_weights(source.directory.snapshots / "4" / "natural.safetensors")[0]
    assert torch.equal(found["linear.weight"], expected["linear.weight"])
    assert not torch.equal(view.artefact(str(source.directory.path))["linear.weight"], found["linear.weight"])
