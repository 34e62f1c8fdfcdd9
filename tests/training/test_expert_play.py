"""The experts as players: real games, shops and questions, the reader's own ids, and a skill an episode."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnostics.artifact import load_skills, load_trajectories
from diagnostics.records import Trajectory
from diagnostics.render import decode, parse_reply
from tests.training.retrieval_server import serving
from training import episodes
from training.config import RECIPES, EnvConfig, SearchConfig, ShopConfig
from training.envs import retrievers
from training.envs.alfworld import AlfworldEnv
from training.envs.base import Env, Task
from training.envs.fact_world import generate
from training.envs.folders import household_games
from training.envs.games import load_tasks
from training.envs.kinds import KINDS
from training.envs.questions import PASSAGES, load_questions, write_lines
from training.envs.search_qa import SearchQAEnv
from training.envs.webshop.env import WebShopEnv
from training.envs.webshop.folders import generated_shop
from training.envs.webshop.shop import load_tasks as load_goals
from training.episodes import latest_episodes, panel_episodes, play_seeds, skills_beside
from training.expert_play import expert_episodes, expert_skills
from training.models.experts import EXPERTS, search
from training.models.load import load_policy
from training.options import TINY
from training.session import Session
from training.subject import Subject


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"train": 3, "valid_seen": 1, "valid_unseen": 1}
    return household_games(tmp_path_factory.mktemp("expert") / "games", sizes, 0, 1)


@pytest.fixture(scope="module")
def policy() -> tuple[Any, Any]:
    return load_policy("tiny", "float32", "cpu")


def test_expert_wins_and_its_ids_are_its_words(games: Path, policy: tuple[Any, Any]) -> None:
    tokenizer, env = policy[1], AlfworldEnv()
    tasks = load_tasks(games, "train")
    told: list[tuple[int, int]] = []
    played = expert_episodes(
        env, tasks, tokenizer, seed=0, attempts=2, max_context=2048, progress=lambda *n: told.append(n)
    )
    assert [(t.task_id, t.attempt) for t in played] == [(id, k) for id in sorted(t.id for t in tasks) for k in (0, 1)]
    assert len({t.id for t in played}) == 6 and told[-1] == (6, 6)
    assert sum(t.success for t in played) >= 5
    for t in played:
        [segment] = t.segments
        for k, turn in enumerate(t.turns):
            ids = segment.ids[segment.turn == k]
            assert decode(tokenizer, ids[:-1]) == turn.response and ids[-1] == tokenizer.eos_token_id
        assert np.isnan(segment.rollout_logprobs[segment.response_mask]).all()
    again = expert_episodes(env, tasks[:1], tokenizer, seed=0, attempts=2, max_context=2048)
    assert [t.turns for t in again] == [t.turns for t in played if t.task_id == tasks[0].id]
    others = expert_episodes(env, tasks, tokenizer, seed=1, attempts=1, max_context=2048)
    assert [t.turns for t in others] != [t.turns for t in played if t.attempt == 0]


def test_a_skill_tells_where_the_thing_was(games: Path, policy: tuple[Any, Any]) -> None:
    played = expert_episodes(AlfworldEnv(), load_tasks(games, "train"), policy[1], seed=0, attempts=1, max_context=2048)
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


def test_a_limit_of_turns_ends_the_experts_episode_too(games: Path, policy: tuple[Any, Any]) -> None:
    tasks = load_tasks(games, "train")
    played = expert_episodes(AlfworldEnv(max_turns=2), tasks, policy[1], seed=0, attempts=1, max_context=2048)
    assert [len(t.turns) for t in played] == [2] * len(tasks)


# WebShop and Search-QA


def test_every_kind_of_environment_has_an_expert() -> None:
    assert set(EXPERTS) == set(KINDS)


def shop_and_world(folder: Path) -> dict[str, tuple[Env, list[Task]]]:
    shop, world = generated_shop(folder / "shop", 140), generate(folder / "world", {"train": 64}, seed=3)
    return {
        "webshop": (WebShopEnv(), load_goals(shop, "sdar_valid")[:24]),
        "searchqa": (SearchQAEnv(str(world / PASSAGES)), load_questions(world, "train")[::2]),
    }


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Env, list[Task]]]:
    return shop_and_world(tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize(("kind", "least"), [("webshop", 0.5), ("searchqa", 0.85)])
def test_experts_of_shop_and_questions(
    places: dict[str, tuple[Env, list[Task]]], policy: tuple[Any, Any], kind: str, least: float
) -> None:
    (env, tasks), tokenizer = places[kind], policy[1]
    played = expert_episodes(env, tasks, tokenizer, seed=0, attempts=2, max_context=10**5)
    assert [(t.task_id, t.attempt) for t in played] == [(id, k) for id in sorted(t.id for t in tasks) for k in (0, 1)]
    assert least < np.mean([t.success for t in played]) < 1
    assert sum(one.turns != other.turns for one, other in zip(played[::2], played[1::2], strict=True)) > 3
    turns = [turn for t in played for turn in t.turns]
    assert 0.01 < np.mean([not turn.valid for turn in turns]) < 0.12  # slips that are no command at all
    assert all((parse_reply(turn.response)[1] or "") == turn.action for turn in turns)
    for t in played:
        assert (t.stop_reason == "won") == t.success == (t.reward == 10.0) and t.outcome
        assert len(t.turns) <= (15 if kind == "webshop" else 4)
        [segment] = t.segments
        for k, turn in enumerate(t.turns):
            ids = segment.ids[segment.turn == k]
            assert decode(tokenizer, ids[:-1]) == turn.response and ids[-1] == tokenizer.eos_token_id
        said = decode(tokenizer, segment.ids[segment.response_mask])
        assert "[SEP]" not in said and "<information>" not in said  # pages and passages are never the expert's words
    again = expert_episodes(env, tasks[:1], tokenizer, seed=0, attempts=2, max_context=10**5)
    assert [t.turns for t in again] == [t.turns for t in played if t.task_id == tasks[0].id]


def test_what_shop_and_questions_teach(places: dict[str, tuple[Env, list[Task]]], policy: tuple[Any, Any]) -> None:
    """A skill names what the episode came by: the product's place on the page of results, or the fact."""
    seen = set()
    for kind, (env, tasks) in places.items():
        played = expert_episodes(env, tasks, policy[1], seed=0, attempts=3, max_context=2048)
        skills = expert_skills(played)
        for t in played:
            skill = skills[t.id]
            assert (skill.task_id, skill.source_success, skill.kind) == (t.task_id, t.success, "hindsight")
            if kind == "searchqa":
                assert not t.success or skill.text.endswith(f"Answer {_said(t, 'answer')}.")
                continue
            opened = [turn for turn in t.turns if turn.valid and turn.action.startswith("click[b0")]
            if opened:
                number = 1 + [p.lower() for p in opened[-1].observation.split(" [SEP] ")[3::3]].index(
                    opened[-1].action[6:-1]
                )
                assert f"umber {number}" in skill.text
                seen.add((number > 1, t.success))
            assert ("Take number" in skill.text) == t.success
    assert seen == {(False, True), (True, True), (False, False), (True, False)}


def _said(t: Trajectory, tag: str) -> str:
    return t.turns[-1].action.removeprefix(f"<{tag}>").removesuffix(f"</{tag}>")


PAGES = [
    {"id": "a", "title": "Ada", "text": "Ada was born in Karsum, where nobody counts."},
    {"id": "b", "title": "Karsum", "text": "Karsum is a town on the river Tol."},
    {"id": "c", "title": "Other", "text": "No counting there, says no one."},
]
ASKED = [
    {"id": "nq:1", "dataset": "nq", "question": "where was ada born", "answers": ["The Karsum!"]},
    {"id": "nq:2", "dataset": "nq", "question": "On which river is the town of Ada", "answers": ["Tol"]},
    {"id": "nq:3", "dataset": "nq", "question": "Who counts there?", "answers": ["no"]},
    {"id": "nq:4", "dataset": "nq", "question": "Who is Zed?", "answers": ["Zedd"]},
]


@pytest.fixture
def real(tmp_path: Path) -> Path:
    write_lines(tmp_path / PASSAGES, PAGES)
    write_lines(tmp_path / "questions_train.jsonl", ASKED)
    return tmp_path


def test_a_reader_of_real_questions_answers_only_what_it_has_read(real: Path) -> None:
    env, tasks = SearchQAEnv(str(real / PASSAGES), passages=1), load_questions(real, "train")
    rng = np.random.default_rng(0)
    found = {task.id: search(env, task, rng, slip=0.0) for task in tasks}
    assert {id: t.success for id, t in found.items()} == {"nq:1": True, "nq:2": True, "nq:3": False, "nq:4": False}
    assert [turn.action for turn in found["nq:1"].turns] == [
        "<search>where was ada born</search>",
        "<answer>The Karsum!</answer>",
    ]
    for t in found.values():
        before = " ".join(turn.observation for turn in t.turns)
        assert all("<answer>" not in turn.action for turn in t.turns) or _said(t, "answer").strip("The !") in before
    assert found["nq:3"].stop_reason == "turn_limit" and len(found["nq:3"].turns) == 4
    skill = EXPERTS["searchqa"].skill
    assert skill(found["nq:1"]) == 'Search "where was ada born": Ada tells that the answer is The Karsum!.'
    assert skill(found["nq:4"]).startswith("Nothing is found with: Who is Zed?; Zed")


def test_a_server_that_fails_is_an_error_of_the_episode(
    real: Path, policy: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrievers, "PAUSE", 0.0)
    tasks = load_questions(real, "train")[:1]
    with serving(*[500] * 12) as told:
        config = EnvConfig("searchqa", str(real), max_turns=4, search=SearchConfig(told.url, timeout=2.0))
        env = KINDS["searchqa"].make_env(config, policy[1])()
        (played,) = expert_episodes(env, tasks, policy[1], seed=0, attempts=1, max_context=2048)
    assert (played.stop_reason, played.success, played.score) == ("error", False, None)
    assert played.error is not None and "status 500" in played.error
    assert expert_skills([played]) == {}


def test_other_passages_under_the_same_questions_are_played_anew(real: Path, policy: tuple[Any, Any]) -> None:
    """Task ids tell the questions and not what is searched in, nor how many products a page of a shop shows."""
    config = replace(
        RECIPES["tiny-search-grpo"],
        env=replace(RECIPES["tiny-search-grpo"].env, data=str(real)),
        eval=replace(TINY.eval, panel="train", size=2),
    )
    with Session(config, *policy) as session:
        made = panel_episodes(session, real / "run", 0, protocol="expert", trials=1)
        again = panel_episodes(session, real / "run", 0, protocol="expert", trials=1)
    assert (again.digest, {t.env for t in load_trajectories(made.path)}) == (made.digest, {"searchqa"})
    assert skills_beside(made) is not None
    other = real / "other"
    shutil.copytree(real, other, ignore=lambda *_: {"run", "other"})
    write_lines(other / PASSAGES, PAGES[2:])
    with Session(replace(config, env=replace(config.env, data=str(other))), *policy) as session:
        anew = panel_episodes(session, real / "run", 0, protocol="expert", trials=1)
    assert anew.digest != made.digest
    shops = [replace(RECIPES["tiny-webshop-grpo"].env, shop=ShopConfig(products)) for products in (2, 10)]
    assert episodes._shown(shops[0]) != episodes._shown(shops[1])


def test_a_request_that_is_refused_makes_no_folder(real: Path, tmp_path: Path) -> None:
    config = replace(RECIPES["tiny-search-grpo"], env=replace(RECIPES["tiny-search-grpo"].env, data=str(real)))
    subject = Subject(config, "tiny", 0, tmp_path / "run", "tiny")
    with pytest.raises(ValueError, match="no questions of split 'valid_seen'"):
        play_seeds(subject, config, [0], protocol="vanilla", trials=1, device="cpu")
    assert not (tmp_path / "run").exists()
