"""The expert as a player: real games, the reader's own ids, and a skill a episode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnostics.artifact import load_skills, load_trajectories
from diagnostics.render import decode
from training.envs.folders import household_games
from training.envs.games import load_tasks
from training.episodes import latest_episodes, panel_episodes, skills_beside
from training.expert_play import expert_episodes, expert_skills
from training.models.load import load_policy
from training.options import TINY
from training.session import Session


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"train": 3, "valid_seen": 1, "valid_unseen": 1}
    return household_games(tmp_path_factory.mktemp("expert") / "games", sizes, 0, 1)


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any]:
    return load_policy("tiny", "float32", "cpu")


def test_expert_wins_and_its_ids_are_its_words(games: Path, policy: tuple[Any, Any]) -> None:
    tokenizer = policy[1]
    tasks = load_tasks(games, "train")
    told: list[tuple[int, int]] = []
    played = expert_episodes(tasks, tokenizer, seed=0, attempts=2, max_context=2048, progress=lambda *n: told.append(n))
    assert [(t.task_id, t.attempt) for t in played] == [(id, k) for id in sorted(t.id for t in tasks) for k in (0, 1)]
    assert len({t.id for t in played}) == 6 and told[-1] == (6, 6)
    assert sum(t.success for t in played) >= 5
    for t in played:
        [segment] = t.segments
        for k, turn in enumerate(t.turns):
            ids = segment.ids[segment.turn == k]
            assert decode(tokenizer, ids[:-1]) == turn.response and ids[-1] == tokenizer.eos_token_id
        assert np.isnan(segment.rollout_logprobs[segment.response_mask]).all()
    again = expert_episodes(tasks[:1], tokenizer, seed=0, attempts=2, max_context=2048)
    assert [t.turns for t in again] == [t.turns for t in played if t.task_id == tasks[0].id]
    others = expert_episodes(tasks, tokenizer, seed=1, attempts=1, max_context=2048)
    assert [t.turns for t in others] != [t.turns for t in played if t.attempt == 0]


def test_a_skill_tells_where_the_thing_was(games: Path, policy: tuple[Any, Any]) -> None:
    played = expert_episodes(load_tasks(games, "train"), policy[1], seed=0, attempts=1, max_context=2048)
    skills = expert_skills(played)
    assert set(skills) == {t.id for t in played}
    for t in played:
        taken = [turn.action for turn in t.turns if turn.action.startswith("take ") and turn.valid]
        thing, _, _ = taken[-1].removeprefix("take ").partition(" from ")
        assert not t.success or thing in skills[t.id].text
        assert skills[t.id].source_success == t.success


def test_expert_episodes_are_an_artifact_that_diagnose_finds(
    games: Path, policy: tuple[Any, Any], tmp_path: Path
) -> None:
    config = replace(TINY, env=replace(TINY.env, data=str(games)), eval=replace(TINY.eval, panel="train", size=2))
    with Session(config, *policy) as session:
        made = panel_episodes(session, tmp_path, 0, protocol="expert", trials=2)
        assert made.path.name == "household_train_step0_seed0_expert"
        assert panel_episodes(session, tmp_path, 0, protocol="expert", trials=2).digest == made.digest
        assert latest_episodes(tmp_path).path == made.path
        skills = skills_beside(made)
        assert skills is not None
        assert set(load_skills(skills.path)) == {t.id for t in load_trajectories(made.path)}
        plain = panel_episodes(session, tmp_path, 0)
    assert latest_episodes(tmp_path).path == plain.path  # a policy's own play comes first
