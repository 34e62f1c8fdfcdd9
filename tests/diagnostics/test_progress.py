"""Progress inside progress: one display in a terminal, lines of both for a study; a slow measure is never silent."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from diagnostics import progress as module
from diagnostics.progress import VARIABLE, progress
from tests.diagnostics.test_run import PROVENANCE, SKILLS, make_trajectories, tokenizer
from tests.diagnostics.tiny import tiny_model


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_stage_inside_another_stands_in_the_same_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    for _ in range(2):  # the display of the first is gone when the second begins
        with progress("outer", 2) as report:
            (display,) = module._shown
            with progress("inner", 3) as within:
                within(3)
                assert module._shown == [display]
            report(1)
            assert [(task.description, task.completed, task.total) for task in display.tasks] == [
                ("outer", 1, 2),
                ("inner", 3, 3),
            ]
        assert module._shown == []
    with pytest.raises(KeyError), progress("outer", 2):
        raise KeyError
    assert module._shown == [] and "inner" in terminal.getvalue()


def test_reading_measures_and_slow_fits_all_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from diagnostics.run import diagnose

    monkeypatch.setenv(VARIABLE, str(tmp_path / "progress.jsonl"))
    given: dict[str, Any] = {"skills": SKILLS, "contexts": ["own_skill", "other_skill"], "provenance": PROVENANCE}
    measures = ["change", "probe", "patching"]
    model = tiny_model(layers=2)
    diagnose(model, tokenizer(), make_trajectories(), measures=measures, out=tmp_path / "m", **given)
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    steps: dict[str, list[int]] = {}
    totals: dict[str, set[int]] = {}
    for line in lines:
        steps.setdefault(line["stage"], []).append(line["step"])
        totals.setdefault(line["stage"], set()).add(line["total"])
    assert list(steps) == ["diagnose", "measures", "probe", "patching"]
    for stage, counted in steps.items():
        assert counted == sorted(counted) and {counted[-1]} == totals[stage], stage
    assert steps["measures"] == [0, 1, 2, 3] and len(steps["probe"]) >= 5
