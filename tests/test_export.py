"""Exports: the same network for other tools, kept whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_helpers import run_main
from robustbench_layouts import Basic, Bottleneck, PreActResNet18, ResNet, WideBottleneck, WideResNet, normalized
from torch import Tensor, nn

import generalist
from generalist import dial
from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.core.run import RunDirectory
from generalist.export import export_model
from generalist.export.card import escaped, fenced, one_line, shared_recipe
from generalist.models import ModelOptions, build_model
from generalist.recipe import parse
from generalist.training.artefacts import load_weights, save_weights
from generalist.weights import run_of, weights_file

HOSTILE = ["a|b`c`", "---\n# title", "<script>alert(1)</script>", "[x](javascript:1)", "*bold*_", "{{x}}", "\u202eevil"]
RECIPE: dict[str, Any] = {
    "name": "mine | <b>",
    "source": "```\n# closes the block\n````",
    "data": {"name": "arrays", "augmentation": {"crop": 1, "flip": False}},
    "model": {"name": "small", "width": 4, "normalize": {"mean": [0.5], "std": [0.25]}},
    "learners": [
        {"name": "linf", "objective": "at", "threat": "linf:0.1", "attack": {"steps": 1}, "optimizer": {"lr": 0.1}},
        {"name": "natural", "objective": "nt"},
    ],
    "train": {"epochs": 6, "batch_size": 32},
    "validation": {"images": 40, "steps": 1},
}


def images_of(shape: tuple[int, ...]) -> Tensor:
    return random.uniform(7, "test-export", shape=shape)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run on arrays, its best network evaluated, with class names that want to break out of the card."""
    labels = torch.arange(280) % 7
    pixels = images_of((280, 1, 8, 8))
    pixels[torch.arange(280), 0, labels] = 1.0
    where = tmp_path_factory.mktemp("export") / "run"
    made = generalist.train(RECIPE, out=where, data={"train": (pixels, labels)}, device="cpu")
    for path in made.path.rglob("*.safetensors"):
        state, about = load_weights(path)
        save_weights(path, state, about | {"classes": HOSTILE})
    settings: dict[str, Any] = {"threats": "linf:0.1", "attacks": ["natural", "pgd-5"], "out": made.path / "evaluation"}
    generalist.evaluate(made, (pixels[:70], labels[:70]), device="cpu", **settings)
    return made


# -- safetensors and folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["best", "last", "natural"])
def test_safetensors_are_the_weights_bit_for_bit(run: RunDirectory, which: str, tmp_path: Path) -> None:
    path = export_model(run.path, to="safetensors", which=which, out=tmp_path / "x.safetensors").path
    mine = generalist.load(run, which=which).state_dict()
    again, about = load_weights(path)
    assert again.keys() == mine.keys()
    assert all(torch.equal(again[name], mine[name]) and again[name].dtype == mine[name].dtype for name in mine)
    assert about["classes"] == HOSTILE
    read = generalist.load(path)
    x = images_of((5, 1, 8, 8))
    assert torch.equal(read(x), generalist.load(run, which=which)(x))
    if which == "last":
        original = load_weights(run.last)[0]
        assert all(torch.equal(original[name], again[name]) for name in original)


def test_a_mixture_or_any_weights_file_can_be_exported(run: RunDirectory, tmp_path: Path) -> None:
    path = export_model(run.last, to="safetensors").path
    assert path == run.path / "export" / "last.safetensors"
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(run.last.read_bytes())
    assert export_model(alone, to="hub-folder").path == tmp_path / "export" / "alone-hub"
    assert "No evaluation of these weights" in (tmp_path / "export" / "alone-hub" / "README.md").read_text()


@pytest.fixture(scope="module")
def folder(run: RunDirectory) -> Path:
    return export_model(run.path, to="hub-folder").path


def test_a_hub_folder_is_read_back(run: RunDirectory, folder: Path) -> None:
    assert folder == run.path / "export" / "best-hub"
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    x = images_of((5, 1, 8, 8))
    assert torch.equal(generalist.load(folder)(x), generalist.load(run)(x))
    with pytest.raises(GeneralistError, match="one network"):
        generalist.load(folder, which="last")
    found = generalist.evaluate(folder, (x, torch.arange(5)), attacks="natural", device="cpu")
    assert found["natural"].total == 5
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {str(i): name for i, name in enumerate(HOSTILE)}
    assert config["image"] == {"channels": 1, "height": 8, "width": 8, "minimum": 0, "maximum": 1}
    assert config["architecture"]["normalize"] == {"mean": [0.5], "std": [0.25]}
    assert parse(config["recipe"]).learners == parse(RECIPE).learners


def card_parts(folder: Path) -> tuple[dict[str, Any], str]:
    _, matter, page = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(matter), page


def test_the_card_says_what_was_measured(run: RunDirectory, folder: Path) -> None:
    matter, page = card_parts(folder)
    (summary,) = [json.loads(path.read_text()) for path in run.path.glob("evaluation/*/summary.json")]
    (result,) = matter["model-index"][0]["results"]
    metrics = {metric["name"]: metric["value"] for metric in result["metrics"]}
    accuracy = {name: found["correct"] / found["total"] for name, found in summary["accuracy"].items()}
    assert accuracy["natural"] > accuracy["pgd-5/linf:0.1"]
    assert metrics["accuracy"] == round(100 * accuracy["natural"], 2)
    assert metrics["accuracy under pgd-5/linf:0.1"] == round(100 * accuracy["pgd-5/linf:0.1"], 2)
    row = re.search(r"^\| pgd-5 \| linf\\:0.1 \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \| 70 \|$", page, re.MULTILINE)
    assert row and float(row[2]) <= float(row[1]) <= float(row[3])
    assert float(row[1]) == metrics["accuracy under pgd-5/linf:0.1"]


def test_the_card_says_how_it_was_measured_and_what_that_is_worth(folder: Path) -> None:
    _, page = card_parts(folder)
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    assert rows == ["| attack", "| natural", "| pgd-5"], "natural accuracy first"
    assert "device cpu, seed 0" in page and r"PGD\(steps=5" in page
    assert "at most eps, of pixels in [0, 1]" in page and "nothing here is a certificate" in page
    assert "adds it above as `license:`" in page and "license" not in card_parts(folder)[0]


def test_the_card_has_the_accuracy_on_corrupted_images(run: RunDirectory, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    (summary,) = copy.glob("evaluation/*/summary.json")
    shift = summary.parent / "corruptions.json"
    fog = {"fog": {"mean": 0.625, "severities": {"1": {"correct": 5, "total": 8}}}}
    found = {"mean": 0.625, "source": "generated | here", "generated": True, "corruptions": fog}
    shift.write_text(json.dumps({"corruptions": found}))
    _, page = card_parts(export_model(copy, to="hub-folder", force=True).path)
    assert r"Mean accuracy on corrupted images (generated \| here): 62.50%." in page
    shift.write_text(json.dumps({"corruptions": None}))
    assert "corrupted" not in card_parts(export_model(copy, to="hub-folder", force=True).path)[1]
    for text in ("{", "[]", '{"corruptions": {"mean": "x"}}', json.dumps({"corruptions": {**found, "mean": 7}})):
        shift.write_text(text)
        with pytest.raises(GeneralistError, match=r"corruptions.json is damaged"):
            export_model(copy, to="hub-folder", force=True)


def test_the_card_of_a_learner_or_a_mixture_is_not_that_of_the_run(run: RunDirectory, tmp_path: Path) -> None:
    """A natural learner is trained against nothing, whatever the run is trained against."""
    _, page = card_parts(export_model(run.path, to="hub-folder", which="natural", out=tmp_path / "natural").path)
    assert r"one learner, natural (objective nt; its own threat models: none)" in page
    mixture = dial.mix(run, [0.25], statistics="mixed", device="cpu")
    mixture.save(run.path / "mix" / "gamma-0.25.safetensors")
    exported = export_model(run.path / "mix" / "gamma-0.25.safetensors", to="hub-folder", out=tmp_path / "mixture")
    _, page = card_parts(exported.path)
    shares = ", ".join(f"{name} {share}" for name, share in mixture.gammas.items())
    assert f"the run's learners mixed with other shares than in training: {shares}; BatchNorm statistics: mixed" in page
    assert any(f"--out {run.path / 'evaluation'}`" in note for note in exported.notes), "the way to its accuracies"
    mixture.about["mix"]["source"] = "parts"
    mixture.save(tmp_path / "parts.safetensors")
    _, page = card_parts(export_model(tmp_path / "parts.safetensors", to="hub-folder", out=tmp_path / "parts").path)
    assert "the run's learners' parts of its global learner mixed with other shares" in page
    shutil.copytree(run.path, tmp_path / "averaged")
    last = weights_file(tmp_path / "averaged", "natural")
    last.rename(last.with_name("natural.average.safetensors"))
    exported = export_model(tmp_path / "averaged", to="hub-folder", which="natural.average", out=tmp_path / "mean")
    _, page = card_parts(exported.path)
    assert "These weights are the average over time of those of one learner, natural" in page
    _, page = card_parts(export_model(run.path, to="hub-folder", which="last", out=tmp_path / "last").path)
    assert "These weights are those of the last epoch" in page


def test_numbers_of_other_weights_stay_away_from_a_card(run: RunDirectory, tmp_path: Path) -> None:
    exported = export_model(run.path, to="hub-folder", which="natural", out=tmp_path / "natural")
    matter, page = card_parts(exported.path)
    assert "model-index" not in matter and "pgd-5" not in page
    assert any("no accuracies" in note for note in exported.notes)


def test_hostile_names_stay_text_on_the_card(folder: Path) -> None:
    matter, page = card_parts(folder)
    assert matter["model-index"][0]["name"] == "mine | <b>"
    outside = re.sub(r"^(`{3,})(?:yaml|python)\n.*?^\1$", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = ["Use", "Accuracy", "Intended use and limits", "Licence", "Classes", "Recipe"]
    assert re.findall(r"^#+ .*$", outside, re.MULTILINE)[1:] == [f"## {heading}" for heading in headings]
    for mark in ("<", ">", "[x", "](", "*b", "|b", "{{", "`c"):
        assert re.search(r"(?<!\\)" + re.escape(mark), outside) is None, mark
    assert "\u202e" not in (folder / "README.md").read_text()
    block = re.search(r"^(`{3,})yaml\n(.*?)^\1$", page, re.MULTILINE | re.DOTALL)
    assert block and yaml.safe_load(block[2])["source"] == RECIPE["source"]


def test_a_hostile_header_becomes_a_card_all_the_same(run: RunDirectory, tmp_path: Path) -> None:
    state, about = load_weights(run.last)
    odd = {"classes": ["\ud800", 3, None, *HOSTILE[:4]], "epoch": float("nan"), "warning": {"a": ["\x00"]}}
    save_weights(tmp_path / "w.safetensors", state, about | odd)
    folder = export_model(tmp_path / "w.safetensors", to="hub-folder").path
    config = json.loads((folder / "config.json").read_text())
    assert config["epoch"] is None and config["id2label"]["1"] == "3" and config["num_classes"] == 7
    assert "0 \ufffd, 1 3, 2 None" in (folder / "README.md").read_text()


def test_a_damaged_summary_is_one_clear_error(run: RunDirectory, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.path, copy)
    (summary,) = copy.glob("evaluation/*/summary.json")
    summary.write_text(
        '{"accuracy": {"natural": {"correct": 9, "total": 3}}, "identity": ' + identity_of(summary) + "}"
    )
    with pytest.raises(GeneralistError, match="damaged"):
        export_model(copy, to="hub-folder", out=tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def identity_of(summary: Path) -> str:
    return json.dumps(json.loads(summary.read_text())["identity"])


def test_text_for_markdown() -> None:
    assert escaped("a_b|c\n# d") == r"a\_b\|c \# d"
    assert one_line("a\x00b\x1b[0m") == "a\ufffdb\ufffd[0m"
    assert fenced("x", "") == "```\nx\n```"
    assert fenced("````", "yaml").startswith("`````yaml\n")


def test_the_card_keeps_paths_of_the_machine_to_itself() -> None:
    data = {"name": "folder", "root": str(Path("/", "some", "home", "photos")), "resolution": 32}
    shared = shared_recipe(parse(RECIPE | {"data": data, "source": "see a/b"}))
    assert shared["data"]["root"] == "photos"
    assert shared["source"] == "see a/b"


# -- ONNX -------------------------------------------------------------------------------------------------------------


def test_onnx_computes_what_the_network_does(run: RunDirectory, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    exported = export_model(run.path, to="onnx", out=tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(str(exported.path), providers=["CPUExecutionProvider"])
    model = generalist.load(run)
    for batch in (1, 3, 17):
        x = images_of((batch, 1, 8, 8))
        (logits,) = session.run(None, {"image": x.numpy()})
        assert torch.allclose(torch.from_numpy(logits), model(x), atol=1e-4, rtol=0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.onnx"]
    properties = session.get_modelmeta().custom_metadata_map
    assert json.loads(properties["generalist"])["classes"] == HOSTILE
    assert any("checked with onnxruntime" in note for note in exported.notes)


def test_an_onnx_graph_that_computes_something_else_is_not_kept(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from generalist.export import onnx_file

    traced = onnx_file._traced

    def spoiled(source: Any) -> bytes:
        data = traced(source)
        with torch.no_grad():
            next(source.model.parameters()).add_(0.5)
        return data

    monkeypatch.setattr(onnx_file, "_traced", spoiled)
    with pytest.raises(GeneralistError, match="nothing is kept"):
        export_model(run.path, to="onnx", out=tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


def test_onnx_of_a_network_in_double_precision_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    state, about = load_weights(weights_of("small", tmp_path / "small.safetensors"))
    save_weights(tmp_path / "double.safetensors", state, about)
    from generalist.export import onnx_file, source

    opened = source.open_source(tmp_path / "double.safetensors", "best", trust_code=False)
    opened.model.double()
    with pytest.raises(GeneralistError, match=r"computes in torch\.float64"):
        onnx_file.write_onnx(opened, tmp_path / "x.onnx")


def test_an_exported_folder_is_not_exported_onto_itself(run: RunDirectory, tmp_path: Path) -> None:
    """Its card would lose the accuracies, which are the run's."""
    export_model(run.path, to="hub-folder", out=tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    with pytest.raises(GeneralistError, match="is what is to be exported"):
        export_model(tmp_path / "hub", to="hub-folder", out=tmp_path / "hub", force=True)
    assert (tmp_path / "hub" / "README.md").read_text() == card


def test_a_recipe_in_a_folder_makes_no_run_of_it(run: RunDirectory, tmp_path: Path) -> None:
    """Weights beside or below it are anybody's."""
    file = export_model(run.path, to="safetensors", out=tmp_path / "project" / "weights" / "x.safetensors").path
    (tmp_path / "project" / "recipe.yaml").write_text("my: own")
    assert run_of(file) is None
    shutil.copy(run.recipe, tmp_path / "project" / "recipe.yaml")
    card = (export_model(file, to="hub-folder", out=tmp_path / "hub").path / "README.md").read_text()
    assert "The run was trained on" not in card
    assert run_of(run.snapshots / "6" / "linf.safetensors") == run and run_of(run.model) == run


def test_the_card_of_a_staged_run_tells_of_its_last_stage(tmp_path: Path) -> None:
    linf = {"name": "linf", "objective": "trades", "threat": "linf:0.05", "optimizer": {"lr": 0.1}}
    stages = [{"name": "one", "change": {"train": {"epochs": 1}}}, {"name": "two", "start": "one"}]
    stages[1]["change"] = {"train": {"epochs": 2}, "learners": [linf, {"name": "natural", "objective": "nt"}]}
    recipe = {**RECIPE, "data": {"name": "digits"}, "name": "staged", "stages": stages}
    made = generalist.train(recipe, out=tmp_path / "run", device="cpu")
    cards = []
    for which in ("best", "linf"):
        folder = export_model(made.path, to="hub-folder", which=which, out=tmp_path / which).path
        cards.append((folder / "README.md").read_text().replace("\\", ""))
    assert "by a recipe of 1 + 2 epochs; threat models of the training: linf:0.05" in " ".join(cards[0].split())
    assert "trades-6+nt" in cards[0]
    assert "objective trades; its own threat models: linf:0.05" in " ".join(cards[1].split())
    found = generalist.evaluate(made.path, attacks=["natural", "fgsm"], samples=20, device="cpu")
    assert set(found) == {"natural", "fgsm/linf:0.05"}


def test_onnx_without_its_packages_names_the_extra(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(GeneralistError, match=r"generalist-at\[export\]"):
        export_model(run.path, to="onnx", out=tmp_path / "x.onnx")


# -- RobustBench ------------------------------------------------------------------------------------------------------


def weights_of(name: str, path: Path, *, shape: tuple[int, int, int] = (3, 32, 32), **options: Any) -> Path:
    """A weights file of a fresh network whose BatchNorm statistics are not the trivial ones."""
    chosen = ModelOptions.model_validate({"name": name, **options})
    model = build_model(chosen, num_classes=10, shape=shape, seed=1)
    for number, module in enumerate(model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            for salt, (tensor, low) in enumerate([(module.running_mean, -0.1), (module.running_var, 0.5)]):
                tensor.copy_(low + random.uniform(number, f"bn{salt}", shape=tuple(tensor.shape)))
            module.weight.data.copy_(0.5 + random.uniform(number, "scale", shape=tuple(module.weight.shape)))
    classes = [str(number) for number in range(10)]
    about = {"model": chosen.model_dump(mode="json"), "classes": classes, "shape": list(shape)}
    save_weights(path, dict(model.state_dict()), about)
    return path


COUNTERPARTS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: ResNet(Basic, [2, 2, 2, 2], 10, imagenet=False),
    "resnet34": lambda: ResNet(Basic, [3, 4, 6, 3], 10, imagenet=False),
    "resnet50": lambda: ResNet(Bottleneck, [3, 4, 6, 3], 10, imagenet=False),
    "preact-resnet18": lambda: PreActResNet18(10),
    "wrn-28-10": lambda: WideResNet(28, 10, 10),
    "wrn-34-10": lambda: WideResNet(34, 10, 10),
    "resnet50-imagenet": lambda: ResNet(Bottleneck, [3, 4, 6, 3], 10, imagenet=True),
    "wrn-50-2": lambda: ResNet(WideBottleneck, [3, 4, 6, 3], 10, imagenet=True),
}


KEYS = {
    "resnet18": [
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.conv1.weight",
        "layer2.0.shortcut.0.weight",
        "layer2.0.shortcut.1.bias",
        "layer4.1.bn2.num_batches_tracked",
        "linear.bias",
    ],
    "resnet50": ["layer1.0.conv3.weight", "layer1.0.shortcut.0.weight", "layer4.2.bn3.weight"],
    "preact-resnet18": [
        "conv1.weight",
        "layer1.0.bn1.weight",
        "layer2.0.shortcut.0.weight",
        "bn.bias",
        "linear.weight",
    ],
    "wrn-28-10": [
        "conv1.weight",
        "block1.layer.0.bn1.weight",
        "block1.layer.0.convShortcut.weight",
        "block3.layer.3.conv2.weight",
        "bn1.running_var",
        "fc.weight",
    ],
    "resnet50-imagenet": ["layer1.0.downsample.0.weight", "layer3.5.conv2.weight", "fc.bias"],
}


BIG = {"wrn-28-10", "wrn-34-10", "wrn-50-2", "resnet50-imagenet"}
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in BIG else ()) for name in COUNTERPARTS]


@pytest.mark.parametrize("name", NAMES)
def test_robustbench_layouts_give_equal_logits(name: str, tmp_path: Path) -> None:
    file = weights_of(name, tmp_path / "w.safetensors")
    exported = export_model(file, to="robustbench", out=tmp_path / "w.pt")
    state = torch.load(exported.path, weights_only=True)
    assert set(KEYS.get(name, ())) <= state.keys()
    assert not any(key.startswith(("stages", "stem", "classifier", "sub_block1")) for key in state)
    theirs = COUNTERPARTS[name]().eval()
    theirs.load_state_dict(state)
    x = images_of((2, 3, 32, 32))
    with torch.no_grad():
        assert torch.allclose(theirs(x), generalist.load(file)(x), atol=1e-4, rtol=1e-4)
    assert exported.notes[0].startswith("load it into: ")


def test_a_normalization_becomes_robustbenchs_wrapper(tmp_path: Path) -> None:
    normalize = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}
    file = weights_of("resnet18", tmp_path / "w.safetensors", normalize=normalize)
    exported = export_model(file, to="robustbench")
    assert "normalize_model(" in exported.notes[0]
    theirs = normalized(COUNTERPARTS["resnet18"]()).eval()
    theirs.load_state_dict(torch.load(exported.path, weights_only=True))
    x = images_of((2, 3, 32, 32))
    with torch.no_grad():
        assert torch.allclose(theirs(x), generalist.load(file)(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("small", (3, 32, 32), "no counterpart of the network 'small'"),
        ("resnet18", (1, 32, 32), "3 channels"),
        ("resnet18", (3, 64, 64), "takes images of 32x32"),
    ],
)
def test_what_robustbench_does_not_have_is_refused(
    name: str, shape: tuple[int, int, int], message: str, tmp_path: Path
) -> None:
    file = weights_of(name, tmp_path / "w.safetensors", shape=shape)
    with pytest.raises(GeneralistError, match=message):
        export_model(file, to="robustbench", out=tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


# -- what lies there already, and mistakes ----------------------------------------------------------------------------


def test_nothing_is_replaced_without_force(run: RunDirectory, tmp_path: Path) -> None:
    file, folder = tmp_path / "x.safetensors", tmp_path / "hub"
    file.write_text("old")
    folder.mkdir()
    (folder / ".gitattributes").write_text("mine")
    for to, out in (("safetensors", file), ("hub-folder", folder)):
        with pytest.raises(GeneralistError, match="--force"):
            export_model(run.path, to=to, out=out)
    assert file.read_text() == "old" and len(list(folder.iterdir())) == 1
    export_model(run.path, to="safetensors", out=file, force=True)
    export_model(run.path, to="hub-folder", out=folder, force=True)
    assert generalist.load(file) and generalist.load(folder)
    assert (folder / ".gitattributes").read_text() == "mine"


def test_a_failure_leaves_nothing_behind(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from generalist.export import hub

    def fail(path: Path, value: Any) -> None:
        raise OSError("no more")

    monkeypatch.setattr(hub, "write_json", fail)
    with pytest.raises(OSError, match="no more"):
        export_model(run.path, to="hub-folder", out=tmp_path / "hub")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onx"], "did you mean 'onnx'"),
        (["--to", "onnx", "--out", "x.pt"], "with .onnx at its end"),
        (["--to", "safetensors", "--model", "nobody"], "keeps no learner 'nobody'"),
        (["--to", "safetensors", "--out", "{run}/model.safetensors", "--force"], "what is to be exported"),
        (["--to", "hub-folder", "--out", "{run}", "--force"], "is a run"),
        (["--to", "safetensors", "--out", "{run}/snapshots/6/linf.safetensors", "--force"], "among the files of a run"),
        (["--to", "hub-folder", "--out", "{run}/snapshots/6", "--force"], "among the files of a run"),
        (["--to", "hub-folder", "--out", "{run}/recipe.yaml", "--force"], "is a file"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = [word.replace("{run}", str(run.path)) for word in arguments]
    code, out, err = run_main(["export", str(run.path), *args], monkeypatch, capsys)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert message in err


def test_the_command(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["export", str(run.path), "--to", "safetensors", "--model", "last", "--out", str(tmp_path / "x.safetensors")]
    code, out, _ = run_main(args, monkeypatch, capsys)
    assert code == 0 and out.startswith("safetensors: ") and "generalist.load(" in out
    assert run_main(args, monkeypatch, capsys)[0] == 2
    assert run_main([*args, "--force"], monkeypatch, capsys)[0] == 0
