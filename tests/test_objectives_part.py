"""PART: maps by formula, masks that follow their samples, bounds pixel by pixel."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from several_norms_helpers import (
    LINF,
    Toy,
    assert_capturable,
    assert_finite_when_probabilities_underflow,
    assert_gradients,
    assert_resumes,
    cross_entropies,
    gradient_at,
    now,
    recipe_of,
)
from torch import Tensor, nn
from training_helpers import TinyNet, make_trainer

from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.models import MODELS, ModelOptions
from generalist.models.activation_maps import class_activation_maps
from generalist.objectives.part import PixelReweighted

REST = 0.04
PART = {"kind": "part", "rest": REST, "warmup": 0.5}  # one epoch of two


def part(toy: Toy) -> PixelReweighted:
    assert isinstance(toy.objective, PixelReweighted)
    return toy.objective


def reference_map(model: TinyNet, x: Tensor, y: Tensor) -> Tensor:
    """Grad-CAM by the chain rule: features -> relu -> linear, so the gradient is the linear layer's row, gated."""
    features = model.norm(model.conv(x))
    rows = model.linear.weight[y].reshape(-1, 3, 4, 4)
    gradient = rows * (features > 0)
    return (gradient.mean((2, 3), keepdim=True) * features).sum(1, keepdim=True).clamp_min(0)


def test_maps_are_grad_cam(tmp_path: Path) -> None:
    toy = Toy(PART, tmp_path)
    model = toy.fresh().eval()
    with torch.no_grad():
        expected = reference_map(model, toy.batch.x, toy.batch.y)
    assert float(expected.max()) > 0
    before = copy.deepcopy(toy.model.state_dict())
    found = class_activation_maps(toy.model, toy.batch.x, toy.batch.y)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert toy.model.training and all(p.requires_grad for p in toy.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in toy.model.state_dict().items())
    assert not any(module._forward_hooks for module in toy.model.modules())


@pytest.mark.parametrize("name", ["small", "resnet18", "preact-resnet18"])
def test_maps_of_the_library_s_networks_are_enlarged_to_the_image(name: str) -> None:
    model = MODELS.get(name)(num_classes=4, in_channels=3)
    x = random.uniform(0, "images", torch.arange(2), shape=(3, 16, 16))
    maps = class_activation_maps(model, x, torch.tensor([1, 3]))
    assert maps.shape == (2, 1, 16, 16) and bool((maps >= 0).all())


def test_a_network_without_feature_maps_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(GeneralistError, match="no feature map"):
        class_activation_maps(model, torch.zeros(2, 1, 4, 4), torch.tensor([0, 1]))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_network_without_feature_maps_is_refused_before_it_trains(tmp_path: Path) -> None:
    def flat(*, num_classes: int, in_channels: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16 * in_channels, num_classes))

    MODELS.register("flat-for-part")(flat)
    recipe = recipe_of("part").model_copy(update={"model": ModelOptions(name="flat-for-part")})
    with pytest.raises(GeneralistError, match="no feature map"):
        make_trainer(recipe, tmp_path)


def test_masks_follow_the_sample_through_shuffling_and_augmentation(tmp_path: Path) -> None:
    """Where a mask is `pixel above a value`, the augmented image's own pixels say what it must have become."""
    toy = Toy(PART, tmp_path)
    images = toy.trainer.train_images
    part(toy).masks.copy_(images.batch(torch.arange(len(images))).x > 0.5)
    for epoch in range(1, 6):
        index = random.permutation(len(images), 3, "shuffle", epoch)
        batch = toy.images(index, epoch)
        assert bool(batch.augmentation["flip"].any()) and bool((batch.augmentation["top"] != 1).any())
        assert torch.equal(part(toy).masks_of(batch), batch.x > 0.5)


def test_masks_are_made_after_the_warm_up_for_trained_images_alone(tmp_path: Path) -> None:
    toy = Toy(PART, tmp_path)
    part(toy).epoch_start(1)
    assert bool(part(toy).masks.all())
    part(toy).epoch_start(2)
    images = toy.trainer.train_images
    everything = images.batch(torch.arange(len(images)))
    with torch.no_grad():
        maps = reference_map(toy.fresh().eval(), everything.x.double(), everything.y)
    expected = maps >= maps.mean((2, 3), keepdim=True)
    trained = toy.trainer.train_index
    assert torch.equal(part(toy).masks[trained], expected[trained])
    held_out = sorted(set(range(len(images))) - set(trained.tolist()))
    assert bool(part(toy).masks[held_out].all()) and not bool(expected[held_out].all())


def test_an_image_in_which_nothing_speaks_for_its_label_keeps_the_full_eps(tmp_path: Path) -> None:
    toy = Toy(PART, tmp_path)
    with torch.no_grad():
        toy.model.linear.weight.zero_()  # type: ignore[union-attr, operator]
    part(toy).masks.fill_(False)
    part(toy).epoch_start(2)
    assert bool(part(toy).masks[toy.trainer.train_index].all())


def test_each_pixel_has_a_bound_of_its_own(tmp_path: Path) -> None:
    toy = Toy(PART, tmp_path)
    part(toy).epoch_start(2)
    masks = part(toy).masks_of(toy.batch)
    assert 0 < int(masks.sum()) < masks.numel()
    bound = torch.where(masks, torch.tensor(LINF, dtype=torch.float64), REST)
    model, x, y = toy.fresh().eval(), toy.batch.x, toy.batch.y
    current = x
    for _ in range(3):
        moved = current - x + LINF / 4 * gradient_at(model, current, y).sign()
        current = (x + torch.minimum(torch.maximum(moved, -bound), bound)).clamp(0, 1)
    found = part(toy).prepare(toy.batch, now(epoch=2)).made["adversarial"]
    torch.testing.assert_close(found, current, rtol=0, atol=1e-12)
    assert float((found - x).abs()[masks].max()) > REST
    assert_gradients(toy, lambda m: cross_entropies(m(current), y).mean(), now(epoch=2))


def test_the_warm_up_is_adversarial_training(tmp_path: Path) -> None:
    toy = Toy(PART, tmp_path, attack={"steps": 3})
    plain = toy.trainer.learners[0].view.adversarial(toy.batch, now())
    assert torch.equal(part(toy).prepare(toy.batch, now(epoch=1)).made["adversarial"], plain)
    assert not torch.equal(part(toy).prepare(toy.batch, now(epoch=2)).made["adversarial"], plain), "padding has less"


def test_the_random_start_keeps_to_the_bounds(tmp_path: Path) -> None:
    toy = Toy(PART, tmp_path, attack={"steps": 0})
    part(toy).epoch_start(2)
    delta = (part(toy).prepare(toy.batch, now(epoch=2)).made["adversarial"] - toy.batch.x).abs()
    masks = part(toy).masks_of(toy.batch)
    assert float(delta[~masks].max()) <= REST < float(delta[masks].max()) <= LINF


@pytest.mark.parametrize("after", [5, 6])
def test_part_resumes_within_and_between_epochs(tmp_path: Path, after: int) -> None:
    assert_resumes(recipe_of({**PART, "warmup": "1/3"}, epochs=3), tmp_path, after=after)


def test_nothing_waits_for_the_device(tmp_path: Path) -> None:
    assert_capturable(Toy(PART, tmp_path), now(epoch=2))


def test_the_loss_stays_finite(tmp_path: Path) -> None:
    assert_finite_when_probabilities_underflow(Toy(PART, tmp_path), now(epoch=2))


def test_by_default_the_rest_has_seven_eighths_of_any_eps(tmp_path: Path) -> None:
    for threat in ("linf:8/255", "l2:128/255"):
        toy = Toy("part", tmp_path / threat[:2], threat=threat)
        assert isinstance(toy.objective, PixelReweighted)
        assert toy.objective.rest == pytest.approx(7 / 8 * toy.objective.threat.eps, rel=1e-12)


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GeneralistError, match=r"objective\.rest, 9/255, is more than the eps of linf:8/255; lower it"):
        Toy({**PART, "rest": "9/255"}, tmp_path, threat="linf:8/255")
