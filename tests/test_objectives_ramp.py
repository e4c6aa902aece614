"""RAMP: its loss and pairing by formula, its clean copy against torch.optim, its merge by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from several_norms_helpers import (
    L2,
    LINF,
    Toy,
    assert_capturable,
    assert_finite_when_probabilities_underflow,
    assert_gradients,
    assert_resumes,
    cross_entropies,
    log_probabilities,
    now,
    one_by_one,
    plain_pgd,
    recipe_of,
    train_inside_a_generalist,
)
from torch import Tensor, nn
from training_helpers import TinyNet, make_trainer, train

from generalist.core.errors import DivergedError
from generalist.models.registry import MODELS
from generalist.objectives.ramp import Ramp, merged, paired_divergence
from generalist.training.global_learner import GlobalLearner
from generalist.training.learner import Learner

RAMP = {"kind": "ramp", "beside": [f"l2:{L2}"], "pairing": 5}


def test_worst_of_two_norms_and_the_pairing_of_their_logits(tmp_path: Path) -> None:
    toy = Toy(RAMP, tmp_path)
    first, second = (one_by_one(toy, plain_pgd(norm, eps)) for norm, eps in (("linf", LINF), ("l2", L2)))
    y = toy.batch.y

    def loss(model: nn.Module) -> Tensor:
        logits = [model(first), model(second)]
        worst = [max(pair) for pair in zip(*(cross_entropies(each, y) for each in logits), strict=True)]
        right = [i for i in range(len(y)) if int(logits[0][i].argmax()) == int(y[i])]
        assert 0 < len(right) < len(y), "this case must have both kinds"
        log_p, log_q = (log_probabilities(each) for each in logits)
        pairing = sum((log_p[i].exp() * (log_p[i] - log_q[i])).sum() for i in right) / len(right)
        return torch.stack(worst).mean() + 5 * pairing

    assert_gradients(toy, loss)


def test_the_pairing_leaves_out_what_the_first_norm_gets_wrong() -> None:
    first = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=torch.float64, requires_grad=True)
    second = torch.tensor([[0.0, 1.0], [5.0, 0.0]], dtype=torch.float64, requires_grad=True)
    value = paired_divergence(first, second, torch.tensor([0, 0]))
    p, q = torch.softmax(first[0], 0), torch.softmax(second[0], 0)
    assert float(value.detach()) == pytest.approx(float((p * (p / q).log()).sum().detach()))
    gradients = torch.autograd.grad(value, [first, second])
    assert all(bool((g[1] == 0).all()) and bool((g[0] != 0).any()) for g in gradients)
    assert float(paired_divergence(first, second, torch.tensor([1, 0])).detach()) == 0


def test_the_pairing_stays_finite_when_probabilities_underflow() -> None:
    first = torch.tensor([[1e5, -1e5, 0.0]], requires_grad=True)
    second = torch.tensor([[-1e5, 1e5, 0.0]], requires_grad=True)
    value = paired_divergence(first, second, torch.tensor([0]))
    assert float(value.detach()) == pytest.approx(2e5)
    assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(value, [first, second]))


def test_movements_are_merged_by_hand() -> None:
    old = torch.tensor([1.0, 1.0], dtype=torch.float64)
    adversarial = old + torch.tensor([0.0, 2.0])
    aligned = old + torch.tensor([3.0, 3.0])
    expected = old + 0.5 * 0.5**0.5 * torch.tensor([3.0, 3.0]) + 0.5 * torch.tensor([0.0, 2.0])
    torch.testing.assert_close(merged(old, aligned, adversarial, share=0.5), expected)
    against = old + torch.tensor([0.0, -4.0])
    torch.testing.assert_close(merged(old, against, adversarial, share=0.5), old + torch.tensor([0.0, 1.0]))
    assert torch.equal(merged(old, old, old, share=0.5), old), "nothing moved: no division by zero"


def test_the_clean_copy_is_trained_by_sgd_on_clean_images(tmp_path: Path) -> None:
    toy = Toy({**RAMP, "clean_weight_decay": 0.01}, tmp_path)
    twin = toy.fresh()
    toy.objective.epoch_start(1)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in range(3):
        batch = toy.images(torch.arange(6) + 6 * (step % 2))
        toy.objective.prepare(batch, now(step))
        optimizer.zero_grad()
        cross_entropies(twin(batch.x), batch.y).mean().backward()
        optimizer.step()
    assert isinstance(toy.objective, Ramp)
    found = toy.objective.clean.state_dict()
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def test_the_epochs_end_merges_weights_and_statistics_tensor_by_tensor(tmp_path: Path) -> None:
    toy = Toy(RAMP, tmp_path)
    toy.objective.epoch_start(1)
    old = {name: tensor.clone() for name, tensor in toy.model.state_dict().items()}
    for step in range(3):
        toy.trainer.learners[0].step(toy.batch, now(step))
    assert isinstance(toy.objective, Ramp)
    clean = toy.objective.clean.state_dict()
    adversarial = {name: tensor.clone() for name, tensor in toy.model.state_dict().items()}
    toy.objective.epoch_end(1)
    for name, tensor in toy.model.state_dict().items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, adversarial[name])
            continue
        a, b = clean[name] - old[name], adversarial[name] - old[name]
        cosine = float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())
        expected = old[name] + 0.5 * max(cosine, 0) * a + 0.5 * b
        torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-12)
        assert not torch.equal(tensor, adversarial[name])


def test_an_epoch_starts_where_the_learner_is(tmp_path: Path) -> None:
    toy = Toy(RAMP, tmp_path)
    with torch.no_grad():
        toy.model.linear.bias.fill_(7)  # type: ignore[union-attr, operator]
    toy.objective.epoch_start(2)
    assert isinstance(toy.objective, Ramp)
    assert toy.objective.clean.state_dict()["linear.bias"].tolist() == [7, 7, 7]
    assert torch.equal(toy.objective.old, toy.objective.clean.vector)


@pytest.mark.parametrize("after", [4, 6])
def test_ramp_resumes_within_and_between_epochs(tmp_path: Path, after: int) -> None:
    assert_resumes(recipe_of(RAMP, epochs=3), tmp_path, after=after)


def test_nothing_waits_for_the_device(tmp_path: Path) -> None:
    assert_capturable(Toy(RAMP, tmp_path))


def test_the_loss_stays_finite(tmp_path: Path) -> None:
    assert_finite_when_probabilities_underflow(Toy(RAMP, tmp_path))


def test_inside_a_generalist_the_global_learner_goes_with_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All learners restart from it before it could follow in any iteration."""
    seen, follow = [], GlobalLearner.follow

    def followed(
        mixed: GlobalLearner, learners: Sequence[Learner], moved: Mapping[int, Tensor], gammas: Tensor, *, steps: int
    ) -> None:
        before = mixed.vector.clone()
        follow(mixed, learners, moved, gammas, steps=steps)
        kept = [min(float(mixed.decay), (k + 1) / (k + 10)) for k in range(int(mixed.count) - steps, int(mixed.count))]
        seen.append((before, moved, mixed.vector.clone(), kept))

    monkeypatch.setattr(GlobalLearner, "follow", followed)
    merging = train_inside_a_generalist(RAMP, tmp_path / "merging")
    before, moved, after, kept = seen[0]
    assert moved[0].abs().max() > 1e-4 and not moved[1].any()
    share = 0.0  # as far as an average of weights that had moved with the epoch's iterations
    for k, old in enumerate(kept):
        share = old * share + (1 - old) * (k + 1) / len(kept)
    assert 0 < share < 1
    torch.testing.assert_close(after, before + 0.5 * share * moved[0], rtol=0, atol=1e-12)
    not_merging = train_inside_a_generalist({**RAMP, "clean_share": 0}, tmp_path / "not-merging")
    assert (merging.global_learner.vector - not_merging.global_learner.vector).abs().max() > 1e-4


def test_the_merge_changes_what_is_learnt(tmp_path: Path) -> None:
    """Without it the same run would end elsewhere: the hooks are called by the loop."""
    found = [
        train(recipe_of({**RAMP, "clean_share": share}), tmp_path / str(share)).learners[0].flat.vector
        for share in (0.0, 0.5)
    ]
    assert not torch.equal(*found)


def test_the_merged_network_is_what_is_validated_and_saved(tmp_path: Path) -> None:
    """The baselines' recipes keep no average: the global learner is the learner after the merge, not before it."""
    trainer = train(recipe_of(RAMP), tmp_path)
    learner = trainer.learners[0]
    assert torch.equal(trainer.global_learner.vector, learner.flat.vector)
    assert torch.equal(trainer.global_learner.counters, learner.flat.counters)
    for record in trainer.directory.read_metrics():
        found = record["validation"]
        assert found["accuracy"]["global"] == found["accuracy"][learner.name] and found["drift"] == 0


def test_a_parameter_that_takes_no_part_in_the_loss_has_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in any other objective: networks of other libraries have such."""

    class Idle(TinyNet):
        def __init__(self, *, num_classes: int, in_channels: int) -> None:
            super().__init__(num_classes=num_classes, in_channels=in_channels)
            self.idle = nn.Parameter(torch.ones(2))

    monkeypatch.setitem(MODELS._things, "tiny", Idle)
    toy = Toy(RAMP, tmp_path)
    toy.objective.epoch_start(1)
    found, _ = toy.gradients()
    names = [name for name, _ in toy.model.named_parameters()]
    assert not found[names.index("idle")].any() and found[names.index("linear.weight")].any()


def test_a_long_merge_leaves_a_network_that_answers(tmp_path: Path) -> None:
    """Averages were moved all the way, and their variances became negative: they answered nan to every image."""
    recipe = recipe_of({**RAMP, "clean_share": 1}, epochs=6, averaging={"decay": 0.99, "warmup": False})
    slow = {"decay": 0.99, "warmup": False, "redistribution": {"every": 0}}
    trainer = train(recipe.model_copy(update={"mixing": recipe.mixing.model_validate(slow)}), tmp_path)
    learner = trainer.learners[0]
    assert learner.average is not None
    for vector in (trainer.global_learner.vector, learner.average.vector):
        variances = learner.flat.state_dict(vector)["norm.running_var"]
        assert bool((variances > 0).all())


def test_a_global_learner_that_answers_nan_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(recipe_of(RAMP), tmp_path)

    def spoil(*args: Any, **settings: Any) -> None:
        trainer.global_learner.vector.fill_(float("nan"))

    trainer.global_learner.follow = spoil  # type: ignore[method-assign]
    with pytest.raises(DivergedError, match="the global learner, the learners' mix, outputs nan or inf after epoch 1"):
        trainer.run()
    assert not trainer.directory.model.exists()
