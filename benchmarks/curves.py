"""How Generalist-D's path through the plane has moved: the picture of docs/results/cifar10.md, from the log's records.

    python benchmarks/curves.py docs/results/runs --out docs/images/cifar10-curves.svg

Each line is a run, each point one of its epochs, measured on all test images: natural accuracy against PGD-20.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from generalist.paper_figures import paper_rows

PGD = "pgd-20/linf:8/255"

TWO = {
    "005-lr-floor": "crops and flips (005)",
    "021-d": "+ stronger augmentation (021)",
    "064-rising-d": "+ an eps that rises (064)",
    "071-rising-logits": "+ the natural learner's logits (071)",
    "084-long-logits": "+ a longer source with 3 steps (084)",
    "083-long-d": "+ logits all along, natural lr 0.1 (083)",
    "095-long-d-taught": "+ no labels beside them, averaged teacher (095)",
}
"""Generalist-D: each label says what a run adds to those above it."""

ONE = {
    "020-at": "one learner, augmented (020)",
    "063-rising": "+ an eps that rises (063)",
    "082-long-at": "+ 3 steps, more epochs (082)",
    "048-alone-5": "augmented, against 5/255 (048)",
}
"""Single learners."""


def curve(record: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    """(epoch, natural, PGD-20) in percent, for every epoch in which the global learner was measured on all images."""
    found = {}
    for subject, right in measured(record):
        if (epoch := re.fullmatch(r"(?:global@|epoch )(\d+)", subject)) and PGD in right:
            found[int(epoch[1])] = [100 * right[name][0] / right[name][1] for name in ("natural", PGD)]
    return [(epoch, *found[epoch]) for epoch in sorted(found)]


def measured(record: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The networks, and how many of all images each had right."""
    for each in record.get("evaluations", ()):
        if each["images"].startswith("all "):
            yield each["subject"], each["right"]
    # The first ten records are older than benchmarks/experiments.py, and have another format.
    yield from record.get("evaluation", {}).get("correct_of_total", {}).items()


def published() -> tuple[float, float]:
    """The first paper's Generalist-D, in percent."""
    wanted = ("CVPR 2023, table 1a", "cifar10", "resnet18", "generalist-d-nt-linf")
    (row,) = [row for row in paper_rows() if (row.source, row.dataset, row.model, row.method) == wanted]
    return 100 * row.cells["natural"].value, 100 * row.cells[PGD].value


def draw(curves: Mapping[str, Sequence[tuple[int, float, float]]], out: Path) -> None:
    """Two learners as solid lines, the newest darkest; one learner dashed."""
    plt.rcParams |= {"svg.hashsalt": "curves", "font.size": 9, "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7.6, 5.2), layout="constrained")
    shades = plt.get_cmap("viridis_r")
    greys = plt.get_cmap("Greys")
    for names, colors, style in (
        (TWO, [shades(0.15 + 0.85 * i / (len(TWO) - 1)) for i in range(len(TWO))], "o-"),
        (ONE, [greys(0.4 + 0.5 * i / (len(ONE) - 1)) for i in range(len(ONE))], "s--"),
    ):
        for (name, label), color in zip(names.items(), colors, strict=True):
            _, natural, robust = zip(*curves[name], strict=True)
            axes.plot(natural, robust, style, color=color, label=label, markersize=3.5, linewidth=1.4)
    axes.plot(*published(), "*", color="crimson", markersize=12, label="published Generalist-D", linestyle="none")
    axes.set(xlabel="natural accuracy (%)", ylabel="PGD-20, linf 8/255 (%)")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower left", frameon=False, fontsize=8)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="the folder with the log's JSON files")
    parser.add_argument("--out", type=Path, required=True, help="the picture, an SVG file")
    options = parser.parse_args(arguments)
    names = [*TWO, *ONE]
    draw({name: curve(json.loads((options.records / f"{name}.json").read_text())) for name in names}, options.out)


if __name__ == "__main__":
    main()
