"""Our headline networks next to the published ones: the first picture of docs/results/cifar10.md.

    python benchmarks/plane.py docs/results --out docs/images/cifar10-plane.svg

Natural accuracy against AutoAttack, linf on the left and l2 on the right: the mean over seeds if there are several,
with bars for their standard deviation. An arrow leads from each published variant to ours. The dashed line is one
learner's own trade-off, which mixing has to beat.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from results_table import PAGES, Figures, Line, bound_of, lines_of, records_of

PAIRS = {
    "Generalist-D (natural + linf)": ("**`cifar10-resnet18-d`** (natural + linf)", "#0b6e4f"),
    "Generalist-D (linf + l2)": ("**`cifar10-resnet18-d-linf-l2`**", "#c2570c"),
    "Generalist-T": ("**`cifar10-resnet18-t`** (natural + linf + l2)", "#4b3f9e"),
}
"""The published variants, with our network for each and the colour of both."""
STAND_IN = {"Generalist-T": "`cifar10-resnet18-t` with its earlier settings: gamma 0.7, even shares"}
"""What is drawn until a variant itself has been measured."""
OTHERS = {
    "published: AT": "AT",
    "published: TRADES with beta 6": "TRADES 6",
    "published: TRADES with beta 1": "TRADES 1",
    "one learner, TRADES with beta 6": "TRADES 6",
    "one learner, TRADES with beta 1": "TRADES 1",
}
"""Other networks, drawn in grey, with their labels."""
ALONE = {
    "one learner, AT against linf 8/255": "one learner, 8/255",
    "one learner, against linf 5.75/255 from epoch 120 on": "5.75/255",
    "one learner, against linf 5.25/255 from epoch 120 on": "5.25/255",
}
"""Settings of one learner along its trade-off, in grey, joined by a line."""
GREY = "#6b7280"


def place(line: Line, threat: str) -> tuple[list[float], list[float]] | None:
    """Natural accuracy and AutoAttack of each seed that has both; if none has, the accuracy under those of its attacks
    that were run."""
    column = f"aa/{threat}"
    robust_of: Callable[[Figures], float | None] = (
        (lambda own: own.get(column)) if whole(line, threat) else (lambda own: bound_of(own, column))
    )
    found = [(own["natural"], robust_of(own)) for own in line.figures if "natural" in own]
    both = [(natural, robust) for natural, robust in found if robust is not None]
    return ([each[0] for each in both], [each[1] for each in both]) if both else None


def whole(line: Line, threat: str) -> bool:
    return any(f"aa/{threat}" in own for own in line.figures)


def draw(lines: Sequence[Line], out: Path) -> None:
    plt.rcParams |= {"svg.hashsalt": "plane", "font.size": 10, "svg.fonttype": "none"}
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.8), layout="constrained")
    by_label = {line.label: line for line in lines}
    for axes, (threat, name) in zip(panels, PAGES[0].threats.items(), strict=True):
        axes.set(xlabel="natural accuracy (%)", ylabel=f"AutoAttack, {name} {threat.partition(':')[2]} (%)")
        axes.grid(alpha=0.25)
        axes.margins(x=0.2, y=0.12)
        for label, words in OTHERS.items():
            if label in by_label and (at := mark(axes, by_label[label], threat, GREY, size=5)) is not None:
                write(axes, words, at, side="right")
        way = []
        for label, words in ALONE.items():
            if label in by_label and (at := mark(axes, by_label[label], threat, GREY, size=5)) is not None:
                write(axes, words, at, side="below")
                way.append(at)
        axes.plot([at[0] for at in way], [at[1] for at in way], "--", color=GREY, linewidth=1, zorder=1)
        for variant, (own, color) in PAIRS.items():
            after = by_label.get(own) or by_label.get(STAND_IN.get(variant, ""))
            start = mark(axes, by_label[f"published: {variant}"], threat, color)
            end = mark(axes, after, threat, color, label=variant) if after is not None else None
            if start is not None and end is not None:
                arrow = {"arrowstyle": "->", "color": color, "alpha": 0.7, "shrinkA": 5, "shrinkB": 5}
                axes.annotate("", end, start, arrowprops=arrow)
    panels[1].legend(*panels[0].get_legend_handles_labels(), loc="upper left", frameon=False, fontsize=9)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def write(axes: Axes, words: str, at: tuple[float, float], *, side: str) -> None:
    """Write in small grey letters, with `at` to their right, or below it to the left."""
    by = (-6, -3) if side == "right" else (-5, -11)
    axes.annotate(words, at, xytext=by, textcoords="offset points", ha="right", fontsize=8, color=GREY)


def mark(
    axes: Axes, line: Line, threat: str, color: str, *, size: float = 7, label: str | None = None
) -> tuple[float, float] | None:
    """Draw one network. Hollow: published. A triangle: not all of AutoAttack was run, so it may be lower."""
    found = place(line, threat)
    if found is None:
        return None
    at = statistics.mean(found[0]), statistics.mean(found[1])
    bars = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in found]
    axes.errorbar(
        at[0],
        at[1],
        xerr=bars[0],
        yerr=bars[1],
        color=color,
        marker="o" if whole(line, threat) else "v",
        markerfacecolor=color if line.seeds else "white",
        markersize=size,
        linestyle="none",
        elinewidth=1,
        label=label,
    )
    return at


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the folder with the pages and records")
    parser.add_argument("--out", type=Path, required=True, help="the picture, an SVG file")
    options = parser.parse_args(arguments)
    page = PAGES[0]
    draw(list(lines_of(page, records_of(options.results / page.records, list(page.groups)))), options.out)


if __name__ == "__main__":
    main()
