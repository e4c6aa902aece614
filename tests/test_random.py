"""Randomness as a pure function: against an independent implementation, and for its statistics."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from training_helpers import MASK, reference_bits, reference_mix, reference_uniform

from generalist.core import random

COUNT = 1 << 16


def unsigned(bits: torch.Tensor) -> list[int]:
    return [value & MASK for value in bits.flatten().tolist()]


def test_the_reference_itself_gives_the_published_sequence_of_splitmix64() -> None:
    golden = 0x9E3779B97F4A7C15
    outputs = [reference_mix((1234567 + k * golden) & MASK) for k in range(1, 6)]
    assert outputs == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    purpose=st.text(max_size=12),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
)
def test_bits_equal_an_implementation_in_plain_integers(seed: int, purpose: str, keys: list[int]) -> None:
    assert unsigned(random.bits(seed, purpose, *keys, shape=(5,))) == reference_bits(seed, purpose, *keys, count=5)


def test_the_finaliser_equals_plain_integers_at_the_extremes() -> None:
    values = [0, 1, -1, 2**63 - 1, -(2**63), 12345, -98765]
    assert unsigned(random._mix(torch.tensor(values))) == [reference_mix(value & MASK) for value in values]


def test_uniform_is_the_top_24_bits() -> None:
    drawn = random.uniform(7, "u", 3, shape=(64,))
    assert drawn.dtype == torch.float32
    np.testing.assert_array_equal(drawn.double().numpy(), reference_uniform(7, "u", 3, count=64))


def test_uniform_is_uniform() -> None:
    drawn = random.uniform(0, "uniformity", shape=(COUNT,)).double().numpy()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=256, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-4
    assert stats.kstest(drawn, "uniform").pvalue > 1e-4
    for power in (1, 2, 3, 4):
        assert abs((drawn**power).mean() - 1 / (power + 1)) < 0.006


def test_every_bit_is_fair() -> None:
    drawn = random.bits(5, "fair", shape=(COUNT,))
    for bit in range(64):
        ones = int(((drawn >> bit) & 1).sum())
        assert abs(ones - COUNT / 2) < 5 * np.sqrt(COUNT) / 2, f"bit {bit}: {ones} of {COUNT}"


NEIGHBOURS = {
    "seeds": [(seed, "p", 0, 0) for seed in range(4)],
    "purposes": [(0, purpose, 0, 0) for purpose in ("p", "q", "p/", "attack/natural")],
    "indices": [(0, "p", index, 0) for index in range(4)],
    "steps": [(0, "p", 0, step) for step in range(4)],
    "swapped keys": [(0, "p", 1, 2), (0, "p", 2, 1), (0, "p", 12, 0), (0, "p", 0, 12)],
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_neighbouring_addresses_are_unrelated(kind: str) -> None:
    draws = [random.uniform(s, p, i, k, shape=(COUNT,)).double().numpy() for s, p, i, k in NEIGHBOURS[kind]]
    for first, second in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(COUNT)
        assert abs(np.corrcoef(first[1:], second[:-1])[0, 1]) < 5 / np.sqrt(COUNT)


def test_draws_over_consecutive_indices_are_uniform_and_uncorrelated() -> None:
    drawn = random.uniform(0, "across", torch.arange(COUNT), 9).double().numpy()
    assert stats.kstest(drawn, "uniform").pvalue > 1e-4
    for lag in (1, 2, 128):
        assert abs(np.corrcoef(drawn[lag:], drawn[:-lag])[0, 1]) < 5 / np.sqrt(COUNT)


def test_a_different_number_of_keys_is_a_different_address() -> None:
    draws = [random.bits(0, "p", *keys, shape=(8,)) for keys in ((), (0,), (0, 0), (0, 0, 0))]
    assert len({tuple(draw.tolist()) for draw in draws}) == 4


@pytest.mark.parametrize("draw", [random.bits, random.uniform, random.normal])
def test_batch_splits_and_orders_do_not_matter(draw: object) -> None:
    assert callable(draw)
    index = torch.tensor([5, 0, 17, 3, 123456, 9])
    whole = draw(2, "split", index, 4, shape=(3, 2))
    parts = torch.cat([draw(2, "split", part, 4, shape=(3, 2)) for part in index.split([1, 3, 2])])
    assert torch.equal(whole, parts)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    assert torch.equal(draw(2, "split", index[order], 4, shape=(3, 2)), whole[order])
    assert torch.equal(draw(2, "split", 17, 4, shape=(3, 2)), whole[2])


def test_tensor_keys_equal_integer_keys() -> None:
    expected = random.bits(1, "keys", 11, 5, shape=(4,))
    assert torch.equal(random.bits(1, "keys", torch.tensor(11), torch.tensor(5), shape=(4,)), expected)
    assert torch.equal(random.bits(1, "keys", torch.tensor([11]), torch.tensor(5), shape=(4,))[0], expected)
    assert torch.equal(random.bits(1, "keys", torch.tensor(11, dtype=torch.int32), 5, shape=(4,)), expected)


def test_shapes_are_key_shape_then_draw_shape() -> None:
    assert random.uniform(0, "s").shape == ()
    assert random.uniform(0, "s", torch.arange(3), 2).shape == (3,)
    assert random.normal(0, "s", torch.arange(3), shape=(2, 5)).shape == (3, 2, 5)
    assert random.bits(0, "s", torch.arange(3)[:, None], torch.arange(2), shape=(4,)).shape == (3, 2, 4)
    assert random.bits(0, "s", shape=(0,)).shape == (0,)


def test_normal_has_the_moments_and_the_distribution_of_the_normal() -> None:
    drawn = random.normal(0, "normal", shape=(1 << 18,)).double().numpy()
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.var() - 1) < 0.015
    assert abs(stats.skew(drawn)) < 0.03
    assert abs(stats.kurtosis(drawn)) < 0.06
    assert stats.kstest(drawn, "norm").statistic < 0.005
    assert 4 < np.abs(drawn).max() < 4.5


def test_the_table_of_the_normal_is_symmetric_and_has_variance_one() -> None:
    table = random._normal_table(torch.device("cpu")).double()
    assert torch.equal(table, -table.flip(0))
    assert abs(float(table.square().mean()) - 1) < 1e-6
    quantiles = stats.norm.ppf((np.arange(1 << 16) + 0.5) / (1 << 16))
    np.testing.assert_allclose(table.numpy(), quantiles / np.sqrt((quantiles**2).mean()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("high", [1, 2, 3, 10, 1000])
def test_integers_are_in_range_and_unbiased(high: int) -> None:
    drawn = random.integers(high, 0, "integers", shape=(COUNT,)).numpy()
    assert drawn.min() >= 0
    assert drawn.max() == high - 1
    if high > 1:
        assert stats.chisquare(np.bincount(drawn, minlength=high)).pvalue > 1e-4


def test_integers_equal_the_multiply_shift_of_the_upper_half() -> None:
    high = (1 << 31) - 1
    expected = [((value >> 32) * high) >> 32 for value in reference_bits(3, "i", 8, count=50)]
    assert random.integers(high, 3, "i", 8, shape=(50,)).tolist() == expected
    for wrong in (0, -1, (1 << 31) + 1):
        with pytest.raises(ValueError, match="high"):
            random.integers(wrong, 0, "i")


def test_permutations_are_permutations_that_differ_by_key() -> None:
    orders = [random.permutation(50, seed, purpose, epoch) for seed in (0, 1) for purpose in "ab" for epoch in (1, 2)]
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 8
    assert torch.equal(orders[0], random.permutation(50, 0, "a", 1))
    assert random.permutation(0, 0, "a").tolist() == []


def test_every_order_of_three_is_equally_likely() -> None:
    orders = [tuple(random.permutation(3, 0, "orders", key).tolist()) for key in range(3000)]
    counts = [orders.count(order) for order in itertools.permutations(range(3))]
    assert stats.chisquare(counts).pvalue > 1e-4


def test_nothing_touches_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    random.normal(0, "quiet", torch.arange(4), shape=(8,))
    random.permutation(9, 0, "quiet")
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.gpu
def test_cuda_gives_the_bits_of_the_cpu() -> None:
    index = torch.arange(257)
    for draw in (random.bits, random.uniform, random.normal):
        here = draw(3, "device", index, 5, shape=(3, 7))
        there = draw(3, "device", index.cuda(), 5, shape=(3, 7))
        assert there.is_cuda
        assert torch.equal(here, there.cpu())
    assert torch.equal(random.permutation(999, 1, "d", 2), random.permutation(999, 1, "d", 2, device="cuda").cpu())
    assert torch.equal(random.integers(17, 1, "d", index), random.integers(17, 1, "d", index.cuda()).cpu())
