"""Images: adversarial examples, and the samples on which networks disagree."""

from __future__ import annotations

from collections.abc import Sequence

from generalist.evaluation.accuracy import NATURAL
from generalist.report.html import Html, folded, join, short, table, tag
from generalist.report.pictures import Examples, Floats, difference, overlay, picture
from generalist.report.runs import Collection
from generalist.report.samples import Case, Disagreements, Recorded, disagreements
from generalist.report.section import Section, called, names, note

MOST_PAIRS = 40
"""The most pairs in the gallery over all networks and threats: each is three pictures, but the page must stay small."""
MOST_MEMBERS = 12
"""The most networks in the table of disagreements."""


def gallery_section(found: Collection, records: Sequence[Recorded], *, each: int) -> Section:
    section = Section("gallery", "Adversarial images", "Images")
    showing = [(entry, entry.examples) for entry in records if entry.examples and len(entry.examples.index)]
    strips = sum(len(set(examples.threat)) for _, examples in showing)
    most = max(1, min(each, MOST_PAIRS // max(1, strips)))
    for number, (entry, examples) in enumerate(showing):
        section.add(
            folded(short(entry.network.name, 80), *_strips(entry, examples, most), opened=number == 0, group=True)
        )
    if showing:
        section.add(
            note(
                "Each entry: the image, its adversarial version, and their difference scaled to its largest change "
                "(grey: none). Below: the true class, and what the network predicts for both."
            )
        )
    has = {id(entry.network.run) for entry, _ in showing}
    if lacking := [run for run in found.runs if id(run) not in has]:
        section.missing(
            f"No example images of {names([run.name for run in lacking])}",
            [called("evaluate", run, "--preset", "quick") for run in lacking],
        )
    return section


def _strips(entry: Recorded, examples: Examples, most: int) -> list[Html]:
    strips = []
    for threat in dict.fromkeys(examples.threat):
        positions = [i for i, name in enumerate(examples.threat) if name == threat][:most]
        attacks = dict.fromkeys(short(examples.attack[i], 40) for i in positions)
        triples = [_triple(entry, examples, i) for i in positions]
        strips.append(
            join(tag("h3", f"{short(threat, 40)}, {names(list(attacks))}"), tag("div", *triples, class_="strip"))
        )
    return strips


def _triple(entry: Recorded, examples: Examples, i: int) -> Html:
    label, clean, attacked = (
        short(entry.class_name(int(numbers[i])), 30)
        for numbers in (examples.label, examples.clean_prediction, examples.adversarial_prediction)
    )
    sample = int(examples.index[i])
    pictures = (
        picture(examples.clean[i], f"sample {sample}, a {label}"),
        picture(examples.adversarial[i], f"the same, attacked: taken for {attacked}"),
        picture(difference(examples.clean[i], examples.adversarial[i]), "the difference"),
    )
    said = join(tag("strong", label), f" → {clean}", " → ", tag("em", attacked), tag("small", f" sample {sample}"))
    return tag("figure", tag("div", *pictures, class_="pictures"), tag("figcaption", said))


# -- disagreements ----------------------------------------------------------------------------------------------------


def disagreement_section(
    found: Collection, records: Sequence[Recorded], *, most: int, device: str, trust_code: bool
) -> Section:
    section = Section("disagreements", "Right here, wrong there", "Disagreements")
    compared = disagreements(records, most=most, device=device, trust_code=trust_code) if most else None
    if compared is None:
        if most:
            text = "Two networks with records of the same images are needed"
            section.missing(text, [called("evaluate", run, "--preset", "quick") for run in found.runs])
        else:
            section.add(note("Left out: --images 0."))
        return section
    for number, kind in enumerate(compared.kinds):
        title = "Natural images" if kind == NATURAL else f"Under attack, {kind}"
        cases = [_case(case) for case in compared.cases if case.kind == kind]
        strip = tag("div", *cases, class_="strip") if cases else note("No images of these are kept, or none differ.")
        section.add(folded(title, strip, _counts(compared, kind, title), opened=number == 0, group=True))
    section.add(
        note(
            "Each entry: the image (under attack, the one that fools the second network), and where each of the two "
            "lookswhen it predicts its class (Grad-CAM; yellow: most)."
        )
    )
    section.parts += [note(short(text)) for text in compared.notes[:8]]
    return section


def _case(case: Case) -> Html:
    what = "image" if case.kind == NATURAL else f"image attacked in {case.kind}"
    parts = [picture(case.image, f"sample {case.sample}, {what}, a {short(case.label, 30)}")]
    for network, evidence in ((case.right.name, case.right_map), (case.wrong.name, case.wrong_map)):
        if evidence is not None:
            parts.append(_laid_over(case.image, evidence, network))
    right, wrong = (
        join(tag("span", short(name, 40)), ": ", tag(mark, short(says, 30)))
        for name, says, mark in (
            (case.right.name, case.right_says, "strong"),
            (case.wrong.name, case.wrong_says, "em"),
        )
    )
    said = join(tag("strong", short(case.label, 30)), tag("small", f" sample {case.sample}"))
    caption = tag("figcaption", said, tag("br"), right, tag("br"), wrong)
    return tag("figure", tag("div", *parts, class_="pictures"), caption)


def _laid_over(image: Floats, evidence: Floats, network: str) -> Html:
    return picture(overlay(image, evidence), f"where {short(network, 40)} looks")


def _counts(compared: Disagreements, kind: str, title: str) -> Html:
    members = list(enumerate(compared.members))[:MOST_MEMBERS]
    heads = ["right \\ wrong", *(short(network.name, 40) for _, network in members)]
    rows = [[short(network.name, 40), *(_count(compared, kind, a, b) for b, _ in members)] for a, network in members]
    caption = f"{title}: images that the row's network gets right and the column's wrong"
    return folded("How many", table(heads, rows, caption=caption))


def _count(compared: Disagreements, kind: str, a: int, b: int) -> str:
    return "–" if a == b else str(compared.counts[kind, a, b])
