"""The command line, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from generalist import cli


def run_main(
    args: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `generalist ARGS`."""
    monkeypatch.setattr(sys, "argv", ["generalist", *args])
    code: Any = 0
    try:
        cli.main()
    except SystemExit as ending:
        code = ending.code or 0
    shown = capsys.readouterr()
    return code, shown.out, shown.err
