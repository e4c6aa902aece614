"""The figures that the papers print. They are package data, as printed; those that cannot be right are marked."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from importlib import resources

from generalist.attacks.threats import ThreatOptions
from generalist.comparison_rows import LEVEL5, NORMS, OFFICIAL, SEQUENCES_MEAN, UNION_MEAN, Cell, Row

PAPERS = {"cvpr2023": "CVPR 2023", "plusplus": "Generalist++"}
ABLATIONS = {("cvpr2023", "4"), ("cvpr2023", "5")}
"""Tables whose rows vary a setting, and so do not show the method as such."""

ATTACKS = {"pgd20": "pgd-20", "pgd100": "pgd-100", "mim": "mim-20", "cw": "cw-20"}
"""The papers' names of attacks, if different from ours."""

NETWORKS = {"resnet50": "resnet50-imagenet"}
"""The papers' names of networks, if different from ours: theirs is the one for ImageNet."""

TRADES = "trades"
"""Their name of TRADES where they do not give its beta (table 2, MNIST and SVHN): it is matched with any of ours."""

SHIFTS = {"c": f"{OFFICIAL} {LEVEL5}", "p": f"{OFFICIAL} {SEQUENCES_MEAN}"}
"""Table IV's data sets, CIFAR-10-C and the like, are figures of the network on CIFAR-10's test images for us. The paper
says "level-5 natural corruptions" and "the average accuracy across corruption sequences" without naming them: they are
assumed to be those of the benchmark's own means."""


@cache
def paper_rows() -> tuple[Row, ...]:
    """Every row of the papers' tables, with marks at the figures that cannot be right."""
    flags = {_key(entry): (entry["kind"], entry["note"]) for entry in _table("inconsistencies.csv")}
    rows: dict[tuple[str, ...], Row] = {}
    for entry in _table("paper_results.csv"):
        if (entry["paper"], entry["table"]) in ABLATIONS:
            continue
        dataset, column = _dataset_and_column(entry)
        place = (entry["paper"], entry["table"], dataset, entry["model"], entry["method"])
        method = "generalist-d-nt-linf" if entry["method"] == "generalist" else entry["method"]
        source = f"{PAPERS[entry['paper']]}, table {entry['table']}"
        model = NETWORKS.get(entry["model"], entry["model"])
        row = rows.setdefault(place, Row(method, source, dataset, model, method))
        flag, note = flags.get(_key(entry), ("", ""))
        std = float(entry["std"]) / 100 if entry["std"] else None
        union = _paper_union(entry["eps"])
        row.cells[column] = Cell(float(entry["value"]) / 100, flag=flag, note=note, of=union, deviation=std)
    return tuple(rows.values())


def _dataset_and_column(entry: dict[str, str]) -> tuple[str, str]:
    dataset, _, shift = entry["dataset"].partition("-")
    column = SHIFTS[shift] if shift else paper_column(entry["metric"], entry["eps"])
    return dataset, column


def _paper_union(eps: str) -> str:
    """The threats of a union whose radii, in linf and l2, are written as `8/255;128/255`."""
    radii = eps.split(";")
    return (
        ", ".join(str(ThreatOptions.model_validate(":".join(pair))) for pair in zip(NORMS, radii, strict=False))
        if len(radii) > 1
        else ""
    )


def paper_column(metric: str, eps: str) -> str:
    """A paper's metric by the name that our evaluations give it: `pgd20-linf` is `pgd-20/linf:8/255`."""
    if metric == "union-mean":
        return UNION_MEAN
    attack, _, norm = metric.rpartition("-")
    if not eps:
        return metric
    threat = ThreatOptions.model_validate(f"{norm}:{eps}")
    return f"{ATTACKS.get(attack, attack)}/{threat}"


def published(rows: Iterable[Row]) -> list[Row]:
    """The papers' rows for the same data, network and method as any of these rows, with a figure of the same kind."""
    columns: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        columns.setdefault(row.setup, set()).update(row.cells)
        if row.method.startswith(f"{TRADES}-"):
            columns.setdefault((row.dataset, row.model, TRADES), set()).update(row.cells)
    return [row for row in paper_rows() if row.cells.keys() & columns.get(row.setup, set())]


def _key(entry: dict[str, str]) -> tuple[str, ...]:
    return tuple(entry[name] for name in ("paper", "table", "dataset", "model", "method", "metric"))


def _table(name: str) -> list[dict[str, str]]:
    text = resources.files("generalist").joinpath("reference", name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
