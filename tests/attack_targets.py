"""What the tests of attacks share: small networks, one of them trained on the digits, and batches."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import generalist
from generalist.attacks.base import Attack, Found
from generalist.attacks.pgd import AttackOptions, pgd
from generalist.attacks.threats import Linf, Threat
from generalist.core import random
from generalist.data.digits import load_digits
from generalist.data.sets import Batch

SETTINGS = ["train.epochs=12", "model.width=8", "validation.threats=[]"]


@functools.cache
def trained() -> nn.Module:
    """A small network that adversarial training made somewhat robust."""
    with tempfile.TemporaryDirectory() as folder:
        run = generalist.train("digits-at", overrides=SETTINGS, out=Path(folder) / "run", device="cpu")
        return generalist.load(run.path).eval()


def digits(count: int) -> Batch:
    return load_digits()[1].batch(torch.arange(count))


def right_ones(model: nn.Module, batch: Batch) -> Batch:
    """The samples that the model gets right, as a suite hands them on."""
    with torch.no_grad():
        return part(batch, (model(batch.x).argmax(1) == batch.y).nonzero().squeeze(1))


def in_round(batch: Batch, number: int) -> Tensor:
    """All samples of the batch in the same round."""
    return torch.full_like(batch.y, number)


def part(batch: Batch, rows: Tensor) -> Batch:
    return Batch(x=batch.x[rows], y=batch.y[rows], index=batch.index[rows])


def noise(count: int, *shape: int, classes: int = 3, dtype: torch.dtype = torch.float64) -> Batch:
    index = torch.arange(count)
    x = random.uniform(7, "images", index, shape=shape or (1, 4, 4)).to(dtype)
    return Batch(x=x, y=random.integers(classes, 7, "labels", index), index=index)


def network(classes: int = 3, *, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(24, classes)]
    return nn.Sequential(*layers).to(dtype).eval()


class Flat(nn.Module):
    """The same answer for every image, with a gradient of zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1, keepdim=True) * 0 + torch.tensor([2.0, 1.0, 1.0, 0.0, 0.0], dtype=x.dtype)


def labelled(model: nn.Module, batch: Batch) -> Batch:
    """The same images with the model's own answers as labels: all right to begin with."""
    with torch.no_grad():
        return Batch(x=batch.x, y=model(batch.x).argmax(1), index=batch.index)


def is_allowed(found: Found, batch: Batch, threat: Threat) -> bool:
    """Finite, inside the box and inside the ball."""
    x = found.x
    inside = threat.norm((x - batch.x).double()) <= threat.eps * (1 + 1e-5)
    return bool(x.isfinite().all() and (x >= 0).all() and (x <= 1).all() and inside.all())


def digits_network() -> nn.Module:
    """Two convolutions after eight epochs of PGD-3 training (linf 0.15): two seconds."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    train, _ = load_digits()
    whole = train.batch(torch.arange(len(train)))
    options = AttackOptions(steps=3, step=0.08)
    for epoch in range(8):
        for index in random.permutation(len(train), 0, "order", epoch).split(64):
            x, y = whole.x[index], whole.y[index]
            x = pgd(model, x, y, threat=Linf(0.15), options=options, seed=0, purpose="at", index=index, step=epoch)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def right_digits(model: nn.Module, count: int) -> Batch:
    """Of the first test images those that the network gets right."""
    _, test = load_digits()
    batch = test.batch(torch.arange(count))
    with torch.no_grad():
        return part(batch, model(batch.x).argmax(1) == batch.y)


def check_flat_model(attack: Attack, threat: Threat) -> None:
    """A model without any gradient: nothing to find, and no nan on the way."""
    batch = labelled(Flat(), noise(4))
    found = attack.run(Flat(), batch, threat=threat, seed=0)
    assert not found.broken.any() and is_allowed(found, batch, threat)
