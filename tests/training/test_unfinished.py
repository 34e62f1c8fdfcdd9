"""A panel that breaks off keeps its finished episodes; the same command plays the others alone."""

import logging
from pathlib import Path
from typing import Any

import pytest

from diagnostics.artifact import load_trajectories
from tests.training.test_protocols import Played, task
from training.episodes import panel_episodes
from training.evaluate import as_metrics, summarise

PANEL = [task("a", "won 1"), task("b", "won 3"), task("c", "lost 2"), task("d", "crash 1"), task("e", "won 2")]
Broken = type[BaseException]


def breaking(calls: int, kind: Broken) -> Played:
    """A session whose policy is gone after some replies."""
    session = Played(PANEL)
    say = session.say

    def gone(key: Any) -> str:
        if len(session.asked) == calls:
            raise kind("the server is gone")
        return say(key)

    session.speaker.script = gone
    return session


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_panel_goes_on_where_it_broke_off(kind: Broken, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = panel_episodes(Played(PANEL), tmp_path / "whole", 0)
    session = breaking(6, kind)  # of 5 + 3 (`a` is won, `d` has crashed) + 1
    with pytest.raises(kind), caplog.at_level(logging.WARNING):
        panel_episodes(session, tmp_path, 0)
    assert "2 finished episodes are kept" in caplog.text
    assert not (tmp_path / "trajectories").exists()  # nobody takes a part for the panel
    seen: list[tuple[int, int]] = []
    again = Played(PANEL)
    made = panel_episodes(again, tmp_path, 0, progress=lambda done, total: seen.append((done, total)))
    assert {key[1] for key in again.asked} == {"b", "c", "e"}
    assert made.digest == whole.digest
    assert seen[0][0] >= 2 and seen[-1] == (5, 5)
    assert not list((tmp_path / "unfinished").iterdir())
    assert as_metrics(summarise(load_trajectories(made.path)))["eval/success"] == 3 / 4


def test_what_was_played_otherwise_is_not_taken_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone"):
        panel_episodes(breaking(6, ValueError), tmp_path, 0)
    other = Played(PANEL)
    other.step = 8
    panel_episodes(other, tmp_path, 0)
    assert {key[1] for key in other.asked} == {t.id for t in PANEL}
    seven = tmp_path / "unfinished" / "household_valid_seen_step7_seed0"
    changed = Played(PANEL)
    next(changed.model.parameters()).data.mul_(2)
    made = panel_episodes(changed, tmp_path, 0)
    assert {key[1] for key in changed.asked} == {t.id for t in PANEL} and not seven.exists()
    assert len(load_trajectories(made.path)) == len(PANEL)


def test_nothing_finished_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gone"):
        panel_episodes(breaking(0, ValueError), tmp_path, 0)
    assert not (tmp_path / "unfinished").exists()


def test_it_breaks_off_twice(tmp_path: Path) -> None:
    for calls in (6, 2):
        with pytest.raises(ValueError, match="gone"):
            panel_episodes(breaking(calls, ValueError), tmp_path, 0)
    made = panel_episodes(Played(PANEL), tmp_path, 0)
    assert [t.task_id for t in load_trajectories(made.path)] == [t.id for t in PANEL]
