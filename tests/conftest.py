"""Fixtures of all tests, and run-time checks of type hints and array shapes in the product code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread: results of sums do not depend on the machine's load

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background; some tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from jaxtyping import install_import_hook

# Every function of these packages is checked against its hints and array shapes while the tests run. The tower lets an
# int stand where a float is asked for, as PEP 484 does; the hook takes the checker as an expression.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
install_import_hook(["diagnostics", "training", "analysis", "figures"], CHECKER)

ROOT = Path(__file__).resolve().parents[1]
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Say:
    """Runs a command in an empty folder; exit code, what it printed, what it complained."""
    import undertow  # behind the import hook

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UNDERTOW_DEBUG", raising=False)
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["undertow", *map(str, words)])
        code = undertow.main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with reference data beside the checkout; tests that need it are skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder with reference data (../shared) is not beside this checkout")
    return folder
