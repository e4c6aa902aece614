"""`generalist evaluate`: its defaults, its files, what it refuses, and how it stands being killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_helpers import lines, verdicts, without_times
from safetensors.torch import save_file
from test_cli import run_main

from generalist import evaluate, train
from generalist.console_evaluation import _show_shift, across_threats, evaluation_listener
from generalist.core.errors import DataError
from generalist.core.run import RunDirectory
from generalist.evaluation.suite import Moment

ODD = ("linf@last", "@3", "global@03", "best@3", "linf@99999999999", "../3/global@2", "linf@3@3", "linf@3.0")
SHORT = ["--attacks", "natural,pgd-3,apgd-ce", "--samples", "60", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    changes = ["train.epochs=3", "model.width=4", "validation.steps=2"]
    return train("digits-t", overrides=changes, out=tmp_path_factory.mktemp("evaluate") / "run", device="cpu")


def test_defaults_come_from_the_run(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["evaluate", str(run.path), *SHORT, "--out", str(tmp_path)]
    code, out, err = run_main(args, monkeypatch, capsys)
    assert (code, err) == (0, "")
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("best-digits-test-")
    assert {p.name for p in folder.iterdir()} == {"records-1-of-1.jsonl", "summary.json", "examples.npz"}
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["worst_case"]) == {"linf:0.18", "l2:0.7"}
    assert len(summary["indices"]) == summary["samples"] == 60 and summary["images"] == 500
    assert summary["identity"]["threats"] == ["linf:0.18", "l2:0.7"]
    assert "[5/5] l2:0.7 apgd-ce:" in out and "union, worst case per sample" in out
    found = evaluate(run, "digits", threats="linf:0.18", attacks=["natural", "pgd-3"], samples=60)
    assert summary["accuracy"]["pgd-3/linf:0.18"]["correct"] == found["pgd-3/linf:0.18"].correct
    assert f"{100 * found['natural'].value:.2f}" in out


def test_evaluations_lie_in_the_run_and_json_is_all_there_is(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["evaluate", str(run.path), "--model", "linf", "--attacks", "natural", "--json"]
    code, out, err = run_main(args, monkeypatch, capsys)
    assert (code, err) == (0, "")
    summary = json.loads(out)
    folder = Path(summary["directory"])
    assert folder.parent == run.path / "evaluation" and summary["subject"] == "linf"
    assert without_times(summary) == without_times(json.loads((folder / "summary.json").read_text()))


def test_as_many_samples_as_there_are_images_are_all_of_them(run: RunDirectory, tmp_path: Path) -> None:
    first = evaluate(run, attacks="natural", samples=500, out=tmp_path)
    second = evaluate(run, attacks="natural", out=tmp_path, resume=True)
    assert first.summary["directory"] == second.summary["directory"]
    assert without_times(first.summary) == without_times(second.summary)


def test_other_images_than_the_run_knew_are_told(run: RunDirectory, tmp_path: Path) -> None:
    copied = RunDirectory(Path(shutil.copytree(run.path, tmp_path / "run")))
    environment = json.loads(copied.environment.read_text())
    environment["data"]["test"] = "0" * 64
    copied.environment.write_text(json.dumps(environment))

    told = []
    for i, (subject, data) in enumerate(((run, None), (copied, None), (copied, "digits"))):
        found = evaluate(subject, data, attacks="natural", samples=20, out=tmp_path / str(i))
        told.append(sum("not the test images" in text for text in found.summary["warnings"]))
    assert told == [0, 1, 0]


def test_images_of_another_size_are_told_and_of_other_channels_refused(run: RunDirectory) -> None:
    labels = torch.arange(20) % 10
    for size, told in ((8, 0), (12, 1)):
        found = evaluate(run, (torch.rand(20, 1, size, size), labels), attacks="natural")
        said = "these images are 12x12, and the network was trained on 8x8"
        assert sum(text == said for text in found.summary["warnings"]) == told
    with pytest.raises(DataError, match="its images have 3 channels, those of the training 1"):
        evaluate(run, (torch.rand(20, 3, 8, 8), labels), attacks="natural")


def test_several_networks_of_a_run_in_one_call(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["evaluate", str(run.path), "--attacks", "natural", "--device", "cpu", "--model", "l2, global@3,l2"]
    code, out, err = run_main([*args, "--json", "--out", str(tmp_path / "json")], monkeypatch, capsys)
    assert (code, err) == (0, "")
    summaries = json.loads(out)
    assert [summary["subject"] for summary in summaries] == ["l2", "global@3"]
    for summary, file in zip(summaries, ("l2", "global"), strict=True):
        alone = evaluate(run.snapshots / "3" / f"{file}.safetensors", "digits", attacks="natural")
        assert summary["accuracy"]["natural"]["correct"] == alone["natural"].correct
    code, out, err = run_main([*args, "--out", str(tmp_path / "text")], monkeypatch, capsys)
    assert (code, err) == (0, "") and out.index("of l2 on 500 images") < out.index("of global@3 on 500 images")
    assert len(list((tmp_path / "text").iterdir())) == 2


def test_a_network_that_is_missing_is_told_before_the_first_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train("digits-d", overrides=["train.epochs=1", "model.width=4"], out=tmp_path / "run", device="cpu")
    run.model.unlink()
    args = ["evaluate", str(run.path), "--attacks", "natural", "--model", "linf,best", "--out", str(tmp_path / "out")]
    assert run_main(args, monkeypatch, capsys) == (2, "", f"error: there is no weights file {run.model}\n")
    assert not (tmp_path / "out").exists()


def test_a_file_inside_a_run_knows_its_images(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["evaluate", str(run.last), "--attacks", "natural,pgd-2", "--samples", "20", "--device", "cpu"]
    code, _, err = run_main(args, monkeypatch, capsys)
    assert (code, err) == (0, "")
    (folder,) = (tmp_path / "evaluation").iterdir()
    assert folder.name.startswith("last-digits-test-")
    assert "--model chooses a network of a run" in run_main([*args, "--model", "last"], monkeypatch, capsys)[2]
    lost = tmp_path / "mine.safetensors"
    lost.write_bytes(run.last.read_bytes())
    code, _, err = run_main(["evaluate", str(lost), "--device", "cpu"], monkeypatch, capsys)
    assert code == 2 and err.startswith("error: the weights do not say which images") and "--data cifar10" in err
    again = ["evaluate", str(lost), "--data", "digits", "--attacks", "natural", "--out", str(tmp_path / "e")]
    assert run_main(again, monkeypatch, capsys)[0] == 0


def test_shards_and_merge(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    base = ["evaluate", str(run.path), *SHORT, "--batch-size", "16"]
    assert run_main([*base, "--out", str(one)], monkeypatch, capsys)[0] == 0
    for part in ("2/2", "1/2"):
        code, out, _ = run_main([*base, "--out", str(two), "--shards", part], monkeypatch, capsys)
        assert code == 0 and f"30 images of digits-test, shard {part}" in out
    code, out, err = run_main(["evaluate", str(two), "--merge"], monkeypatch, capsys)
    assert (code, err) == (0, "") and "60 images of digits-test" in out
    first, second = (json.loads(next(p.rglob("summary.json")).read_text()) for p in (one, two))
    assert without_times(first) == without_times(second)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--attacks", "pgd-0"], "'pgd-0' has no steps"),
        (["--attacks", "natural,autoattack"], "unknown attack 'autoattack'; write aa"),
        (["--attacks", "pgd"], "unknown attack 'pgd'; write it with its steps, as in pgd-20"),
        (["--attacks", "PGD20"], "unknown attack 'PGD20'; write pgd-20"),
        (["--threats", "linf:8"], "write 8/255, not 8"),
        (["--threats", ","], "threats: none is given"),
        (["--attacks", "cw-l2"], "cw-l2 is for l2 threats and cannot judge linf:0.18"),
        (["--preset", "paper"], "unknown preset 'paper'; did you mean 'papers'"),
        (["--mode", "all"], "--mode is each or cascade, not 'all'"),
        (["--precision", "half"], "--precision is default or fast, not 'half'"),
        (["--samples", "501"], "ask for 1 to 500"),
        (["--batch-size", "0"], "batch_size must be at least 1"),
        (["--shards", "3/2"], "write i/n"),
        (["--corruptions", ""], "--corruptions names none"),
        (["--merge", "--seed", "7"], "without --seed"),
        (["--merge", "--perturbations"], "without --perturbations"),
        (["--merge", "--precision", "fast"], "without --precision"),
        (["--merge", "--batch-size", "8"], "without --batch-size"),
        (["--shards", "1"], "write i/n"),
        (["--seed", "-1"], "seed"),
        (["--model", "teacher"], "keeps no learner 'teacher'; choose best, last, global, "),
        (["--model", "linf,teacher"], "keeps no learner 'teacher'; choose best, last, global, "),
        (["--model", "linf@9"], "has no snapshot of epoch 9; kept: "),
        (["--model", "teacher@3"], "keeps no learner 'teacher'; choose best, last, global, "),
        *((["--model", name], f"{name.strip()!r} names no network") for name in ODD),
        (["--merge", "--model", "best"], "--merge joins existing parts"),
        (["--model", ","], "--model names no network"),
        (["--data", "cifar11"], "unknown data set 'cifar11'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--merge"], "no records to merge"),
    ],
)
def test_mistakes_are_one_line_and_run_nothing(
    args: list[str],
    says: str,
    run: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["evaluate", str(run.path), "--out", str(tmp_path / "out"), *args]
    code, out, err = run_main(command, monkeypatch, capsys)
    assert code == 2 and out == "" and err.count("\n") == 1 and says in err
    assert not (tmp_path / "out").exists()


def test_no_run_and_no_threat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(["evaluate", str(tmp_path / "none")], monkeypatch, capsys)
    assert code == 2 and err == f"error: there is no run and no weights file {tmp_path / 'none'}\n"
    assert run_main(["evaluate", str(tmp_path)], monkeypatch, capsys)[2].endswith("(it has no recipe.yaml)\n")
    natural = train("digits-nt", overrides=["train.epochs=1", "model.width=4"], out=tmp_path / "nt", device="cpu")
    code, _, err = run_main(["evaluate", str(natural.path)], monkeypatch, capsys)
    assert code == 2 and "trains against no threat" in err
    alone = shutil.copy(natural.model, tmp_path / "alone.safetensors")
    found = evaluate(alone, "digits", attacks=["natural", "fgsm"], samples=20)
    assert "no threats were given: evaluated with linf:8/255" in found.summary["warnings"]
    for threats, attacks in (("linf:0.1", "fgsm"), (None, "natural")):
        found = evaluate(alone, "digits", threats=threats, attacks=attacks, samples=20)
        assert not [text for text in found.summary["warnings"] if "no threats were given" in text]
    found = evaluate(natural, attacks=["natural", "fgsm"], preset="papers", samples=20)
    assert set(found) == {"natural", "fgsm/linf:8/255", "fgsm/l2:128/255"}


# -- killed ----------------------------------------------------------------------------------------------------------

LONG = ["--attacks", "natural,pgd-20,apgd-t", "--samples", "200", "--batch-size", "20", "--device", "cpu"]


def killed(
    command: list[str], folder: Path, size: int, number: signal.Signals, files: str = "records-*"
) -> tuple[int, str]:
    """Start the command and send the signal once its records are longer than `size` bytes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "generalist", *command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if sum(path.stat().st_size for path in folder.rglob(files)) > size:
            break
        time.sleep(0.005)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.slow
def test_killed_again_and_again_nothing_finished_is_repeated(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", str(run.path), *LONG]
    out = tmp_path / "killed"
    resumed = [*command, "--out", str(out), "--resume"]
    before: list[Any] = []
    for size, number, code in (
        (2_000, signal.SIGKILL, -9),
        (30_000, signal.SIGKILL, -9),
        (45_000, signal.SIGTERM, 143),
    ):
        found, err = killed(resumed, out, size, number)
        assert found == code, err
        now = lines_that_are_whole(out)
        assert now[: len(before)] == before and len(now) > len(before)
        before = now
    assert "go on with --resume" in err and err.count("\n") == 1
    assert not list(out.rglob("summary.json"))
    assert run_main(resumed, monkeypatch, capsys)[0] == 0
    assert run_main([*command, "--out", str(tmp_path / "calm")], monkeypatch, capsys)[0] == 0
    items = [(line["sample"], line.get("threat"), line["attack"], line.get("round")) for line in lines(out)]
    assert len(items) == len(set(items))
    assert verdicts(out) == verdicts(tmp_path / "calm")
    first, second = (json.loads(next(p.rglob("summary.json")).read_text()) for p in (out, tmp_path / "calm"))
    assert without_times(first) == without_times(second)


def lines_that_are_whole(folder: Path, files: str = "records-*") -> list[bytes]:
    return next(folder.rglob(files)).read_bytes().split(b"\n")[:-1]


def test_killed_among_the_corruptions(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", str(run.path), "--attacks", "natural", "--batch-size", "100", "--corruptions", "all"]
    out, counts = tmp_path / "killed", "corruptions-*.jsonl"
    before: list[bytes] = []
    for size, number, code in ((2_000, signal.SIGKILL, -9), (8_000, signal.SIGTERM, 143)):
        found, err = killed([*command, "--out", str(out), "--resume"], out, size, number, counts)
        assert found == code, err
        now = lines_that_are_whole(out, counts)
        assert now[: len(before)] == before and len(now) > len(before)
        before = now
    assert "go on with --resume" in err and not list(out.rglob("corruptions.json"))
    code, said, err = run_main([*command, "--out", str(out), "--resume"], monkeypatch, capsys)
    assert (code, err) == (0, "") and "[2/2] corruptions: " in said
    assert said.count("corruptions left out, as grey images have no colours: saturate\n") == 1
    assert run_main([*command, "--out", str(tmp_path / "calm")], monkeypatch, capsys)[0] == 0
    once = [json.loads(line) for line in lines_that_are_whole(out, counts)[1:]]
    assert len(once) == len({(line["what"], line["batch"]) for line in once}) == 18 * 5 * 5
    first, second = (next(p.rglob("corruptions.json")).read_bytes() for p in (out, tmp_path / "calm"))
    assert first == second


def test_progress_counts_natural_images_and_names_attacks_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with evaluation_listener() as follow:
        follow(Moment("natural", 0, 2, 50, 50, 49))
        follow(Moment("linf:8/255 cw-20.cw", 1, 2, 49, 49, 7))
        follow(Moment("linf:0.18 apgd-ce", 2, 2, 7, 7, 6))
        follow(Moment("perturbations", 2, 2, 70, 70, None))
    assert capsys.readouterr().out.splitlines() == [
        "[1/3] natural: 50 of 50, 49 right",
        "[2/3] linf:8/255 cw-20: 49 of 49, 7 right",
        "[3/3] linf:0.18 apgd-ce: 7 of 7, 6 right",
        "[3/3] perturbations: 70 of 70",
    ]


def test_a_file_that_is_no_weights_is_told_before_its_data_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("no weights")
    code, _, err = run_main(["evaluate", str(tmp_path / "notes.txt")], monkeypatch, capsys)
    assert code == 2 and "notes.txt is not a complete safetensors file" in err


def test_weights_of_others_are_told_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    torch.save(state, tmp_path / "theirs.pt")
    save_file(state, tmp_path / "theirs.safetensors")
    for file in ("theirs.pt", "theirs.safetensors"):
        code, _, err = run_main(["evaluate", str(tmp_path / file), "--data", "digits"], monkeypatch, capsys)
        assert code == 2 and err.count("\n") == 1 and "generalist.evaluate(model, ...) takes any module" in err


def test_the_table_of_corruptions_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"severities": {str(severity): {"value": 1.0} for severity in range(1, 6)}, "mean": 1.0}
    found = {
        "source": "generated, not the official files",
        "severities": [1, 2, 3, 4, 5],
        "corruptions": {"elastic_transform": row},
        "mean_by_severity": dict.fromkeys("12345", 1.0),
        "mean": 1.0,
    }
    _show_shift({"corruptions": found, "notes": []})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and lines[4].count("100.00") == 6


@pytest.mark.parametrize(
    ("of", "said"), [("aa", "(the papers' union): 50.00"), ("worst_case", "is of AutoAttack): 50.00")]
)
def test_only_a_mean_of_autoattack_is_called_the_papers_union(of: str, said: str) -> None:
    union = {"correct": 4, "total": 10, "value": 0.4, "interval": [0.1, 0.7]}
    line = across_threats({"union_worst_case": union, "mean_over_threats": {"value": 0.5, "of": of}})
    assert line.endswith(said) and "40.00" in line
