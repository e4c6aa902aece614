"""The suite's invariants: verdicts that depend on the sample alone, records that survive anything, parts that join."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attack_targets import trained
from evaluation_helpers import L2, LINF, SHORT, first_images, lines, run, verdicts, without_times
from torch import Tensor, nn

from generalist.attacks.apgd import APGD
from generalist.attacks.autoattack import AutoAttack
from generalist.attacks.base import Found
from generalist.attacks.rounds import InRounds
from generalist.attacks.square import Square
from generalist.attacks.threats import Threat
from generalist.core.errors import DataError, GeneralistError, RunError
from generalist.data.sets import Batch, ImageSet
from generalist.evaluation.directory import merge, merge_below
from generalist.evaluation.examples import MOST, Kept
from generalist.evaluation.records import shard_files
from generalist.evaluation.suite import Suite

COUNT = 90


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return first_images(COUNT)


@pytest.fixture(scope="module")
def whole(model: nn.Module, images: ImageSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One evaluation without interruption: the directory of its records."""
    found = run(model, images, tmp_path_factory.mktemp("whole"))
    return Path(found.summary["directory"])


def only(folder: Path) -> Path:
    (inside,) = (path for path in folder.iterdir() if path.is_dir())
    return inside


# -- a verdict depends on the sample alone ---------------------------------------------------------------------------


def test_any_sharding_gives_the_same_verdicts_and_summary(
    model: nn.Module, images: ImageSet, whole: Path, tmp_path: Path
) -> None:
    for shard in (3, 1, 2):
        run(model, images, tmp_path, shard=shard, shards=3)
    parts = only(tmp_path)
    assert not (parts / "summary.json").exists()
    assert verdicts(parts) == verdicts(whole)
    merged = without_times(merge(parts))
    assert merged == without_times(json.loads((whole / "summary.json").read_text()))
    assert without_times(json.loads((parts / "summary.json").read_text())) == merged


def test_any_order_gives_the_same_verdicts(model: nn.Module, images: ImageSet, whole: Path, tmp_path: Path) -> None:
    run(model, images, tmp_path, index=torch.arange(COUNT).flip(0))
    assert verdicts(tmp_path) == verdicts(whole)


def test_a_cut_at_any_byte_loses_nothing_that_was_whole(
    model: nn.Module, images: ImageSet, whole: Path, tmp_path: Path
) -> None:
    """Cut the records at many places, as a kill would, and resume."""
    original = next(iter(shard_files(whole).values())).read_bytes()
    calm = verdicts(whole)
    header = original.index(b"\n")
    for number, cut in enumerate([0, 10, header + 1, *np.linspace(header + 2, len(original), 5).astype(int)]):
        folder = tmp_path / str(number) / whole.name
        folder.mkdir(parents=True)
        path = folder / "records-1-of-1.jsonl"
        path.write_bytes(original[:cut])
        kept = original[: original[:cut].rfind(b"\n") + 1]
        run(model, images, folder.parent, resume=True)
        assert path.read_bytes().startswith(kept)
        items = [(line["sample"], line.get("threat"), line["attack"], line.get("round")) for line in lines(folder)]
        assert len(items) == len(set(items)), "something was run twice"
        assert verdicts(folder) == calm
        assert without_times(json.loads((folder / "summary.json").read_text())) == without_times(
            json.loads((whole / "summary.json").read_text())
        )
        assert examples_of(folder) == examples_of(whole)


def examples_of(folder: Path) -> dict[str, bytes]:
    with np.load(folder / "examples.npz", allow_pickle=False) as file:
        return {name: file[name].tobytes() for name in file.files}


def test_resuming_what_is_finished_runs_nothing(model: nn.Module, images: ImageSet, tmp_path: Path) -> None:
    first = run(model, images, tmp_path, attacks=("natural", "pgd-3"))
    before = next(iter(shard_files(only(tmp_path)).values())).read_bytes()
    moments: list[Any] = []
    again = run(model, images, tmp_path, attacks=("natural", "pgd-3"), resume=True, listener=moments.append)
    assert again == first and moments == []
    assert next(iter(shard_files(only(tmp_path)).values())).read_bytes() == before
    with pytest.raises(RunError, match="is already complete: --resume shows it without repeating anything"):
        run(model, images, tmp_path, attacks=("natural", "pgd-3"))


def test_float64_verdicts_do_not_depend_on_the_batch_size(images: ImageSet, tmp_path: Path) -> None:
    model = trained_copy().double()
    tables = []
    for size in (7, 40, 90):
        run(model, images, tmp_path / str(size), batch_size=size)
        tables.append(verdicts(tmp_path / str(size)))
    assert tables[0] == tables[1] == tables[2]


def test_float32_verdicts_hardly_depend_on_the_batch_size(model: nn.Module, tmp_path: Path) -> None:
    short = AutoAttack(name="shorter", attacks=(APGD(steps=4), Square(queries=10)))
    tables = []
    for size in (64, 500):
        run(model, first_images(500), tmp_path / str(size), batch_size=size, attacks=("natural", short))
        broken: dict[int, bool] = dict.fromkeys(range(500), False)
        for line in lines(tmp_path / str(size)):
            broken[line["sample"]] |= line.get("broken", False)
        tables.append(broken)
    assert sum(tables[0][s] != tables[1][s] for s in range(500)) <= 1  # 99.8%


def trained_copy() -> nn.Module:
    return copy.deepcopy(trained())


# -- modes and precisions --------------------------------------------------------------------------------------------


def test_each_and_cascade_agree_where_they_must(model: nn.Module, images: ImageSet) -> None:
    attacks = ("natural", "fgsm", "pgd-3", SHORT)
    each = run(model, images, attacks=attacks, mode="each")
    cascade = run(model, images, attacks=attacks, mode="cascade")
    assert each["natural"] == cascade["natural"] and each["fgsm/linf:0.12"] == cascade["fgsm/linf:0.12"]
    for threat in ("linf:0.12", "l2:0.6"):
        assert cascade[f"short/{threat}"].as_json() == each.summary["worst_case"][threat]
        assert cascade[f"short/{threat}"].correct <= each[f"short/{threat}"].correct
    assert each.summary["union_worst_case"] == cascade.summary["union_worst_case"]


def test_behind_another_attack_a_cascade_s_autoattack_is_not_autoattack_s(model: nn.Module, images: ImageSet) -> None:
    short = AutoAttack(name="aa", attacks=(APGD(steps=2),))
    alone = run(model, images, attacks=("natural", short), threats=(LINF, L2), mode="cascade").summary
    behind = run(model, images, attacks=("natural", "fgsm", short), threats=(LINF, L2), mode="cascade").summary
    each = run(model, images, attacks=("natural", "fgsm", short), threats=(LINF, L2), mode="each").summary
    assert set(alone["autoattack"]) == set(each["autoattack"]) == {str(LINF), str(L2)} and behind["autoattack"] == {}
    kinds = [found["mean_over_threats"]["of"] for found in (alone, behind, each)]
    assert kinds == ["aa", "worst_case", "aa"]


def test_a_cascade_shows_survivors_only(model: nn.Module, images: ImageSet, tmp_path: Path) -> None:
    run(model, images, tmp_path, attacks=("natural", "fgsm", "pgd-3"), threats=(LINF,), mode="cascade")
    table = verdicts(tmp_path)
    right = {s for s in range(COUNT) if table[s, "natural"] == int(images.labels[s])}
    broken = {s for s in right if table[s, "linf:0.12", "fgsm"] == 0}
    assert {key[0] for key in table if key[-1] == "fgsm"} == right
    assert {key[0] for key in table if key[-1] == "pgd-3"} == right - broken
    assert 0 < len(broken) < len(right) < COUNT


class Biased(nn.Module):
    """Under autocast it answers at random as it likes; in full precision it is the model inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits.flip(1) if torch.is_autocast_enabled("cpu") else logits


def test_fast_counts_no_success_that_full_precision_denies(model: nn.Module) -> None:
    images = first_images(30)
    full = run(model, images, attacks=("natural", "apgd-ce", "apgd-t"), threats=(LINF,), mode="cascade")
    wrapped = Biased(model)
    fast = run(wrapped, images, attacks=("natural", "fgsm"), threats=(LINF,), mode="cascade", precision="fast")
    # The search in bfloat16 is useless here, so what is left is what the confirmation breaks.
    assert fast["fgsm/linf:0.12"].correct <= full["apgd-t/linf:0.12"].correct
    assert "bfloat16" in fast.summary["precision"] and "bfloat16" not in full.summary["precision"]
    steps = list(fast.summary["after_each_part"]["fgsm/linf:0.12"])
    assert steps == ["linf:0.12 fgsm@bf16", "linf:0.12 apgd-ce", "linf:0.12 apgd-t"]
    with pytest.raises(GeneralistError, match="fast is for float32 models"):
        run(trained_copy().double(), images, precision="fast")


# -- the summary -----------------------------------------------------------------------------------------------------


def test_the_summary_counts_what_the_records_say(images: ImageSet, whole: Path) -> None:
    summary, table = json.loads((whole / "summary.json").read_text()), verdicts(whole)
    right = {s for s in range(COUNT) if table[s, "natural"] == int(images.labels[s])}
    broken = {t: {k[0] for k, r in table.items() if len(k) == 3 and k[1] == t and r >= 0} for t in map(str, (LINF, L2))}
    assert summary["accuracy"]["natural"]["correct"] == len(right)
    for threat, gone in broken.items():
        assert summary["accuracy"][f"short/{threat}"]["correct"] == len(right - gone)
        assert summary["worst_case"][threat]["correct"] == len(right - gone)
        low, high = summary["worst_case"][threat]["interval"]
        assert 0 <= low < summary["worst_case"][threat]["value"] < high <= 1
    both = right - set.union(*broken.values())
    assert summary["union_worst_case"]["correct"] == len(both)
    mean = np.mean([len(right - gone) / COUNT for gone in broken.values()])
    assert summary["mean_over_threats"] == {"value": pytest.approx(mean), "of": "worst_case"}
    assert summary["union_worst_case"]["value"] < summary["mean_over_threats"]["value"]
    for name, row in summary["classes"].items():
        members = {s for s in range(COUNT) if int(images.labels[s]) == int(name)}
        assert row["natural"]["correct"] == len(right & members) and row["natural"]["total"] == len(members)
        assert row["union"]["correct"] == len(both & members)
        assert row["linf:0.12"]["correct"] == len((right - broken["linf:0.12"]) & members)
    assert summary["seconds"]["total"] > 0 and summary["samples"] == COUNT and summary["indices"] is None


def test_examples_are_pairs_that_the_model_gets_wrong(model: nn.Module, images: ImageSet, whole: Path) -> None:
    with np.load(whole / "examples.npz", allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    assert 0 < len(found["index"]) <= 32 and set(found["threat"]) == {"linf:0.12", "l2:0.6"}
    clean, adversarial = (torch.from_numpy(found[name]) for name in ("clean", "adversarial"))
    assert torch.equal(clean, images.batch(torch.from_numpy(found["index"])).x)
    with torch.no_grad():
        answers = model(adversarial).argmax(1).numpy()
    assert (answers == found["adversarial_prediction"]).all() and (answers != found["label"]).all()
    assert (found["clean_prediction"] == found["label"]).all()
    linf = torch.from_numpy(found["threat"] == "linf:0.12")
    assert float((clean - adversarial)[linf].abs().max()) <= 0.12 + 1e-6


def test_examples_are_the_same_as_found_and_as_made_again(
    model: nn.Module, images: ImageSet, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / whole.name)) / "examples.npz"
    folder.unlink()
    run(model, images, tmp_path, resume=True)  # nothing is left to attack, so that nothing is in hand
    monkeypatch.setattr(Suite, "attack", None)
    run(model, images, tmp_path / "anew")  # attacks nothing twice
    for other in (folder, only(tmp_path / "anew") / "examples.npz"):
        with np.load(whole / "examples.npz") as wanted, np.load(other) as found:
            assert set(found.files) == set(wanted.files)
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted.files)


def test_the_first_round_of_the_first_samples_is_kept() -> None:
    kept, x = Kept(), torch.arange(6.0)
    rows, rounds = np.array([5, 3, 5, 3, 7, 9]), np.array([1, 2, 0, 1, 0, 0])
    kept.add("a", rows, rounds, np.array([True] * 5 + [False]), x)
    assert torch.equal(kept.images("a", np.array([3, 5]), np.array([1, 0])), torch.tensor([3.0, 2.0]))
    assert kept.images("a", np.array([3, 5]), np.array([1, 1])) is None
    assert kept.images("a", np.array([3, 9]), np.array([1, 0])) is None
    assert kept.images("b", np.array([3]), np.array([1])) is None
    more = np.arange(100, 100 + MOST)
    kept.add("a", more, np.zeros_like(more), np.ones_like(more, bool), torch.zeros(MOST))
    assert kept.images("a", more[-1:], np.zeros(1, np.int64)) is None
    assert kept.images("a", np.array([7, 100]), np.array([0, 0])) is not None


class Shattered(nn.Module):
    """Rounds its input before it looks: gradients are zero, and a search without gradients is not fooled."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x - x.detach() * 0 + (x * 15).round().detach() / 15 - x)
        return logits


def test_masked_gradients_are_pointed_out(model: nn.Module) -> None:
    attacks = ("natural", "fgsm", Square(queries=100))
    masked = run(Shattered(model), first_images(60), attacks=attacks, threats=(LINF,))
    assert masked["fgsm/linf:0.12"].correct > masked["square/linf:0.12"].correct
    assert any("square, which uses no gradients, broke" in text for text in masked.summary["warnings"])
    assert any("outputs change in steps on" in text for text in masked.summary["warnings"]), masked.summary["warnings"]
    plain = run(model, first_images(60), attacks=("natural", "pgd-20", Square(queries=100)), threats=(LINF,))
    assert plain.summary["warnings"] == []


def test_gradients_are_not_blamed_for_what_no_attack_with_gradients_was_shown(model: nn.Module) -> None:
    """In a cascade, whatever Square breaks first is seen by none of the others."""
    images, first = first_images(60), ("natural", Square(queries=100), "apgd-ce")
    cascade = run(model, images, attacks=first, threats=(LINF,), mode="cascade")
    assert cascade["natural"].correct - cascade["square/linf:0.12"].correct > 3
    assert cascade.summary["warnings"] == []


class Scaled(nn.Module):
    """Very sure of itself: the cross-entropy rounds to 0, though the logits have a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = 1000 * self.model(x)
        return logits


def test_each_kind_of_model_gets_the_warning_that_fits_it(model: nn.Module) -> None:
    images, settings = first_images(40), {"attacks": ("natural", "fgsm"), "threats": (LINF,)}
    by_batch = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), model)
    for subject, says in (
        (Scaled(model), "the cross-entropy has no gradient on"),
        (nn.Sequential(model, nn.Softmax(1)), "the model returns probabilities instead of logits"),
        (by_batch, "changes with the others in its batch"),
    ):
        warnings = run(subject, images, **settings).summary["warnings"]
        assert says in warnings[0] and not any("in steps" in text for text in warnings), warnings
    blind = run(by_batch, images, attacks=(Square(queries=2),), threats=(LINF,)).summary["warnings"]
    assert len(blind) == 1 and "in its batch" in blind[0]


class Noisy(nn.Module):
    """Answers the same image differently each time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.model(x)
        return logits + 0.1 * (self.calls % 7)


class Detached(nn.Module):
    """No gradient reaches the images: an attack without gradients does not mind."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x.detach())
        return logits


def test_models_that_answer_at_random_or_have_no_gradient(model: nn.Module) -> None:
    images = first_images(20)
    noisy = run(Noisy(model), images, attacks=("natural", "pgd-2"), threats=(LINF, L2))
    assert [
        text for text in noisy.summary["warnings"] if "different answers to the same image: use aa-rand" in text
    ] == (noisy.summary["warnings"][:1])
    assert len(noisy.summary["warnings"]) == 1
    blind = run(Detached(model), images, attacks=(Square(queries=5),), threats=(LINF,))
    assert blind.summary["warnings"] == [] and set(blind) == {"square/linf:0.12"}
    with pytest.raises(GeneralistError, match="no gradient with respect to the images"):
        run(Detached(model), images, attacks=("pgd-2",), threats=(LINF,))


class Liar(InRounds):
    """An attack that leaves its ball, and claims a success on every image."""

    name = "liar"

    def run_round(self, model: Any, batch: Batch, round: Tensor, *, threat: Threat, seed: int) -> Found:
        return Found(x=1 - batch.x, broken=torch.ones_like(batch.y, dtype=torch.bool))


@pytest.mark.parametrize("folded", [True, False])
def test_an_attack_is_not_believed_on_its_own_word(model: nn.Module, folded: bool) -> None:
    subject = model if folded else nn.Sequential(model, nn.Softplus(), nn.PReLU())  # PReLU is not folded
    found = run(subject, first_images(20), attacks=("natural", Liar()), threats=(LINF,))
    assert found["liar/linf:0.12"].correct == found["natural"].correct > 10


class Centred(nn.Module):
    """Subtracts what no checkpoint holds."""

    def __init__(self, model: nn.Module, mean: float) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(mean), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x - self.mean)
        return logits


def test_other_buffers_are_another_model_though_no_checkpoint_holds_them(
    model: nn.Module, images: ImageSet, tmp_path: Path
) -> None:
    first = run(Centred(model, 0.0), images, tmp_path, attacks=("natural",), threats=())
    second = run(Centred(model, 0.4), images, tmp_path, attacks=("natural",), threats=(), resume=True)
    assert first.summary["directory"] != second.summary["directory"]
    assert second["natural"].correct < first["natural"].correct


class Fixed(nn.Module):
    """A linear classifier whose weights are a buffer: it has no parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        weight = torch.autograd.functional.jacobian(lambda x: model(x).sum(0), torch.full((1, 1, 8, 8), 0.3))
        self.register_buffer("weight", weight.reshape(10, 64).detach())

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


def test_a_model_without_parameters_is_evaluated_in_either_precision(model: nn.Module) -> None:
    settings = {"attacks": ("natural", SHORT), "threats": (LINF,)}
    plain, fast = (run(Fixed(model), first_images(30), precision=p, **settings) for p in ("default", "fast"))
    assert plain["natural"] == fast["natural"] and plain["natural"].correct > 3


# -- refusals --------------------------------------------------------------------------------------------------------


def test_merge_refuses_what_is_not_whole(model: nn.Module, images: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no records to merge"):
        merge_below(tmp_path)
    run(model, images, tmp_path, attacks=("pgd-2",), shard=1, shards=2)
    folder = only(tmp_path)
    with pytest.raises(RunError, match="lacks shard 2/2"):
        merge_below(tmp_path)
    with pytest.raises(RunError, match="is evaluated in 2 shards, not 1"):
        run(model, images, tmp_path, attacks=("pgd-2",), resume=True)
    run(model, images, tmp_path, attacks=("pgd-2",), shard=2, shards=2)
    second = folder / "records-2-of-2.jsonl"
    whole = second.read_bytes()
    run(model, images, tmp_path / "thirds", attacks=("pgd-2",), shard=2, shards=3)
    stray = shutil.copy(only(tmp_path / "thirds") / "records-2-of-3.jsonl", folder)
    with pytest.raises(RunError, match=r"records-2-of-3.jsonl belongs to another evaluation"):
        merge_below(folder)
    Path(stray).unlink()
    shutil.rmtree(tmp_path / "thirds")
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match=r"not finished: \d+ samples are left"):
        merge_below(tmp_path)
    second.write_bytes(whole.replace(b'"batch_size":25', b'"batch_size":26', 1))
    with pytest.raises(RunError, match=r"belongs to another evaluation \(other batch_size\)"):
        merge_below(tmp_path)
    second.write_bytes(b"{}\n" + whole)
    with pytest.raises(RunError, match="does not begin like"):
        merge_below(tmp_path)
    second.write_bytes(whole.replace(b'"images":90', b'"images":9', 1).replace(b'"indices":null', b'"indices":[9]', 1))
    with pytest.raises(RunError, match="indices do not belong"):
        merge_below(tmp_path)
    natural = b'{"sample":'
    for damaged in (
        whole.replace(b'"round":0', b'"round":7', 1),
        whole.replace(natural, b'{"seconds":NaN,"sample":', 1),
        whole.replace(natural, b"[" * 100_000 + b"\n" + natural, 1),
    ):
        second.write_bytes(damaged)
        with pytest.raises(RunError, match=r"line \d+ of .* is damaged"):
            merge_below(tmp_path)


def test_merge_believes_no_header_that_claims_more_than_its_file_holds(
    model: nn.Module, images: ImageSet, tmp_path: Path
) -> None:
    run(model, images, tmp_path, attacks=("pgd-2",), threats=(LINF,), shard=1, shards=2)
    run(model, images, tmp_path, attacks=("pgd-2",), threats=(LINF,), shard=2, shards=2)
    files = sorted(only(tmp_path).glob("records-*"))
    before = [file.read_bytes() for file in files]
    step = b'"linf:0.12 pgd-2":1'
    more = b",".join([step, *(b'"%d":100000' % i for i in range(300))])
    for old, new, says in (
        (b'"images":90', b'"images":1000000000', "fewer lines than samples"),
        (step, more, "no evaluation has so many rounds"),
    ):
        for file, content in zip(files, before, strict=True):
            assert old in content
            file.write_bytes(content.replace(old, new, 1))
        with pytest.raises(RunError, match=says):
            merge_below(tmp_path)


def test_resume_refuses_another_evaluation(model: nn.Module, images: ImageSet, tmp_path: Path) -> None:
    run(model, images, tmp_path, attacks=("pgd-2",), shard=1, shards=2)
    with pytest.raises(RunError, match=r"unfinished evaluation .* has other settings \(other batch_size, seed\)"):
        run(model, images, tmp_path, attacks=("pgd-2",), resume=True, batch_size=30, seed=4)
    with pytest.raises(RunError, match="other weights"):
        run(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), images, tmp_path, attacks=("pgd-2",), resume=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"images": torch.full((4, 1, 8, 8), 1.5)}, r"must lie in \[0, 1\], not in \[1.5, 1.5\]"),
        ({"images": torch.full((4, 1, 8, 8), torch.nan)}, r"must lie in \[0, 1\]"),
        ({"labels": torch.tensor([0, 1, 2, 10])}, r"labels range over 0..10, but the model has 10 classes"),
        ({"labels": torch.tensor([0, -1, 2, 3])}, "labels range over -1..3"),
    ],
)
def test_images_and_labels_are_checked_at_the_door(model: nn.Module, change: dict[str, Tensor], says: str) -> None:
    parts: dict[str, Any] = {"images": torch.zeros(4, 1, 8, 8), "labels": torch.arange(4)} | change
    with pytest.raises(DataError, match=says):
        run(model, ImageSet(classes=[str(c) for c in range(10)], name="mine", **parts), attacks=("natural",))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"shard": 3, "shards": 2}, "there is no shard 3 of 2"),
        ({"mode": "both"}, "mode: Input should be 'each' or 'cascade'"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
    ],
)
def test_settings_that_are_wrong(model: nn.Module, images: ImageSet, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(GeneralistError, match=says):
        run(model, images, **settings)


@pytest.mark.gpu
def test_on_a_gpu_verdicts_depend_on_the_sample_alone_too(model: nn.Module, images: ImageSet, tmp_path: Path) -> None:
    network = trained_copy().to("cuda")
    run(network, images, tmp_path / "whole")
    run(network, images, tmp_path / "reversed", index=torch.arange(COUNT).flip(0))
    for shard in (1, 2):
        run(network, images, tmp_path / "parts", shard=shard, shards=2)
    assert verdicts(tmp_path / "whole") == verdicts(tmp_path / "reversed") == verdicts(tmp_path / "parts")
    cpu = run(model, images, attacks=("natural", SHORT))
    merged = merge_below(tmp_path / "parts")
    for name, accuracy in cpu.items():
        assert abs(merged["accuracy"][name]["correct"] - accuracy.correct) <= 1
