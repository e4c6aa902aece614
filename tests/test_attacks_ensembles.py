"""AutoAttack's ensembles: what is in them, as its authors' code has it, and what they do together."""

from __future__ import annotations

import pytest
import torch
from attack_targets import digits, labelled, network, noise, right_ones, trained

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.autoattack import PLUS, RAND, STANDARD, AutoAttack
from generalist.attacks.fab import FAB
from generalist.attacks.pgd_attack import PGD
from generalist.attacks.square import Square
from generalist.attacks.threats import L1, L2, Linf
from generalist.evaluation.named import attack_named

NAMES = {"standard": "aa", "plus": "aa-plus", "rand": "aa-rand"}


def described(attack) -> dict[str, object]:
    if isinstance(attack, Square):
        shares = [attack.share(query) for query in range(attack.queries)]
        return {"name": "square", "restarts": attack.restarts, "queries": attack.queries, "shares": shares}
    if isinstance(attack, FAB):
        settings = {"steps": attack.iterations, "alpha": attack.alpha_max, "eta": attack.eta, "beta": attack.beta}
        return {"name": attack.name, "restarts": attack.restarts, "targets": attack.targets} | settings
    if isinstance(attack, TargetedAPGD):
        return {"name": "apgd-t", "restarts": attack.restarts, "targets": attack.targets, "steps": attack.steps}
    return {"name": attack.name, "restarts": attack.restarts, "draws": attack.draws, "steps": attack.steps}


def described_again(theirs, name: str) -> dict[str, object]:
    """The same from the settings of their object."""
    if name == "square":
        square = theirs.square
        shares = [square.p_selection(query) for query in range(square.n_queries)]
        return {"name": name, "restarts": square.n_restarts, "queries": square.n_queries, "shares": shares}
    if name in ("fab", "fab-t"):
        fab, targeted = theirs.fab, name == "fab-t"
        # Before fab-t they set the restarts to 1, whatever the version.
        many = {"restarts": 1 if targeted else fab.n_restarts, "targets": fab.n_target_classes if targeted else None}
        return {"name": name, "steps": fab.n_iter, "alpha": fab.alpha_max, "eta": fab.eta, "beta": fab.beta} | many
    if name == "apgd-t":
        apgd = theirs.apgd_targeted
        return {"name": name, "restarts": apgd.n_restarts, "targets": apgd.n_target_classes, "steps": apgd.n_iter}
    return {
        "name": name,
        "restarts": theirs.apgd.n_restarts,
        "draws": theirs.apgd.eot_iter,
        "steps": theirs.apgd.n_iter,
    }


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.5), L1(2.0)], ids=lambda threat: threat.name)
@pytest.mark.parametrize("version", NAMES)
def test_versions_are_those_of_the_authors(version: str, threat) -> None:
    package = pytest.importorskip("pyautoattack", exc_type=ImportError)
    theirs = package.AutoAttack(network(), norm=threat.name.capitalize(), eps=0.1, version=version)
    ours = attack_named(NAMES[version])
    assert isinstance(ours, AutoAttack) and ours.name == NAMES[version]
    expected = [described_again(theirs, name) for name in theirs.attacks_to_run]
    assert [described(attack) for attack in ours.attacks_for(threat)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.4)], ids=str)
@pytest.mark.parametrize("attack", STANDARD, ids=lambda attack: attack.name)
def test_each_part_of_autoattack_beside_the_authors_on_all_digits(attack, threat, caplog) -> None:
    """Starts are drawn otherwise, so a sample on the edge may fall otherwise: one of 411 is a quarter of a point.

    Square is all chance, and its windows reach the last row and column, which theirs never do: it leaves fewer.
    """
    package = pytest.importorskip("pyautoattack", exc_type=ImportError)
    caplog.set_level("CRITICAL")
    model = trained()
    batch = right_ones(model, digits(500))
    ours = attack.run(model, batch, threat=threat, seed=0).broken
    oracle = package.AutoAttack(model, norm=threat.name.capitalize(), eps=threat.eps, seed=0, device="cpu")
    oracle.attacks_to_run = [attack.name]
    x, _ = oracle.run_standard_evaluation(batch.x, batch.y, batch_size=len(batch.y))
    with torch.no_grad():
        theirs = model(x).argmax(1) != batch.y
    points = 100 * (theirs.float().mean() - ours.float().mean()).item()  # by how much ours looks more robust
    assert points <= 0.3 and 0.1 < ours.float().mean() < 0.5
    if attack.name != "square":
        assert points >= -0.3 and (ours == theirs).float().mean() >= 0.99


def test_attacks_of_an_ensemble() -> None:
    assert AutoAttack().attacks == STANDARD and AutoAttack().name == "aa"
    assert attack_named("aa-plus").attacks == PLUS and attack_named("aa-rand").attacks == RAND
    own = AutoAttack(name="own", attacks=(PGD(steps=3),))
    assert own.attacks_for(L1(1.0)) == own.attacks_for(Linf(0.1)) == (PGD(steps=3),)


@pytest.mark.parametrize("threat", [Linf(0.05), L2(0.2), L1(0.4)], ids=str)
def test_an_ensemble_breaks_what_any_of_its_attacks_breaks(threat) -> None:
    model = network(4)
    batch = labelled(model, noise(12))
    parts = (APGD(steps=6, draws=2), FAB(iterations=5, restarts=2), Square(queries=20), TargetedAPGD(steps=5))
    alone = [part.run(model, batch, threat=threat, seed=0).broken for part in parts]
    found = AutoAttack(attacks=parts).run(model, batch, threat=threat, seed=0)
    assert torch.equal(found.broken, torch.stack(alone).any(0)) and 0 < int(found.broken.sum()) < 12
    with torch.no_grad():
        assert torch.equal(model(found.x).argmax(1) != batch.y, found.broken)


def test_draws_break_a_model_that_answers_at_random_more_often() -> None:
    """Noise on the input of a network: a mean of gradients climbs better than single ones."""
    model = trained()
    batch = right_ones(model, digits(80))
    torch.manual_seed(0)

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return model((x + 0.25 * torch.randn_like(x)).clamp(0, 1))

    def broken(draws: int) -> float:
        found = APGD(steps=20, draws=draws).run(noisy, batch, threat=Linf(0.12), seed=0)
        with torch.no_grad():
            answers = torch.stack([noisy(found.x).argmax(1) != batch.y for _ in range(20)])
        return answers.float().mean().item()

    assert broken(8) > broken(1)
