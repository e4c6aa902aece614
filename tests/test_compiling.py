"""The compiler is imported where something is compiled, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from generalist.core import compiling
from generalist.core.compiling import compiled, for_the_compiler
from generalist.training.environment import switches
from generalist.training.options import TrainOptions


def test_a_decorator_is_applied_once_before_the_first_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_waiting", [])
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    marked = []

    def mark(function):
        marked.append(function)
        return lambda x: function(x) + 10

    @for_the_compiler(mark)
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert (double(1), marked, double.__name__, double.__doc__) == (2, [], "double", "Twice.")
    assert compiled(lambda x: double(x) + 1)(1) == 13
    assert compiled(double)(2) == 14 and len(marked) == 1


def test_the_decorators_do_what_they_do_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`disable` breaks the graph, and its function sees no tensors of a compiler's; a constant is not looked into."""
    monkeypatch.setattr(compiling, "_waiting", [])
    seen = []

    @for_the_compiler(torch.compiler.disable)
    def plain(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x / 3

    @for_the_compiler(torch.compiler.assume_constant_result)
    def hashed(text: str) -> int:
        return hash(text) % 1000

    def function(x: torch.Tensor) -> torch.Tensor:
        return plain(x + hashed("a")) * 2

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_ = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch, "compile", lambda function, dynamic: compile_(function, dynamic=dynamic, backend=backend)
    )
    x = torch.arange(3.0)
    assert torch.equal(compiled(function)(x), function(x))
    assert seen == [False, False] and len(graphs) == 2, "one graph before what is disabled, one after it"


def test_nothing_else_imports_the_compiler() -> None:
    modules = "generalist.api, generalist.cli, generalist.cli_evaluate, generalist.training.graph, generalist.bench"
    program = f"import sys, {modules}; print('torch._dynamo' in sys.modules, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout == "False True\n"


def test_neither_does_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.use_deterministic_algorithms imports it."""
    calls = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *given, **named: calls.append((given, named)))
    with switches(TrainOptions(epochs=1), torch.device("cpu")):
        pass
    assert calls == []
    with switches(TrainOptions(epochs=1, deterministic=True), torch.device("cpu")):
        assert calls == [((True,), {})]
    assert calls[1:] == [((False,), {"warn_only": False})]
