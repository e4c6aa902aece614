"""Held-out splits, subsets, and the batches of an epoch."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generalist.core.errors import DataError
from generalist.core.random import permutation
from generalist.data.sampler import epoch_batches
from generalist.data.split import hold_out, subset


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.integers(0, 5))
def test_hold_out_is_balanced_and_complete(count: int, seed: int) -> None:
    labels = torch.arange(100) * 7 % 5
    train, held = hold_out(labels, count=count, classes=5, seed=seed)
    assert len(held) == count
    assert sorted(train.tolist() + held.tolist()) == list(range(100))
    sizes = labels[held].bincount(minlength=5)
    assert int(sizes.max() - sizes.min()) <= 1
    again = hold_out(labels, count=count, classes=5, seed=seed)
    assert torch.equal(held, again[1])
    assert held.tolist() == sorted(held.tolist())


def test_hold_out_depends_on_the_seed() -> None:
    labels = torch.arange(100) % 5
    assert not torch.equal(
        hold_out(labels, count=20, classes=5, seed=0)[1], hold_out(labels, count=20, classes=5, seed=1)[1]
    )


@pytest.mark.parametrize("count", [0, -1, 10, 11, 8])
def test_hold_out_refuses_too_much(count: int) -> None:
    labels = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    with pytest.raises(DataError, match="hold out"):
        hold_out(labels, count=count, classes=2, seed=0)


def test_subset() -> None:
    drawn = subset(100, 30, 4)
    assert len(set(drawn.tolist())) == 30
    assert drawn.tolist() == sorted(drawn.tolist())
    assert int(drawn.max()) < 100
    assert subset(5, 5, 0).tolist() == [0, 1, 2, 3, 4]
    assert not torch.equal(drawn, subset(100, 30, 5))
    for count in (0, 101):
        with pytest.raises(DataError, match="1 to 100"):
            subset(100, count, 0)


def _batches(n: int, batch_size: int, last: str, epoch: int = 0) -> list[torch.Tensor]:
    return epoch_batches(torch.arange(n) * 2, batch_size=batch_size, seed=3, epoch=epoch, last=last)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 20), st.integers(0, 3))
def test_one_epoch(n: int, batch_size: int, epoch: int) -> None:
    everything = [2 * i for i in range(n)]
    kept = _batches(n, batch_size, "keep", epoch)
    assert sorted(torch.cat(kept).tolist()) == everything
    assert all(len(batch) == batch_size for batch in kept[:-1])

    filled = _batches(n, batch_size, "fill", epoch)
    assert {len(batch) for batch in filled} == {batch_size}
    assert len(filled) == len(kept)
    assert torch.cat(filled)[:n].tolist() == torch.cat(kept).tolist()
    counts = Counter(torch.cat(filled).tolist())
    assert max(counts.values()) - min(counts.values()) <= 1

    if n >= batch_size:
        dropped = _batches(n, batch_size, "drop", epoch)
        assert {len(batch) for batch in dropped} == {batch_size}
        assert len(dropped) == n // batch_size
        assert len(set(torch.cat(dropped).tolist())) == len(dropped) * batch_size


def test_epochs_differ_and_repeat() -> None:
    assert torch.equal(torch.cat(_batches(40, 8, "keep", 1)), torch.cat(_batches(40, 8, "keep", 1)))
    assert not torch.equal(torch.cat(_batches(40, 8, "keep", 1)), torch.cat(_batches(40, 8, "keep", 2)))


def test_drop_of_the_only_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"reduce train\.batch_size"):
        _batches(5, 8, "drop")
    with pytest.raises(DataError, match="no samples"):
        _batches(0, 8, "keep")
    with pytest.raises(DataError, match="at least 1"):
        _batches(5, 0, "keep")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(12, 40), st.integers(1, 60), st.sampled_from([0.2, 0.5, 0.7]), st.sampled_from(["drop", "fill", "keep"])
)
def test_extra_images_in_every_batch(n: int, extras: int, ratio: float, last: str) -> None:
    size = 10
    share = round(size * ratio)
    seen: list[int] = []
    for epoch in range(1, 5):  # as training counts them
        batches = epoch_batches(
            torch.arange(n),
            extra_index=torch.arange(1000, 1000 + extras),
            ratio=ratio,
            batch_size=size,
            seed=0,
            epoch=epoch,
            last=last,  # type: ignore[arg-type]
        )
        for position, batch in enumerate(batches):
            own, extra = batch[batch < 1000], batch[batch >= 1000]
            if last != "keep" or position + 1 < len(batches):
                assert (len(own), len(extra)) == (size - share, share)
            seen += extra.tolist()
        if last == "keep":
            assert sorted(i for b in batches for i in b.tolist() if i < 1000) == list(range(n))
    counts = Counter(seen)
    # The stream goes on across epochs: none is seen a further time before every other one was.
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(1000, 1000 + extras)) <= 1


def test_extra_refusals() -> None:
    common = {"batch_size": 8, "seed": 0, "epoch": 0, "last": "fill"}
    for ratio in (0.0, 0.01, 0.99, 1.0):
        with pytest.raises(DataError, match="ratio"):
            epoch_batches(torch.arange(9), extra_index=torch.arange(9), ratio=ratio, **common)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="needs extra images"):
        epoch_batches(torch.arange(9), ratio=0.5, **common)  # type: ignore[arg-type]


def test_permutation_takes_tensors_as_keys() -> None:
    for epoch in (0, 3):
        assert torch.equal(permutation(9, 1, "t", torch.tensor(epoch)), permutation(9, 1, "t", epoch))
    both = permutation(9, 1, "t", torch.tensor([0, 3]))
    assert torch.equal(both, torch.stack([permutation(9, 1, "t", 0), permutation(9, 1, "t", 3)]))
