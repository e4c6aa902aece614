"""The network that attacks search on, and batches that are attacked at once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_targets import trained
from evaluation_helpers import L2, LINF, first_images, run, verdicts
from torch import Tensor, nn

from generalist.attacks.apgd import APGD, TargetedAPGD
from generalist.attacks.cw import CW
from generalist.attacks.fab import FAB
from generalist.attacks.mim import MIM
from generalist.attacks.pgd_attack import PGD
from generalist.attacks.square import Square
from generalist.data.sets import Batch
from generalist.evaluation import suite
from generalist.evaluation.classifier import AnyPrecision, InBfloat16
from generalist.evaluation.cpu_network import CpuNetwork
from generalist.evaluation.crew import Crew, StoppedError, crew_size
from generalist.evaluation.packing import HEAVY, default_batch_size
from generalist.evaluation.search import Searched, full_precision, half_precision, operations
from generalist.models import ModelOptions, build_model
from generalist.tensors.folding import trace

CPU = torch.device("cpu")


def network(name: str) -> nn.Module:
    """With statistics of its own, so that folding has something to fold."""
    model = build_model(ModelOptions(name=name), num_classes=10, shape=(3, 32, 32), seed=0)
    generator = iter(range(10**6))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            ramp = torch.linspace(0.5, 1.5, module.num_features)
            shift = (next(generator) % 5) * 0.02
            module.running_mean.copy_(0.1 * ramp + shift)  # type: ignore[union-attr]
            module.running_var.copy_(ramp.flip(0))  # type: ignore[union-attr]
    return model.eval()


@pytest.mark.parametrize("name", ["resnet18", "preact-resnet18"])
def test_the_folded_network_answers_and_has_the_gradients_of_the_model(name: str) -> None:
    model = network(name)
    x = torch.linspace(0, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    searched = full_precision(AnyPrecision(model), x)
    assert searched.folded and searched.note is None
    with torch.no_grad():
        expected, found = model(x), searched.network(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    gradients = []
    for classifier in (model, searched.network):
        image = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(classifier(image)[:, 0].sum(), image)[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-5)


def test_blocked_layout_is_used_where_no_gradient_is_wanted_and_only_there() -> None:
    model = trained()
    blocked = CpuNetwork(trace(model, torch.float32))
    x = first_images(8).images.float()
    image = x.clone().requires_grad_()
    assert blocked(image).requires_grad
    with torch.no_grad():
        assert not blocked(image).requires_grad
        torch.testing.assert_close(blocked(x), model(x), rtol=1e-4, atol=1e-5)


class Halved(nn.Module):
    """Goes another way on the images than a tracer does, which sees no values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits if isinstance(x, torch.fx.Proxy) else logits / 2


class Branching(nn.Module):
    """Decides by a value, so it cannot be traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x) if x.sum() > -1 else self.model(1 - x)
        return logits


@pytest.mark.parametrize(
    ("wrapper", "says"), [(Halved, "its folded form gives other answers"), (Branching, "it cannot be traced")]
)
def test_what_cannot_be_folded_is_searched_as_it_is_and_the_summary_says_why(
    wrapper: type[nn.Module], says: str, tmp_path: Path
) -> None:
    model, images = trained(), first_images(40)
    plain = run(model, images, tmp_path / "plain", threats=(LINF,))
    assert plain.summary["notes"] == []
    whole = run(wrapper(model), images, tmp_path / "whole", threats=(LINF,))
    (note,) = whole.summary["notes"]
    assert note.startswith("attacks search on the model itself") and says in note
    assert abs(whole["short/linf:0.12"].correct - plain["short/linf:0.12"].correct) <= 1
    fast = half_precision(AnyPrecision(wrapper(model)), images.images.float())
    assert isinstance(fast.network, InBfloat16) and fast.note is not None and says in fast.note


def test_models_of_half_precision_are_searched_as_they_are() -> None:
    model = AnyPrecision(network("resnet18").bfloat16())
    searched = full_precision(model, torch.rand(1, 3, 32, 32))
    assert searched.network is model and not searched.folded and searched.note is None


def test_no_success_counts_that_the_model_itself_denies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search on a network that is always wrong finds nothing but what the model confirms."""
    model, images = trained(), first_images(40)
    honest = run(model, images, attacks=("natural", Square(queries=2)), threats=(LINF,))

    def liar(model: AnyPrecision, x: Tensor, *, compiled: bool = False) -> Any:
        searched = full_precision(model, x)
        return type(searched)(lambda x: -searched.network(x), folded=True)

    monkeypatch.setattr(suite, "full_precision", liar)
    lied = run(model, images, attacks=("natural", Square(queries=2)), threats=(LINF,))
    assert lied["square/linf:0.12"].correct >= honest["square/linf:0.12"].correct
    assert lied["square/linf:0.12"].correct > 0


def test_a_sample_that_the_searched_network_alone_gets_wrong_is_attacked_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on the edge, where folding decides, and by a model that answers at random. Once it kept its own image, which
    the model itself gets right, and so it counted as robust."""
    model, images = trained(), first_images(25)
    attacks = ("natural", PGD(steps=5), MIM(steps=5), CW(steps=5), APGD(steps=5), Square(queries=40))
    honest = run(model, images, attacks=attacks, threats=(LINF,))

    def doubter(model: AnyPrecision, x: Tensor, *, compiled: bool = False) -> Searched:
        known = images.batch(torch.arange(len(images))).x.flatten(1)

        def network(x: Tensor) -> Tensor:
            natural = (x.detach().flatten(1)[:, None] == known).all(2).any(1)
            logits: Tensor = model(x)
            return torch.where(natural[:, None], -logits, logits)

        return Searched(network, folded=False)

    monkeypatch.setattr(suite, "full_precision", doubter)
    doubted = run(model, images, attacks=attacks, threats=(LINF,))
    assert doubted == honest
    assert all(accuracy.correct < honest["natural"].correct for name, accuracy in honest.items() if name != "natural")


def test_folding_costs_fab_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for the nearest image, on the very boundary, where rounding decides: untargeted FAB once left 73 of 120
    digits in linf:0.12, and 68 where it searched on the model itself."""
    model, images = trained(), first_images(80)
    attacks, threats = ("natural", FAB(iterations=20), FAB(targets=3, iterations=20)), (LINF, L2)
    folded = run(model, images, attacks=attacks, threats=threats)
    monkeypatch.setattr(suite, "full_precision", lambda model, x, compiled: Searched(model, folded=False))
    itself = run(model, images, attacks=attacks, threats=threats)
    assert folded.summary["notes"] == [] and folded.keys() == itself.keys()
    for name, accuracy in folded.items():
        assert abs(accuracy.correct - itself[name].correct) <= 1


# -- crews -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_crew_gives_the_verdicts_of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread of PyTorch for each batch, however many batches are attacked at once."""
    model, images = trained(), first_images(90)
    tables = []
    for size, threads in ((1, 1), (2, 2), (3, 3)):
        torch.set_num_threads(threads)
        monkeypatch.setattr(suite, "crew_size", lambda device, batches, operations, size=size: size)
        run(model, images, tmp_path / str(size), threats=(LINF, L2))
        tables.append(verdicts(tmp_path / str(size)))
        assert torch.get_num_threads() == threads
    assert tables[0] == tables[1] == tables[2]


@pytest.mark.usefixtures("two_threads")
def test_shards_of_a_crew_join_to_the_whole(tmp_path: Path) -> None:
    model, images = trained(), first_images(90)
    run(model, images, tmp_path / "whole", threats=(LINF,))
    for shard in (2, 1):
        run(model, images, tmp_path / "parts", threats=(LINF,), shard=shard, shards=2)
    assert verdicts(tmp_path / "parts") == verdicts(tmp_path / "whole")


@pytest.mark.usefixtures("two_threads")
def test_an_interrupt_sends_the_crew_home_in_the_middle_of_a_batch() -> None:
    entered, stopped = threading.Event(), threading.Event()

    def work(network: Any) -> None:
        try:
            while True:
                network(torch.zeros(1))
                entered.set()
        except StoppedError:
            stopped.set()
            raise

    with pytest.raises(KeyboardInterrupt), Crew(2) as crew:  # noqa: PT012 - the interrupt comes from outside
        network = crew.hire(lambda x: x)
        crew.submit(lambda: work(network))
        assert entered.wait(10)
        raise KeyboardInterrupt
    assert stopped.is_set() and torch.get_num_threads() == 2


def test_errors_of_a_crew_are_the_callers() -> None:
    def fail() -> None:
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"), Crew(2) as crew:
        crew.submit(fail).result()
    with pytest.raises(ValueError, match="told"), Crew(1) as crew:
        crew.submit(fail).result()


def test_the_size_of_crews_and_batches_follows_from_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert [crew_size(CPU, batches=batches) for batches in (1, 3, 1000)] == [1, 3, 8]
    assert crew_size(torch.device("cuda"), batches=1000) == 1
    assert [default_batch_size(CPU, samples) for samples in (10, 500, 10_000)] == [64, 200, 256]
    sizes = [default_batch_size(torch.device("cuda"), samples) for samples in (10, 2000, 10_000)]
    assert sizes == [256, 500, 1024]
    assert default_batch_size(torch.device("cuda"), 10, row_by_row=True) == 1024


def test_a_large_network_has_smaller_batches_and_two_threads_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large by its operations, which an independent count gives."""
    x = torch.rand(1, 3, 32, 32)
    # A ResNet-18's multiply-adds: the stem, four stages of 3x3 convolutions and shortcuts, the classifier.
    adds, before = 27 * 64 * 1024 + 512 * 10, 64
    for stage, width in enumerate((64, 128, 256, 512)):
        pixels = 1024 // 4**stage
        adds += 9 * pixels * (before * width + 3 * width * width) + (pixels * before * width if stage else 0)
        before = width
    large, small = (full_precision(AnyPrecision(network(name)), x) for name in ("resnet18", "wrn-10-1"))
    assert operations(large, x) == operations(large, x.expand(3, -1, -1, -1)) == 2 * adds
    assert operations(Searched(network("resnet18"), folded=False), x) == 0
    assert 0 < operations(small, x) < HEAVY < 2 * adds
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    for work, crew, rows in ((2 * adds, 3, 32), (operations(small, x), 6, 200)):
        assert crew_size(CPU, batches=50, operations=work) == crew
        assert default_batch_size(CPU, 500, operations=work) == rows
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert crew_size(CPU, batches=50, operations=2 * adds) == 1
    assert default_batch_size(torch.device("cuda"), 10_000, operations=2 * adds) == 1024


def test_copies_are_left_out_where_a_network_answers_row_by_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In float64, where rounding decides nothing: the same verdicts, and a search that sees few copies."""
    model, images = copy.deepcopy(trained()).double(), first_images(90)
    seen: list[int] = []

    def row_by_row(model: AnyPrecision, x: Tensor, *, compiled: bool = False) -> Searched:
        found = full_precision(model, x, compiled=compiled)

        def counted(x: Tensor) -> Tensor:
            seen.append(len(x))
            return found.network(x)

        return Searched(counted, folded=True, row_by_row=True)

    attacks = ("natural", "apgd-ce", Square(queries=40))
    run(model, images, tmp_path / "whole", attacks=attacks, batch_size=64)
    monkeypatch.setattr(suite, "full_precision", row_by_row)
    run(model, images, tmp_path / "part", attacks=attacks, batch_size=64)
    assert verdicts(tmp_path / "part") == verdicts(tmp_path / "whole")
    assert set(seen) == {32, 64}  # a whole batch, and what is left in 32 rows


AUTOATTACK_IN_SHORT = [APGD(steps=20), TargetedAPGD(steps=20), FAB(targets=9, iterations=10), Square(queries=60)]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [full_precision, half_precision])
@pytest.mark.parametrize("threat", [LINF, L2], ids=str)
@pytest.mark.parametrize("attack", AUTOATTACK_IN_SHORT, ids=lambda attack: attack.name)
def test_on_a_gpu_what_is_found_does_not_depend_on_the_number_of_rows(attack: Any, threat: Any, precision: Any) -> None:
    model = AnyPrecision(network("resnet18").cuda())
    x = torch.rand(512, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    batch = Batch(x=x, y=model(x).argmax(1), index=torch.arange(512, device="cuda"))
    rounds = torch.arange(512, device="cuda") % attack.rounds(10)
    searched = precision(model, x[:8])
    assert searched.row_by_row
    whole = attack.run_round(searched.network, batch, rounds, threat=threat.build(), seed=0)
    for rows in (32, 416):
        part = Batch(x=batch.x[:rows], y=batch.y[:rows], index=batch.index[:rows])
        found = attack.run_round(searched.network, part, rounds[:rows], threat=threat.build(), seed=0)
        assert torch.equal(found.x, whole.x[:rows]) and torch.equal(found.broken, whole.broken[:rows])
