"""Recipes: the shipped ones say what the papers say, YAML comes back as it went, and `--set` reaches every field."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from generalist.core.errors import GeneralistError, RecipeError
from generalist.core.options import Options, format_number, parse_number
from generalist.objectives import OBJECTIVES
from generalist.objectives.trades import TradesOptions
from generalist.recipe import Recipe, load_recipe, parse, parse_yaml, stage_recipe, to_yaml
from generalist.shipped import shipped_names, shipped_text
from generalist.training.learner_options import LearnerOptions

VARIANTS = ("d", "d-linf-l2", "t")
BEST = {f"cifar10-resnet18-{variant}" for variant in VARIANTS}
CIFAR = {
    name + "-plain" * (name in BEST)
    for name in (
        f"{data}-{model}-{variant}"
        for data in ("cifar10", "cifar100")
        for model in ("resnet18", "wrn-32-10")
        for variant in VARIANTS
    )
}
IMAGENET = {f"imagenet-{model}-{variant}" for model in ("resnet50", "wrn-50-2") for variant in VARIANTS}
REQUIRED = {
    *(f"digits-{kind}" for kind in ("nt", "at", *VARIANTS)),
    *("mnist-d", "svhn-d", "cifar10-resnet18-d-paper", "cifar10-resnet18-d-published-code"),
    *BEST,
    *CIFAR,
    *IMAGENET,
}
LEARNERS = {"d": ["linf", "natural"], "d-linf-l2": ["linf", "l2"], "t": ["linf", "natural", "l2"]}
BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "small"},
    "learners": [
        {"name": "linf", "objective": "trades", "threat": "linf:8/255", "optimizer": {"lr": 0.1}},
        {"name": "natural", "objective": "nt"},
    ],
}


def by_name(recipe: Recipe) -> dict[str, LearnerOptions]:
    return {learner.name: learner for learner in recipe.learners}


def variant_of(name: str) -> str:
    return next(variant for variant in ("d-linf-l2", "d", "t") if name.removesuffix("-plain").endswith(f"-{variant}"))


# -- shipped ---------------------------------------------------------------------------------------------------------


def test_the_required_recipes_are_shipped() -> None:
    assert set(shipped_names()) >= REQUIRED


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_recipe_loads_and_comes_back(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert len(recipe.source) > 20
    text = to_yaml(recipe)
    again = parse(parse_yaml(text, name))
    assert again == recipe
    assert to_yaml(again) == text
    assert load_recipe(recipe) == recipe


@pytest.mark.parametrize("name", sorted(CIFAR | IMAGENET))
def test_learners_of_the_named_variants(name: str) -> None:
    recipe = load_recipe(name)
    learners = by_name(recipe)
    assert sorted(learners) == sorted(LEARNERS[variant_of(name)])
    for kind, learner in learners.items():
        assert learner.objective.kind == ("nt" if kind == "natural" else "at")
        assert (learner.threat.norm if learner.threat else "natural") == kind
        assert (learner.optimizer.kind, learner.optimizer.momentum) == ("sgd", 0.9)
    if variant_of(name) == "t":
        assert recipe.gammas_at(recipe.train.epochs) == pytest.approx([0.4, 0.3, 0.3])
        assert recipe.mixing.shares["natural"] == 0.5
    assert recipe.gammas_at(0)[list(learners).index("linf")] == 1


@pytest.mark.parametrize("name", sorted(CIFAR))
def test_cifar_settings_are_the_papers(name: str) -> None:
    recipe = load_recipe(name)
    wide = "wrn-32-10" in name
    assert recipe.data.name == name.split("-")[0]
    assert recipe.model.name == ("wrn-32-10" if wide else "resnet18")
    assert (recipe.train.epochs, recipe.train.batch_size) == (120, 128)
    for kind, learner in by_name(recipe).items():
        if kind == "natural":
            assert learner.optimizer.weight_decay == 5e-4
            continue
        assert learner.threat is not None
        assert learner.threat.eps == {"linf": 8 / 255, "l2": 128 / 255}[kind]
        assert learner.attack.steps == 10 and learner.own_attack().start == "uniform"
        step = learner.attack.step or learner.threat.build().default_step(10)
        assert step == pytest.approx({"linf": 2 / 255, "l2": 32 / 255}[kind])
        assert learner.optimizer.weight_decay == (7e-4 if wide else 3.5e-3)
        assert recipe.learning_rate(learner) == (0.1 if wide else 0.01)
    redistribution = recipe.mixing.redistribution
    assert (redistribution.interval(120), redistribution.first_epoch(120), recipe.mixing.decay) == (5, 75, 0.999)


@pytest.mark.parametrize("name", sorted(BEST))
def test_the_best_settings_are_the_plain_ones_tasks_trained_otherwise(name: str) -> None:
    best, plain = load_recipe(name), load_recipe(f"{name}-plain")
    assert [learner.name for learner in best.learners] == [learner.name for learner in plain.learners]
    assert best.threats() == plain.threats() and best.mixing.shares.keys() == plain.mixing.shares.keys()
    apart = best.redistribution().last_apart(best.train.epochs)
    assert apart == 120, "its snapshot is what other variants branch off"
    linf = by_name(best)["linf"]
    assert linf.attack.scale is not None and linf.attack.scale.at(apart, best.train.epochs) == 1
    assert linf.companions() == ["natural.average"] * ("natural" in by_name(best))
    rates = [best.learning_rate(own) * own.schedule.at(125, best.train.epochs) for own in best.learners]
    assert rates == pytest.approx([0.002] * len(rates)), "they stay near one another once they are mixed"
    before, *rest = (best.gammas_at(epoch)[0] for epoch in (120, 130, 140, 155))
    assert before == 1 and len(set(rest)) == 1 and 0.5 < rest[0] < 1, "from 130 on all epochs are of one kind"
    assert best.validation.rule == "last", "there is nothing to choose among them"
    assert [best.mixing.decay_at(epoch, 155) for epoch in (0, 120, 121, 155)] == [0.998, 0.998, 0.9995, 0.9995]


@pytest.mark.parametrize("name", sorted(IMAGENET))
def test_imagenet_settings_are_the_papers(name: str) -> None:
    recipe = load_recipe(name)
    assert (recipe.data.name, recipe.data.resolution, recipe.train.epochs) == ("folder", 224, 240)
    for kind, learner in by_name(recipe).items():
        if kind == "natural":
            assert learner.optimizer.weight_decay == 2e-4
            continue
        assert learner.threat is not None
        assert learner.threat.eps == {"linf": 4 / 255, "l2": 64 / 255}[kind]
        assert learner.attack.steps == 3
        assert learner.optimizer.weight_decay == 1e-4


def test_mnist_and_svhn() -> None:
    mnist, svhn = load_recipe("mnist-d"), load_recipe("svhn-d")
    assert [str(threat) for threat in mnist.threats()] == ["linf:0.3"]
    assert [str(threat) for threat in svhn.threats()] == ["linf:8/255"]
    assert not mnist.data.augmentation.flip and not svhn.data.augmentation.flip


def test_digits_recipes_are_a_family() -> None:
    """The baselines spend the same budget on the same data and network as the generalists."""
    family = [load_recipe(f"digits-{kind}") for kind in ("nt", "at", *VARIANTS)]
    assert len({(r.train.epochs, r.train.batch_size, r.model.name, r.model.width) for r in family}) == 1
    assert [len(r.learners) for r in family] == [1, 1, 2, 2, 3]


# -- styles ----------------------------------------------------------------------------------------------------------


def test_style_paper_is_the_column_of_the_papers() -> None:
    recipe = load_recipe("cifar10-resnet18-d-paper")
    linf, natural = recipe.learners
    assert recipe.mixing.gamma.values == [1, 1, 1, 0]
    assert linf.schedule.breakpoints(120) == [0, 40, 60, 120] and linf.schedule.values == [1, 1, 0.1, 0.01]
    assert (recipe.learning_rate(linf), recipe.learning_rate(natural)) == (0.01, 0.1)
    assert not recipe.mixing.warmup and recipe.mixing.source == "raw"
    assert not recipe.mixing.redistribution.reset and recipe.mixing.redistribution.when == "epoch-end"
    assert (recipe.validation.split, recipe.validation.images) == ("test", 10_000)


def test_style_published_code_is_the_column_of_the_code() -> None:
    recipe = load_recipe("cifar10-resnet18-d-published-code")
    linf, natural = recipe.learners
    assert linf.threat is not None and linf.threat.eps == 0.031 and linf.attack.step == 0.007
    assert recipe.mixing.gamma.values[-1] == 0.4
    assert recipe.learning_rate(natural) == recipe.learning_rate(linf) == 0.01
    assert (recipe.mixing.source, recipe.mixing.counters, recipe.mixing.warmup) == ("averaged", "truncate", True)
    assert linf.averaging is not None and natural.averaging is not None
    assert recipe.mixing.redistribution.when == "every-iteration" and not recipe.mixing.redistribution.reset
    assert (recipe.validation.min_natural, recipe.validation.steps) == (0.88, 10)


def test_what_the_recipe_says_itself_wins_over_its_style() -> None:
    recipe = load_recipe({**BASE, "style": "paper", "mixing": {"gamma": 0.7}, "validation": {"split": "held-out"}})
    assert recipe.mixing.gamma.values == [0.7] and recipe.validation.split == "held-out"
    own = [{**BASE["learners"][0], "schedule": 1}, {**BASE["learners"][1], "optimizer": {"lr": 0.3}}]
    recipe = load_recipe({**BASE, "style": "paper", "learners": own})
    assert recipe.learners[0].schedule.values == [1] and recipe.learners[1].optimizer.lr == 0.3


@pytest.mark.parametrize("threat", ["linf:8/255", " LINF : 8/255", {"norm": "linf", "eps": "8/255"}])
def test_style_reaches_a_threat_however_it_is_written(threat: Any) -> None:
    learners = [{**BASE["learners"][0], "threat": threat}, BASE["learners"][1]]
    linf, natural = load_recipe({**BASE, "learners": learners, "style": "published-code"}).learners
    assert linf.attack.step == 0.007 and natural.attack.step is None
    assert linf.threat is not None and linf.threat.eps == 8 / 255, "what the recipe says itself wins"


def test_style_gives_the_linf_step_to_linf_alone() -> None:
    learners = [{**BASE["learners"][0], "threat": "l2:0.5"}, BASE["learners"][1]]
    assert load_recipe({**BASE, "learners": learners, "style": "published-code"}).learners[0].attack.step is None


# -- stages: `change` ------------------------------------------------------------------------------------------------

THREE = [*BASE["learners"], {"name": "l2", "objective": "at", "threat": "l2:0.5"}]


def changed_by(change: dict[str, Any], **fields: Any) -> Recipe:
    """The recipe of a stage with this `change` of a three-learner recipe with shares."""
    mixing = {"shares": {"natural": 0.4, "l2": 0.6}, "decay": 0.9}
    recipe = load_recipe(
        {**BASE, "learners": THREE, "mixing": mixing, "stages": [{"name": "one", "change": change}], **fields}
    )
    return stage_recipe(recipe, recipe.stages[0], trust_code=False)


def test_a_stage_with_one_learner_clears_the_shares() -> None:
    stage = changed_by({"learners": [BASE["learners"][0]], "mixing": {"shares": {}}})
    assert stage.mixing.shares == {} and stage.gammas_at(0) == [1]
    assert stage.mixing.decay == 0.9, "the rest of the section stays"


def test_a_stage_with_other_learners_has_shares_of_its_own() -> None:
    others = [BASE["learners"][0], {"name": "calm", "objective": "nt"}]
    assert changed_by({"learners": others, "mixing": {"shares": {"calm": 1}}}).mixing.shares == {"calm": 1}


def test_a_stage_that_changes_the_learners_alone_is_told_to_change_the_shares() -> None:
    with pytest.raises(RecipeError, match=r"stages\.one\.change.*there is no learner 'natural'"):
        changed_by({"learners": [BASE["learners"][0]]})


def test_an_empty_section_in_a_stage_is_the_default_one() -> None:
    assert changed_by({"mixing": {}}).mixing == load_recipe(BASE).mixing
    assert changed_by({"mixing": {}}, style="paper").mixing == load_recipe({**BASE, "style": "paper"}).mixing
    assert changed_by({}).mixing.decay == 0.9


def test_a_stage_changes_fields_that_a_recipe_has() -> None:
    with pytest.raises(RecipeError, match="one: `change` has no field 'name'"):
        changed_by({"name": "other"})


# -- mixing weights and thresholds ------------------------------------------------------------------------------------


def test_gamma_outside_its_range_names_the_lead_learner() -> None:
    with pytest.raises(RecipeError, match=r"mixing\.gamma: 1\.5 \(linf\) lies outside"):
        load_recipe({**BASE, "learners": BASE["learners"][::-1], "mixing": {"gamma": 1.5}})


def ramp(count: int, *, falling: bool, shift: float = 0) -> dict[str, list[float]]:
    positions = [0.0, *((i + shift) / count for i in range(1, count - 1)), 1.0]
    return {"fractions": positions, "values": [1 - p if falling else p for p in positions]}


def test_many_breakpoints_are_checked_quickly() -> None:
    started = time.monotonic()
    gammas = {"linf": ramp(1000, falling=True), "natural": ramp(1000, falling=False)}
    assert load_recipe({**BASE, "mixing": {"gammas": gammas}}).gammas_at(60) == pytest.approx([0.5, 0.5])
    with pytest.raises(RecipeError, match=r"mixing\.gamma: .*at most 1000 breakpoints, not 6000"):
        load_recipe({**BASE, "mixing": {"gamma": ramp(6000, falling=True)}})
    gammas["natural"] = ramp(1000, falling=False, shift=0.5)
    with pytest.raises(RecipeError, match=r"mixing\.gammas: .*at most 1000 .*in all"):
        load_recipe({**BASE, "mixing": {"gammas": gammas}})
    assert time.monotonic() - started < 2


def test_gammas_must_add_up_to_one_on_both_sides_of_a_jump() -> None:
    jump = {"epochs": [0, 40, 40, 120], "values": [1, 1, 0.5, 0.5]}
    ramp_to_it = {"epochs": [0, 40, 120], "values": [0, 0.5, 0.5]}
    with pytest.raises(RecipeError, match=r"mixing\.gammas add up to 1\.5 at epoch 40"):
        load_recipe({**BASE, "mixing": {"gammas": {"linf": jump, "natural": ramp_to_it}}})


def test_a_threat_that_is_asked_for_twice_counts_once() -> None:
    asked = ["linf:8/255", {"norm": "linf", "eps": "8/255"}, "l2:0.5", "linf:8/255"]
    recipe = load_recipe({**BASE, "validation": {"threats": asked}})
    assert [str(threat) for threat in recipe.threats()] == ["linf:8/255", "l2:0.5"]


# -- --set -----------------------------------------------------------------------------------------------------------


def test_set_by_position_and_by_name() -> None:
    recipe = load_recipe("digits-t", overrides=["learners.0.threat.eps=0.2", "learners.l2.threat.eps=1"])
    assert [str(threat) for threat in recipe.threats()] == ["linf:0.2", "l2:1"]


def test_set_into_short_forms() -> None:
    changes = ["learners.linf.threat.eps=4/255", "learners.0.objective.beta=3", "learners.linf.attack.steps=7"]
    learner = load_recipe(BASE, overrides=changes).learners[0]
    assert learner.threat is not None and (learner.threat.norm, learner.threat.eps) == ("linf", 4 / 255)
    assert isinstance(learner.objective, TradesOptions) and learner.objective.beta == 3
    assert learner.attack.steps == 7


def test_set_into_defaults() -> None:
    recipe = load_recipe(BASE, overrides=["mixing.gamma.values.3=0.2", "learners.0.schedule.values.1=0.5"])
    assert recipe.mixing.gamma.values == [1, 1, 1, 0.2]
    assert recipe.mixing.gamma.fractions == [0, 1 / 3, 2 / 3, 1]
    assert recipe.learners[0].schedule.values == [1, 0.5, 0.1, 0.01]


def test_set_keeps_order_and_the_rest() -> None:
    recipe = load_recipe(BASE, overrides=["train.epochs=3", "train={epochs: 5}", "train.seed=4"])
    assert (recipe.train.epochs, recipe.train.seed) == (5, 4)
    assert load_recipe(BASE, overrides=["train.epochs=5", "train.seed=4"]) == recipe
    assert "train" not in BASE, "the caller's mapping is not touched"


@pytest.mark.parametrize("style", ["paper", "published-code"])
def test_set_gives_the_same_in_any_order_with_style(style: str) -> None:
    changes = [f"style={style}", "mixing.decay=0.99", "learners.0.schedule.values.1=0.5", "learners.0.attack.steps=7"]
    found = [load_recipe(BASE, overrides=order) for order in itertools.permutations(changes)]
    assert all(recipe == found[0] for recipe in found)
    alone = load_recipe({**BASE, "style": style})
    assert found[0].mixing == alone.mixing.model_copy(update={"decay": 0.99})
    assert found[0].learners[0].schedule.positions == alone.learners[0].schedule.positions


def test_set_of_one_field_leaves_its_neighbours_to_the_style() -> None:
    changes = ["style=published-code", "learners.0.attack.steps=7", "learners.0.threat=l2:0.5"]
    found = [load_recipe(BASE, overrides=order) for order in itertools.permutations(changes)]
    assert [recipe.learners[0].attack.step for recipe in found] == [None] * 6
    assert all(recipe == found[0] for recipe in found)


def test_set_into_a_schedule_keeps_its_breakpoints() -> None:
    assert load_recipe(BASE, overrides=["mixing.gamma.values=[1, 1, 1, 0]"]).mixing.gamma.positions[1] == 1 / 3
    constant = {**BASE, "mixing": {"gamma": 0.7}}
    assert load_recipe(constant, overrides=["mixing.gamma.values.0=0.6"]).mixing.gamma.values == [0.6]


def test_set_whole_sections_and_yaml_values() -> None:
    falling, rising = "{fractions: [0, 1], values: [1, 0.5]}", "{fractions: [0, 1], values: [0, 1/2]}"
    recipe = load_recipe(BASE, overrides=[f"mixing.gammas={{linf: {falling}, natural: {rising}}}"])
    assert recipe.gammas_at(recipe.train.epochs) == [0.5, 0.5]
    assert (
        load_recipe(BASE, overrides=["validation.threats=['l2:0.5', {norm: linf, eps: 1/255}]"]).threats()[1].eps
        == 1 / 255
    )


@pytest.mark.parametrize(("text", "value"), [("8/255", 8 / 255), ("1e-3", 1e-3), ("0.5", 0.5), (" 1 / 3 ", 1 / 3)])
def test_fractions_and_exponents(text: str, value: float) -> None:
    recipe = load_recipe(BASE, overrides=[f"learners.0.threat.eps='{text}'"])
    assert recipe.learners[0].threat is not None and recipe.learners[0].threat.eps == value


def test_a_file_and_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert load_recipe(path).name == "mine"
    assert load_recipe(str(path)) == load_recipe(path)
    path.write_text(yaml.safe_dump({**BASE, "name": "other"}))
    assert load_recipe(path).name == "other"


# -- every field is explained ----------------------------------------------------------------------------------------


def options_classes(annotation: Any = Recipe) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from options_classes(field.annotation)
    for argument in get_args(annotation):
        yield from options_classes(argument)


def test_every_field_of_every_section_has_a_docstring() -> None:
    classes = {*options_classes(), *(OBJECTIVES.get(name).Options for name in OBJECTIVES)}
    assert len(classes) > 15
    for options in classes:
        assert issubclass(options, Options) and options.__doc__
        for name, field in options.model_fields.items():
            assert field.description, f"{options.__name__}.{name} has no docstring"


def test_the_page_of_recipes_is_up_to_date() -> None:
    """In a process of its own: other tests register things."""
    command = [sys.executable, "-m", "generalist.recipe_docs"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
    assert page == made, "run `make docs-recipes`"
    fields = {name for options in options_classes() for name in options.model_fields}
    assert [name for name in sorted(fields - {"kind"}) if f"**{name}**" not in page] == []
    assert [name for name in [*shipped_names(), "trades", "resnet18"] if f"`{name}`" not in page] == []


# -- anything else is refused, and clearly ---------------------------------------------------------------------------

keys = st.sampled_from([*Recipe.model_fields, "name", "kind", "threat", "eps", "values", "lr", "x", "1"]) | st.text(
    max_size=5
)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    | st.sampled_from(["linf:8/255", "nt", "at", "digits", "small", "1/3", "8/0", 10**400, "a:b", "paper"])
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


def outcome(load: Any) -> str:
    """`sound`, or the complaint; anything but a complaint of ours passes through and fails the test."""
    try:
        return "sound" if isinstance(load(), Recipe) else "not a recipe"
    except GeneralistError as error:
        return str(error)


RIGHT = ("sound", "recipe: ")


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(keys, values, max_size=6))
def test_any_mapping_is_refused_or_sound(raw: dict[str, Any]) -> None:
    assert outcome(lambda: load_recipe(raw)).startswith(RIGHT)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["data", "model", "learners", "mixing", "train", "validation", "stages", "style"]), values)
def test_any_section_in_a_sound_recipe_is_refused_or_sound(section: str, value: Any) -> None:
    assert outcome(lambda: parse({**BASE, section: value})).startswith(RIGHT)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["learners", "0", "linf", "threat", "mixing", "gamma", "values", "x", ""]), max_size=5),
    st.text(max_size=12) | st.sampled_from(["1", "[1, 2]", "{a: 1}", "!!int ''", "&a [*a]", "8/255", "!!python/none"]),
)  # fmt: skip
def test_any_override_is_refused_or_sound(path: list[str], text: str) -> None:
    override = f"{'.'.join(path)}={text}"
    assert outcome(lambda: load_recipe(BASE, overrides=[override])).startswith(RIGHT)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="{}[]&*!-:|>'\"%@`#,? \n\tab01.", max_size=40))
def test_any_text_is_refused_or_a_mapping(text: str) -> None:
    try:
        raw = parse_yaml(text, "fuzz")
    except RecipeError:
        return
    assert isinstance(raw, dict)


def test_shipped_text_is_what_is_loaded() -> None:
    assert parse_yaml(shipped_text("digits-t"), "digits-t")["train"] == {"epochs": 50, "batch_size": 64}
    with pytest.raises(RecipeError, match="did you mean 'digits-t'"):
        shipped_text("digit-t")


def test_a_value_that_begins_with_a_number_sign_is_no_comment() -> None:
    taught = load_recipe("cifar10-resnet18-d-plain", overrides=["learners.linf.objective={kind: at-distil}"])
    assert not taught.learners[0].companions()
    for text in ("#natural", " #natural "):
        changed = load_recipe(taught, overrides=[f"learners.linf.objective.teacher={text}"])
        assert changed.learners[0].companions() == ["natural"]


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        *((text, text) for text in ("8/255", "6.5/255", "0.5/255", "128/255", "5/255", "1/3", "24/31", "-1/3", "2/7")),
        ("7.50/255", "7.5/255"),
        (".5/255", "0.5/255"),
        ("6./255", "6/255"),
        ("6.55/255", 6.55 / 255),
        ("3.5e-3", 0.0035),
        ("51/255", 0.2),
        ("0.030999", 0.030999),
    ],
)
def test_numbers_are_kept_as_people_write_them(written: str, kept: float | str) -> None:
    assert format_number(parse_number(written)) == kept
    assert parse_number(kept) == parse_number(written), "and no digit is lost"


# -- options that would do nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("learners.natural.attack.steps=5", r"learners\.1: .*'nt' makes no adversarial examples; leave `attack` out"),
        ("learners.linf.optimizer={kind: adam, momentum: 0.95}", r"learners\.0\.optimizer: momentum.*adam"),
        ("learners.linf.optimizer={kind: adamw, nesterov: true}", r"learners\.0\.optimizer: nesterov.*adamw"),
        ("learners.linf.optimizer.betas=[0.8, 0.9]", r"learners\.0\.optimizer: betas.*sgd"),
        ("learners.linf.optimizer.adam_eps=1e-6", r"learners\.0\.optimizer: adam_eps.*sgd"),
        ("learners.linf.optimizer={momentum: 0, nesterov: true}", r"learners\.0\.optimizer: nesterov.*momentum"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(change: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        load_recipe(BASE, overrides=[change])


@pytest.mark.parametrize(
    "change", ["learners.linf.optimizer.lr=1e300", "learners.linf.schedule.values=[1, 1e300]", "mixing.gamma=-1e40"]
)
def test_numbers_that_single_precision_does_not_have_are_refused(change: str) -> None:
    with pytest.raises(RecipeError, match=r"numbers are at most 1e\+18"):
        load_recipe(BASE, overrides=[change])


@pytest.mark.parametrize("optimizer", [{}, {"kind": "adam", "betas": [0.8, 0.9]}, {"momentum": 0.8, "nesterov": True}])
def test_a_resolved_recipe_says_all_options_and_is_taken_back(optimizer: dict[str, Any]) -> None:
    learners = [
        {**BASE["learners"][0], "optimizer": {"lr": 0.1, **optimizer}, "attack": {"steps": 3}},
        BASE["learners"][1],
    ]
    recipe = load_recipe({**BASE, "learners": learners})
    assert parse(parse_yaml(to_yaml(recipe), "resolved")) == recipe
