"""Steps and columns: what shares work with what, in both modes and precisions; and full batches of few survivors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaluation_helpers import L2, LINF, SHORT, first_images
from hypothesis import given
from hypothesis import strategies as st

from generalist.attacks.apgd import APGD
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.pgd_attack import PGD
from generalist.core.errors import GeneralistError
from generalist.evaluation.packing import Feeder, pack
from generalist.evaluation.plan import CONFIRM, PRESETS, make_plan, preset_named
from generalist.evaluation.verdicts import Verdicts

AA = ["apgd-ce", "apgd-t", "fab-t", "square"]


def labels(plan: object, threat: str = "linf:0.12") -> list[str]:
    return [step.label for step in plan.steps if str(step.threat) == threat]  # type: ignore[attr-defined]


def test_an_ensemble_shares_the_steps_that_are_columns() -> None:
    plan = make_plan(PRESETS["papers"].attacks, [LINF, L2], mode="each", precision="default")
    assert len(plan.steps) == 2 * 9
    columns = {column.name: column.steps for column in plan.columns}
    assert len(columns) == 2 * 10
    assert columns["aa/linf:0.12"] == tuple(f"linf:0.12 {name}" for name in AA)
    assert columns["pgd-20/l2:0.6"] == ("l2:0.6 pgd-20",)


def test_other_settings_are_other_steps() -> None:
    plan = make_plan(["apgd-ce", "aa-plus", "aa"], [LINF], mode="each", precision="default")
    found = labels(plan)
    assert found[0] == "apgd-ce" and "aa-plus.apgd-ce" in found and found.count("apgd-t") == 1
    twice = AutoAttack(name="twice", attacks=(APGD(steps=3), APGD(steps=4), APGD(steps=3)))
    assert labels(make_plan([twice], [LINF], mode="each", precision="default")) == ["twice.apgd-ce", "twice.apgd-ce-2"]


def test_what_is_no_attack_is_refused() -> None:
    for thing, said in ((5, "a int is no attack"), (len, "is no attack, for it has no name"), (PGD, "PGD is a class")):
        with pytest.raises(GeneralistError, match=said):
            make_plan([thing], [LINF], mode="each", precision="default")  # type: ignore[list-item]


def test_a_cascade_is_a_column_for_each_prefix() -> None:
    plan = make_plan(["natural", "pgd-20", "apgd-ce", "aa"], [LINF], mode="cascade", precision="default")
    assert [len(column.steps) for column in plan.columns] == [1, 2, 5]
    assert plan.columns[2].steps[:2] == plan.columns[1].steps


def test_fast_searches_ensembles_in_half_precision_and_confirms() -> None:
    plan = make_plan(["natural", "aa"], [LINF], mode="cascade", precision="fast")
    assert labels(plan) == ["apgd-ce", "apgd-t", "fab-t@bf16", "square@bf16"]
    assert [step.half for step in plan.steps] == [False, False, True, True]
    each = make_plan(["pgd-20", "apgd-t", "aa"], [LINF], mode="each", precision="fast")
    assert labels(each) == ["pgd-20", "apgd-t", "apgd-ce", "fab-t@bf16", "square@bf16"]
    other = make_plan([SHORT], [LINF], mode="cascade", precision="fast")  # its apgd-ce has fewer steps
    assert labels(other) == [
        *(f"{step.label}@bf16" for step in make_plan([SHORT], [LINF], mode="each", precision="default").steps),
        "apgd-ce",
        "apgd-t",
    ]
    weaker = make_plan([APGD(steps=5), "aa"], [LINF], mode="each", precision="fast")
    confirmed = [step.attack for step in weaker.steps if step.key in weaker.columns[1].steps and not step.half]
    assert confirmed == [CONFIRM["apgd-ce"], CONFIRM["apgd-t"]], "no attack of the user's own stands in for them"
    two = make_plan(["apgd-dlr", "square"], [LINF], mode="cascade", precision="fast")
    assert [len(column.steps) for column in two.columns] == [1, 4]


def test_presets_and_names() -> None:
    assert preset_named("standard").attacks == ("natural", "aa") and preset_named("quick").samples == 1000
    with pytest.raises(GeneralistError, match="unknown preset 'paper'; did you mean 'papers'"):
        preset_named("paper")
    with pytest.raises(GeneralistError, match="two attacks are called 'pgd-20'"):
        make_plan(["pgd-20", PGD(steps=20, restarts=3)], [LINF], mode="each", precision="default")
    assert labels(make_plan([SHORT], [LINF], mode="each", precision="default"))[0] == "short.apgd-ce"


# -- packing ---------------------------------------------------------------------------------------------------------


@given(st.data())
def test_packed_batches_run_everything_once_and_in_order(data: st.DataObject) -> None:
    rounds, samples = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 30))
    size = data.draw(st.integers(1, 40))
    breaks = data.draw(st.lists(st.integers(0, rounds + 3), min_size=samples, max_size=samples))
    verdicts = Verdicts(np.arange(samples), {"step": rounds})
    seen: set[tuple[int, int]] = set()
    full = 0
    while True:
        pending = verdicts.pending("step", np.ones(samples, bool))
        positions, numbers = pack(pending, size)
        if len(positions) == 0:
            break
        assert len(positions) == min(size, int(pending.sum()))
        full += len(positions) == size
        items = set(zip(positions.tolist(), numbers.tolist(), strict=True))
        assert len(items) == len(positions) and not items & seen
        seen |= items
        broken = np.asarray([breaks[p] == r for p, r in zip(positions, numbers, strict=True)])
        verdicts.add("step", positions, numbers, broken)
    expected = [b if b < rounds else -1 for b in breaks]
    assert verdicts.first_broken("step").tolist() == expected
    for sample, first in enumerate(expected):
        assert {(sample, r) for r in range(first + 1 if first >= 0 else rounds)} <= seen


def test_few_survivors_fill_one_batch_with_their_rounds() -> None:
    pending = np.zeros((9, 1000), bool)
    pending[:, [7, 100, 999]] = True
    positions, rounds = pack(pending, 20)
    assert positions.tolist() == [7, 100, 999] * 6 + [7, 100]
    assert rounds.tolist() == [n for n in range(6) for _ in range(3)] + [6, 6]


def test_batches_have_one_shape() -> None:
    images = first_images(10)
    feeder = Feeder(images, torch.device("cpu"), torch.float64, 7)
    batch = feeder.batch(np.asarray([3, 8]))
    assert batch.x.shape == (7, 1, 8, 8) and batch.x.dtype == torch.float64
    assert batch.index.tolist() == [3, 8, 3, 8, 3, 8, 3]
    assert torch.equal(batch.y, images.labels[batch.index])
    assert feeder.rounds(np.asarray([0, 5])).tolist() == [0, 5, 0, 5, 0, 5, 0]
