"""Networks for other tools: a weights file, a folder for model hubs, ONNX, and the layouts of RobustBench.

No file is left half-written: it is complete or absent, and an existing one stays unless `force` is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from generalist.core.errors import GeneralistError
from generalist.core.registry import unknown_name
from generalist.core.run import RunDirectory
from generalist.export.hub import write_folder
from generalist.export.onnx_file import write_onnx
from generalist.export.robustbench import write_robustbench
from generalist.export.source import Source, open_source
from generalist.training.artefacts import save_weights

__all__ = ["FORMATS", "Exported", "export_model"]

Notes = list[str]


@dataclass(frozen=True)
class Format:
    """One export format."""

    write: Callable[[Source, Path], Notes]
    """Writes the file or folder; returns remarks for the user, one line each."""
    ending: str
    """The ending of the default name."""
    suffix: str | None
    """The suffix that a name must have, so that a slip in --out replaces no other kind of file; None for a folder."""


def write_safetensors(source: Source, path: Path) -> Notes:
    """The weights unchanged, in float32, with the header from which `generalist.load` builds the network."""
    save_weights(path, source.state(), source.about)
    return [f"read it with: generalist.load({str(path)!r})"]


FORMATS = {
    "safetensors": Format(write_safetensors, ".safetensors", ".safetensors"),
    "hub-folder": Format(write_folder, "-hub", None),
    "onnx": Format(write_onnx, ".onnx", ".onnx"),
    "robustbench": Format(write_robustbench, "-robustbench.pt", ".pt"),
}


@dataclass(frozen=True)
class Exported:
    """What was written, and remarks for the user."""

    path: Path
    notes: Notes


def export_model(
    source: str | Path,
    *,
    to: str,
    which: str = "best",
    out: str | Path | None = None,
    force: bool = False,
    trust_code: bool = False,
) -> Exported:
    """Write a network of a run (`which`: best, last or a learner's name), or of a weights file, in another format.

    `to` is safetensors, hub-folder, onnx or robustbench. Without `out`, it goes to `export/` in the run, or beside the
    file. What exists already is replaced only with `force`.
    """
    if to not in FORMATS:
        raise GeneralistError(unknown_name("format", to, list(FORMATS)))
    form = FORMATS[to]
    opened = open_source(Path(source), which, trust_code=trust_code)
    path = Path(out) if out is not None else opened.home / "export" / f"{opened.name}{form.ending}"
    _check_target(path, form, opened, force=force)
    return Exported(path, form.write(opened, path))


def _check_target(path: Path, form: Format, source: Source, *, force: bool) -> None:
    if form.suffix is not None and path.suffix != form.suffix:
        raise GeneralistError(f"--out {path}: name the file with {form.suffix} at its end")
    itself = source.run is None and path.is_dir() and path.samefile(source.file.parent)
    if itself or path.resolve() == source.file.resolve():
        raise GeneralistError(f"{path} is what is to be exported; choose another --out")
    for place in path.resolve().parents:
        if (run := RunDirectory(place)).exists() and run.environment.is_file():
            if len(parts := path.resolve().relative_to(place).parts) > 1 and parts[0] != "export":
                raise GeneralistError(f"{path} lies among the files of a run, {place}; choose another --out")
            break
    if form.suffix is not None and (path.parent / "recipe.yaml").exists() and path.exists():
        raise GeneralistError(f"{path} is a file of a run, which an export would replace; choose another --out")
    if path.is_dir() != (form.suffix is None) and path.exists():
        kind = "a folder" if path.is_dir() else "a file"
        raise GeneralistError(f"{path} is {kind} and would be replaced by something else; choose another --out")
    empty = path.is_dir() and not any(path.iterdir())
    if path.exists() and not force and not empty:
        raise GeneralistError(f"{path} exists already; replace it with --force, or choose another --out")
    if path.is_dir() and (path / "recipe.yaml").exists():
        raise GeneralistError(f"{path} is a run, whose weights an export would replace; choose another --out")
