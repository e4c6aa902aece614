"""A small network trained on the embedded digits, for tests that compare attacks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from generalist.attacks.pgd import AttackOptions, pgd
from generalist.attacks.threats import Linf
from generalist.core import random
from generalist.data.digits import load_digits
from generalist.data.sets import Batch


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


def part(batch: Batch, which: Tensor) -> Batch:
    return Batch(batch.x[which], batch.y[which], batch.index[which])
