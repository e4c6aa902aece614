"""Small runs to report on, hostile copies of them, and a reader of what a page holds."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

import generalist
from generalist import dial
from generalist.core.run import RunDirectory
from generalist.evaluation.accuracy import Accuracy
from generalist.shipped import shipped_text

THREATS = ["linf:0.18", "l2:0.7"]
SMALL = ["train.epochs=2", "validation.every=1", "validation.steps=2", "validation.images=40", "model.width=4"]
HOSTILE = (
    "<script>window.hacked=1</script>",
    '"><img src=x onerror=window.hacked=1>',
    "</script></style><svg onload=window.hacked=1>",
    "javascript:window.hacked=1",
    "' onmouseover='window.hacked=1",
)
"""Texts that would run something where they are not escaped."""


def small_run(recipe: str, out: Path, *, attacks: tuple[str, ...] = ("natural", "pgd-3", "apgd-ce")) -> Path:
    """Two epochs on the digits, and an evaluation of 60 images in two threats with two corruptions."""
    generalist.train(recipe, overrides=SMALL, out=out, device="cpu")
    generalist.evaluate(
        out,
        threats=THREATS,
        attacks=list(attacks),
        samples=60,
        corruptions=["brightness", "contrast"],
        out=out / "evaluation",
        device="cpu",
    )
    return out


def small_runs(folder: Path) -> list[Path]:
    """A dial of three learners with its curve, one of two, and a baseline."""
    runs = [small_run(recipe, folder / recipe) for recipe in ("digits-t", "digits-d", "digits-at")]
    for run in runs[:2]:
        dial.curve(RunDirectory(run), 3, statistics="mixed", steps=1, samples=20, device="cpu")
    return runs


def bare_run(path: Path, recipe: str = "digits-d", **accuracy: tuple[int, int]) -> Path:
    """A run that is a recipe and, where figures are given, a summary with them and nothing else."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text(shipped_text(recipe))
    if accuracy:
        folder = path / "evaluation" / "one"
        folder.mkdir(parents=True)
        figures = {name.replace("__", "/"): Accuracy(*pair).as_json() for name, pair in accuracy.items()}
        (folder / "summary.json").write_text(json.dumps({"subject": "best", "accuracy": figures}))
    return path


def evaluation_of(run: Path) -> Path:
    (folder,) = (run / "evaluation").iterdir()
    return folder


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def hostile_copy(run: Path, place: Path) -> Path:
    """The run with hostile texts wherever a file may hold text, and in its own name."""
    out = place / HOSTILE[0].replace("/", "\u2215")
    shutil.copytree(run, out)
    recipe = (out / "recipe.yaml").read_text().splitlines()
    kept = [line for line in recipe if not line.startswith("name:")]
    (out / "recipe.yaml").write_text("\n".join([f"name: {json.dumps(HOSTILE[1])}", *kept]) + "\n")
    edit_json(out / "environment.json", platform=HOSTILE[2], device=HOSTILE[3], data={HOSTILE[1]: HOSTILE[4]})
    folder = evaluation_of(out)
    summary = json.loads((folder / "summary.json").read_text())
    classes = dict(zip(HOSTILE, list(summary["classes"].values())[: len(HOSTILE)], strict=False))
    accuracy = summary["accuracy"] | {f"{HOSTILE[2]}/linf:0.18": summary["accuracy"]["natural"]}
    more = {"classes": classes, "warnings": list(HOSTILE), "notes": list(HOSTILE), "accuracy": accuracy}
    edit_json(folder / "summary.json", **more)
    (records,) = folder.glob("records-*.jsonl")
    head, _, rest = records.read_text().partition("\n")
    header = json.loads(head) | {"classes": [HOSTILE[i % len(HOSTILE)] for i in range(10)]}
    records.write_text(json.dumps(header) + "\n" + rest)
    shift = json.loads((folder / "corruptions.json").read_text())
    shift["corruptions"]["source"] = HOSTILE[0]
    shift["corruptions"]["corruptions"][HOSTILE[1]] = shift["corruptions"]["corruptions"].pop("contrast")
    (folder / "corruptions.json").write_text(json.dumps(shift))
    with np.load(folder / "examples.npz") as arrays:
        examples = dict(arrays)
    examples["attack"] = np.asarray([HOSTILE[1]] * len(examples["attack"]))
    np.savez_compressed(folder / "examples.npz", **examples)
    lines = [json.loads(line) | {"warning": HOSTILE[2]} for line in (out / "metrics.jsonl").read_text().splitlines()]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


@dataclass
class Page(HTMLParser):
    """Elements, attributes and texts of a page."""

    text: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def prose(self) -> str:
        return "".join(self.words)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def assert_harmless(page: Page) -> None:
    """Its own script and nothing else runs, and nothing is fetched."""
    assert len(page.all("script")) == 1 and page.all("script")[0] == {}
    for name, attributes in page.elements:
        assert name not in {"iframe", "object", "embed", "link", "base", "form"}, name
        assert not [key for key in attributes if key.startswith("on") or key == "style"], (name, attributes)
        for key in ("href", "src", "action", "xlink:href"):
            value = attributes.get(key)
            assert value is None or value.startswith(("#", "data:image/png;base64,")), (name, key, value)
