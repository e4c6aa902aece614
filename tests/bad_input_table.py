"""The table of mistakes: what each one is, the command line that makes it, and what the complaint must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bad_input_files import (
    BASE,
    TOUCH,
    cut,
    damage_checkpoints,
    damage_weights,
    flip,
    hostile_checkpoint,
    rename_tensors,
    save_cifar10,
    save_folder,
    save_hostile_cifar10,
    save_hostile_npz,
    save_mnist,
    save_npz,
)

Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """A mistake: what it is, the command line behind `generalist`, and what the complaint must say."""

    what: str
    args: list[str]
    says: tuple[str, ...]
    prepare: Prepare = field(default=lambda here: None)
    """Lays out the files of the case; `RUN` is copied to `run` beforehand where `needs_run` says so."""
    needs_run: bool = False


def changed(what: str, *changes: str, says: tuple[str, ...] | str, prepare: Prepare = lambda here: None) -> Row:
    """The sound recipe with `--set` changes."""
    options = [part for change in changes for part in ("--set", change)]
    return Row(what, ["train", "base.yaml", *options], (says,) if isinstance(says, str) else says, prepare)


def written(what: str, text: str | bytes, *says: str) -> Row:
    """A recipe file of this text."""
    content = text.encode() if isinstance(text, str) else text
    return Row(what, ["train", "bad.yaml"], says, lambda here: (here / "bad.yaml").write_bytes(content))


def called(what: str, *args: str, says: str, prepare: Prepare = lambda here: None, needs_run: bool = False) -> Row:
    """A command line of its own."""
    return Row(what, list(args), (says,), prepare, needs_run)


def a_sweep(here: Path) -> None:
    (here / "tiny.yaml").write_text("recipe: base.yaml\nsearch: {train.seed: {values: [0, 1]}}\n")


def two_learners(first: str, second: str) -> str:
    return BASE.replace("name: linf,", f"name: {first},").replace("name: natural,", f"name: {second},")


NESTED = "a: " + "[" * 200 + "]" * 200
BOMB = "\n".join(["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)])
MANY = "learners=[" + ", ".join(f"{{name: l{i}, objective: nt, optimizer: {{lr: 0.1}}}}" for i in range(65)) + "]"
HUGE = "1" + "0" * 400

ROWS = [
    # unknown fields, at each level, with the nearest one
    changed("unknown top level", "trian.epochs=3", says=("trian: unknown field", "'train'")),
    changed("unknown field of train", "train.epoch=3", says=("train.epoch: unknown field", "'epochs'")),
    changed("unknown field of data", "data.augmentations={}", says=("data.augmentations", "'augmentation'")),
    changed("unknown field of augmentation", "data.augmentation.flipp=true", says=(".flipp", "'flip'")),
    changed("unknown field of the model", "model.widht=3", says=("model.widht", "'width'")),
    changed("unknown field of a learner", "learners.0.atack={}", says=("learners.0.atack", "'attack'")),
    changed("unknown field of an attack", "learners.0.attack.step_size=1", says=("attack.step_size", "'steps'")),
    changed("unknown field of an optimizer", "learners.0.optimizer.weight_dacay=0", says="'weight_decay'"),
    changed("unknown option of an objective", "learners.0.objective={kind: trades, betta: 1}", says="'beta'"),
    changed("unknown field of redistribution", "mixing.redistribution.evry=1", says="'every'"),
    changed("unknown field of a schedule", "mixing.gamma={epoch: [0], values: [1]}", says="'epochs'"),
    changed("a field like no other", "validation.qqqq=1", says=("validation.qqqq: unknown field;", "docs/recipes.md")),
    # wrong types and values
    changed("text for a number", "train.epochs=many", says=("train.epochs", "integer", "many")),
    changed("a float for an integer", "train.batch_size=1.5", says=("train.batch_size", "integer")),
    changed("a number in quotes", "train.epochs='3'", says="train.epochs"),
    changed("a list for a mapping", "train=[1]", says="train: "),
    changed("a number for a list", "learners=5", says="learners: Input should be a valid list"),
    changed("nothing for a section", "train=", says="train: "),
    changed("a mapping with a number as key", "train={1: 2}", says="train.1"),
    changed("zero epochs", "train.epochs=0", says="train.epochs: Input should be greater than or equal to 1"),
    changed("a negative seed", "train.seed=-1", says="train.seed"),
    changed("an unknown precision", "train.precision=fp8", says=("train.precision", "'bf16'")),
    changed("an unknown style", "style=papers", says=("style", "'paper'")),
    changed("not a number", "learners.0.optimizer.lr=.nan", says="learners.0.optimizer.lr"),
    changed("infinity", "mixing.decay=.inf", says="mixing.decay"),
    changed("nan in words", "mixing.gamma.values=[1, 1, 1, nan]", says="mixing.gamma.values.3"),
    changed("a fraction of nothing", "learners.0.threat.eps=8/0", says=("threat.eps", "denominator")),
    changed("a huge integer", f"train.epochs={HUGE}", says="train.epochs: Input should be less than"),
    changed("a huge integer for a float", f"learners.0.optimizer.lr={HUGE}", says="optimizer.lr"),
    changed("an integer that is too long for Python", "train.epochs=" + "9" * 5000, says="not valid YAML"),
    changed("a tag that YAML itself stumbles over", "train.epochs=!!int ''", says="not valid YAML"),
    # threats
    changed("a negative eps", "learners.0.threat.eps=-0.1", says=("learners.0.threat.eps", "greater than 0")),
    changed("eps 8 instead of 8/255", "learners.0.threat=linf:8", says=("learners.0.threat", "8/255")),
    changed("an unknown norm", "learners.0.threat={norm: l3, eps: 1}", says=("threat.norm", "'l2'")),
    changed("a threat without eps", "learners.0.threat=linf", says=("learners.0.threat", "linf:8/255")),
    changed("at without a threat", "learners.1.objective=at", says=("learners.1", "needs a threat; add `threat:")),
    changed("nt with a threat", "learners.1.threat=l2:1", says=("learners.1", "remove `threat`")),
    # learners and mixing
    changed("no learner", "learners=[]", says="learners: List should have at least 1 item"),
    changed("65 learners", MANY, says="learners: List should have at most 64 items"),
    written("two learners of one name", two_learners("one", "one"), "the name 'one' is taken; choose another"),
    written("a learner named global", two_learners("linf", "global"), "the name 'global' is taken"),
    written("a learner named last", two_learners("linf", "last"), "the name 'last' is taken"),
    written("a learner's name that climbs", two_learners("linf", "../../up"), "learners.1.name"),
    changed("a model in a learner", "learners.1.model={name: small}", says=("learners.1", "share one architecture")),
    changed("an unknown objective", "learners.0.objective=tradse", says=("learners.0.objective", "'trades'")),
    changed(
        "a misspelt model with a width",
        "model={name: smal, width: 4}",
        says="unknown model 'smal'; did you mean 'small'?",
    ),
    changed("an unknown lead", "mixing.lead=l2", says=("no learner 'l2'", "linf, natural")),
    changed("the lead without a learning rate", "learners.0.optimizer={}", says=("learners.0.optimizer.lr", "0.01")),
    changed("gamma above 1", "mixing.gamma=1.5", says=("mixing.gamma: 1.5", "outside [0, 1]")),
    changed("gamma below 0", "mixing.gamma=-0.5", says="mixing.gamma: -0.5"),
    changed("gammas that do not add up", "mixing.gammas={linf: 0.5, natural: 0.6}", says="add up to 1.1 at epoch 0"),
    changed("a learner without a gamma", "mixing.gammas={linf: 1}", says="'natural' has no schedule"),
    changed("a gamma of a stranger", "mixing.gammas={linf: 1, l2: 0}", says="no learner 'l2'"),
    changed("shares that do not add up", "mixing.shares={natural: 0.5}", says="mixing.shares add up to 0.5; make it 1"),
    changed("a share of the lead", "mixing.shares={linf: 1}", says="'linf' is the lead learner"),
    changed("averages that are not kept", "mixing.source=averaged", says="needs `averaging` in every learner"),
    changed("a threat without its norm", "learners.0.threat=0.1", says="write norm:eps, as in linf:8/255"),
    changed("t' beyond the end", "mixing.redistribution.start_epoch=3", says=("start_epoch: 3", "beyond the end")),
    changed("nothing left to do", "train.start_epoch=2", says="train.start_epoch: 2 leaves nothing to do"),
    changed("a schedule beyond the end", "mixing.gamma={epochs: [0, 3], values: [1, 1]}", says="beyond the end"),
    changed("a learning rate beyond the end", "learners.0.schedule={epochs: [0, 9], values: [1, 0]}", says="beyond"),
    changed(
        "an eps that rises beyond the end",
        "learners.0.attack.scale={epochs: [0, 9], values: [0, 1]}",
        says=("learners.0.attack.scale", "beyond the end"),
    ),
    changed(
        "a teacher who is heard beyond the end",
        "learners.0.objective={kind: awp, around: {kind: at-distil, weight: {epochs: [0, 9], values: [0, 1]}}}",
        says=("learners.0.objective.around.weight", "beyond the end"),
    ),
    changed("nothing to be robust against", "validation={rule: robust, threats: []}", says="validation.rule: robust"),
    changed(
        "one gamma beyond the end",
        "mixing.gammas={linf: {epochs: [0, 9], values: [1, 1]}, natural: 0}",
        says=("mixing.gammas", "beyond the end"),
    ),
    changed("a schedule that goes back", "mixing.gamma={fractions: [0, 0.5, 0.2], values: [1, 1, 1]}", says="decrease"),
    changed("a value too few", "mixing.gamma={fractions: [0, 1], values: [1]}", says="2 breakpoints and 1 values"),
    changed("both kinds of breakpoints", "mixing.gamma={fractions: [0], epochs: [0], values: [1]}", says="one of the"),
    changed("a negative learning rate", "learners.0.schedule=-1", says="learners.0.schedule: a negative learning rate"),
    # stages
    changed("a stage that changes nothing known", "stages=[{name: a, change: {trainn: 1}}]", says="trainn"),
    changed(
        "a stage with a wrong change",
        "stages=[{name: a, change: {train: {epoch: 1}}}, {name: b}]",
        says=("stages.a.change.train.epoch", "'epochs'"),
    ),
    changed("two stages of one name", "stages=[{name: a}, {name: a}]", says="two stages share a name"),
    changed("a stage from nowhere", "stages=[{name: a}, {name: b, start: c}]", says="c is not a run directory"),
    # files that are no recipe
    written("an empty file", "", "must be a mapping"),
    written("a list", "- 1\n- 2\n", "must be a mapping with the top levels data, model, learners"),
    written("a scalar", "digits", "must be a mapping"),
    written("a number as a top level", "1: 2\n", "must be a mapping"),
    written("tabs", "data:\n\tname: digits\n", "not valid YAML", "\\t"),
    written("a key given twice", BASE + "train: {epochs: 5}\n", "'train' is given twice (line 9)"),
    written("an alias bomb", BOMB, "aliases are not allowed"),
    written("deep nesting", NESTED, "nested too deeply"),
    written("a Python tag", BASE + f"x: !!python/object/apply:os.system ['{TOUCH}']\n", "not valid YAML"),
    written("another Python tag", f"!!python/object/new:os.system ['{TOUCH}']\n", "not valid YAML"),
    written("binary garbage", bytes(range(256)) * 8, "bad.yaml cannot be read as text"),
    written("an unfinished quote", "data: 'digits", "not valid YAML"),
    written("2 MiB", "#" * (2 << 20), "larger than 1048576 bytes"),
    written(
        "learners misspelt", "data: {name: digits}\nlerners: []\n", "lerners: unknown field; did you mean 'learners'?"
    ),
    written("learners missing", "data: {name: digits}\nmodel: {name: small}\n", "learners: required, but missing"),
    called("an unknown recipe", "train", "digits-x", says="unknown recipe 'digits-x'; did you mean 'digits-"),
    called(
        "a directory as recipe",
        *("train", "folder"),
        says="folder is a directory without recipe.yaml: neither a run nor a recipe",
        prepare=lambda here: (here / "folder").mkdir(),
    ),
    called("a name that is too long", "train", "x" * 5000, says="name too long"),
    called("an unknown recipe to show", "recipes", "show", "digits", says="unknown recipe 'digits'"),
    called("an unknown data set to check", "data", "check", "cifar11", says="'cifar10'"),
    called("data that is not there to check", "data", "check", "mnist", says="generalist data get mnist"),
    # --set
    changed("--set without a value", "train.epochs", says="write it as field.path=value"),
    changed("--set without a field", "=5", says="write it as field.path=value"),
    changed("--set into a scalar", "train.epochs.more=1", says="train.epochs"),
    changed("--set beyond a list", "learners.7.name=x", says="there is no element '7' in a list of 2"),
    changed(
        "--set of an unknown learner",
        "learners.l2.threat.eps=1",
        says="there is no element 'l2' in a list of 2: linf, natural",
    ),
    changed("--set of a field without its section", "epochs=3", says="did you mean 'train.epochs'?"),
    changed("--set of a learner's field", "train.lr=3", says="did you mean 'learners.0.optimizer.lr'?"),
    changed("--set with a very long position", f"learners.{'1' * 5000}.name=x", says="there is no element"),
    changed("--set with broken YAML", "train.epochs=[1", says="not valid YAML"),
    # code that is not trusted
    changed(
        "an objective's code", "learners.1.objective=canary_code:thing", says=("learners.1.objective", "--trust-code")
    ),
    changed("a model's code", "model={name: 'canary_code:thing'}", says="--trust-code"),
    changed("a data set's code", "data.name=canary_code:thing", says="--trust-code"),
    changed("an import path that climbs", "data.name=../canary_code:thing", says="unknown data set"),
    # devices and runs
    called(
        "a device that is not there", "train", "base.yaml", "--device", "cuda:99", says="'cuda:99' is not available"
    ),
    called("an unknown device", "train", "base.yaml", "--device", "tpu", says="choose auto, cpu or cuda"),
    called("--resume of nothing", "train", "base.yaml", "--resume", says="name the run with --out"),
    called(
        "--resume of no run",
        "train",
        "base.yaml",
        "--resume",
        "--out",
        "no",
        says="no is not a run directory (nothing is there)",
    ),
    called(
        "--resume with another recipe",
        *("train", "base.yaml", "--set", "train.seed=7", "--resume", "--out", "run"),
        says="train.seed: differs from that of run",
        needs_run=True,
    ),
    called(
        "--resume of a run whose recipe is damaged",
        *("train", "base.yaml", "--resume", "--out", "run"),
        says="run/recipe.yaml",
        prepare=lambda here: (here / "run" / "recipe.yaml").write_bytes(b"\xff\x00garbage"),
        needs_run=True,
    ),
    called(
        "a run where a recipe belongs",
        *("train", "run"),
        says="run is a run; go on with --resume, or branch with --from run",
        needs_run=True,
    ),
    called("--out that exists", "train", "base.yaml", "--out", "run", says="choose another --out", needs_run=True),
    called(
        "--out that is a file",
        "train",
        "base.yaml",
        "--out",
        "base.yaml",
        says="base.yaml exists already; it is not a run",
    ),
    called("--out below a file", "train", "base.yaml", "--out", "base.yaml/run", says="base.yaml"),
    called("--from nothing", "train", "base.yaml", "--from", "no", says="no is not a run directory"),
    called(
        "--from a missing epoch",
        "train",
        "base.yaml",
        "--from",
        "run@77",
        says="no snapshot of epoch 77",
        needs_run=True,
    ),
    called(
        "--from an endless epoch",
        "train",
        "base.yaml",
        "--from",
        "run@" + "9" * 5000,
        says="File name too long",
        needs_run=True,
    ),
    called(
        "--from another network",
        *("train", "base.yaml", "--from", "run", "--out", "new"),
        says="do not fit this architecture",
        prepare=rename_tensors,
        needs_run=True,
    ),
    called(
        "--from another width",
        *("train", "base.yaml", "--from", "run", "--out", "new", "--set", "model.width=5"),
        says="do not fit this architecture",
        needs_run=True,
    ),
    *(
        called(
            f"--from weights cut short, {seed}",
            *("train", "base.yaml", "--from", "run", "--out", "new"),
            says="is not a complete safetensors file",
            prepare=lambda here, seed=seed: damage_weights(here, lambda content: cut(content, seed)),
            needs_run=True,
        )
        for seed in range(3)
    ),
    *(
        called(
            f"--resume of flipped checkpoints, {seed}",
            *("train", "run", "--resume"),
            says="is intact; train again",
            prepare=lambda here, seed=seed: damage_checkpoints(here, lambda content: flip(content, seed)),
            needs_run=True,
        )
        for seed in range(3)
    ),
    called(
        "--resume of checkpoints cut short",
        *("train", "run", "--resume"),
        says="is intact; train again",
        prepare=lambda here: damage_checkpoints(here, lambda content: cut(content, 0)),
        needs_run=True,
    ),
    called(
        "--resume of a hostile checkpoint",
        *("train", "run", "--resume"),
        says="is intact; train again",
        prepare=lambda here: damage_checkpoints(here, hostile_checkpoint, honest=True),
        needs_run=True,
    ),
    # data
    changed("an unknown data set", "data={name: cifar11}", says=("data.name", "'cifar10'")),
    changed("data that is not there", "data={name: mnist}", says="generalist data get mnist"),
    changed("an unknown model", "model={name: resnet19}", says="'resnet18'"),
    changed(
        "a width of another model",
        "model.name=resnet18",
        says="remove it for 'resnet18', as in --set 'model={name: NAME}'",
    ),
    changed("arrays that only the API has", "data={name: arrays}", says="data.name: arrays"),
    changed("a folder without a root", "data={name: folder}", says="a folder needs `root`"),
    changed("a folder without train", "data={name: folder, root: .}", says="has no folder `train`"),
    changed("a folder that is not there", "data={name: folder, root: nowhere}", says="there is no folder nowhere in "),
    changed("a root with a zero byte", 'data={name: mnist, root: "a\\0b"}', says="mnist"),
    changed("more validation images than images", "validation.images=5000", says="cannot hold out 5000"),
    changed("all images for validation", "validation.images=1297", says="hold out"),
    changed("a batch larger than the data", "train.batch_size=5000", says="reduce train.batch_size"),
    changed("a crop larger than the image", "data.augmentation.crop=8", says="data.augmentation.crop below 8"),
    changed("a shift beside a crop", "data.augmentation.shift=3", says="set crop to 0"),
    changed("a cutout larger than the image", "data.augmentation.cutout=9", says="data.augmentation.cutout below 8"),
    changed("extra images that are not there", "data.extra={file: no.npz, ratio: 0.5}", says="cannot read no.npz"),
    changed("an extra share of 1", "data.extra={file: no.npz, ratio: 1}", says="data.extra.ratio"),
    changed(
        "an extra label beyond the classes",
        "data.extra={file: extra.npz, ratio: 0.5}",
        says="extra.npz",
        prepare=lambda here: save_npz(here, label=10),
    ),
    changed(
        "extra images of another size",
        "data.extra={file: extra.npz, ratio: 0.5}",
        says="resize them",
        prepare=lambda here: save_npz(here, size=9),
    ),
    changed(
        "an npz file cut short",
        "data.extra={file: extra.npz, ratio: 0.5}",
        says="extra.npz",
        prepare=lambda here: save_npz(here).write_bytes((here / "extra.npz").read_bytes()[:300]),
    ),
    changed(
        "an npz file with pickles",
        "data.extra={file: extra.npz, ratio: 0.5}",
        says="cannot read extra.npz",
        prepare=save_hostile_npz,
    ),
    changed(
        "a directory as npz file",
        "data.extra={file: extra.npz, ratio: 0.5}",
        says="extra.npz",
        prepare=lambda here: (here / "extra.npz").mkdir(),
    ),
    changed(
        "MNIST cut short",
        "data={name: mnist}",
        says="fewer bytes than its header says",
        prepare=lambda here: save_mnist(here, keep=0.5),
    ),
    changed(
        "MNIST cut in its header",
        "data={name: mnist}",
        says="ends inside its header",
        prepare=lambda here: save_mnist(here, keep=0.0005),
    ),
    changed(
        "CIFAR-10 with a label too many",
        "data={name: cifar10}",
        says="label 10",
        prepare=lambda here: save_cifar10(here, label=10),
    ),
    changed(
        "CIFAR-10 cut short",
        "data={name: cifar10}",
        says="download it again",
        prepare=lambda here: save_cifar10(here, cut=100),
    ),
    changed("CIFAR-10 with code", "data={name: cifar10}", says="posix.system", prepare=save_hostile_cifar10),
    changed(
        "a folder that has no test split",
        "data={name: folder, root: images, resolution: 8}",
        "validation.split=test",
        says="set validation.split to held-out",
        prepare=lambda here: save_folder(here, content=b"no image"),
    ),
    changed(
        "a folder whose images are none, all in memory",
        "data={name: folder, root: images, resolution: 8, resident: true}",
        "validation.images=2",
        says="replace or remove it",
        prepare=lambda here: save_folder(here, content=b"no image"),
    ),
    # what lies there already stays there
    called(
        "a report onto a recipe", "report", "run", "--out", "run/recipe.yaml", says="not a .html file", needs_run=True
    ),
    called(
        "a report's figures into a file",
        *("report", "run", "--out", "page.html", "--figures", "base.yaml"),
        says="cannot write base.yaml",
        needs_run=True,
    ),
    called("a sweep's trials onto the sweep", "sweep", "tiny.yaml", "--csv", "tiny.yaml", says=".csv", prepare=a_sweep),
    called(
        "a sweep's picture below a file",
        *("sweep", "tiny.yaml", "--svg", "base.yaml/x.svg"),
        says="cannot write base.yaml",
        prepare=a_sweep,
    ),
    called(
        "a sweep into a run", "sweep", "tiny.yaml", "--out", "run", says="run is a run", prepare=a_sweep, needs_run=True
    ),
    called("a sweep beside the list of them", "sweep", "tiny.yaml", "--list", says="leave 'tiny.yaml' out"),
    called(
        "an export onto a file of a run",
        *("export", "run", "--to", "safetensors", "--out", "run/last.safetensors", "--force"),
        says="is a file of a run",
        needs_run=True,
    ),
    called(
        "a finished run whose network is gone",
        *("train", "run", "--resume"),
        says="run/model.safetensors is missing",
        prepare=lambda here: (here / "run" / "model.safetensors").unlink(),
        needs_run=True,
    ),
    # options that would do nothing
    called(
        "a dial on more images than there are",
        *("mix", "run", "--curve", "2", "--samples", "101"),
        says="ask for 1 to 100",
        needs_run=True,
    ),
    called(
        "attacks for a merge",
        *("evaluate", "run", "--merge", "--attacks", "natural"),
        says="without --attacks",
        needs_run=True,
    ),
]
SUBPROCESS = {"at without a threat", "a Python tag", "a model's code", "--resume of a hostile checkpoint"}
