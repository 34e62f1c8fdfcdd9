"""The expert accepts its own play and what is as good, not nonsense, and says when it has no answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diagnostics.records import Trajectory, Turn
from training.envs.alfworld import AlfworldEnv
from training.envs.games import load_tasks
from training.envs.household import generate
from training.judge import accepts, judged, verdicts
from training.models.corpus import play, skill_text
from training.models.expert import Expert, Goal


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[AlfworldEnv, object]]:
    folder = generate(
        tmp_path_factory.mktemp("games"), {"train": 12, "valid_seen": 0, "valid_unseen": 0}, seed=7, workers=1
    )
    env = AlfworldEnv()
    return [(env, task) for task in load_tasks(folder, "train")]


def test_own_play_is_accepted_whatever_the_draws(games: list) -> None:
    for seed, (env, task) in enumerate(games):
        attempt, _ = play(env, task, np.random.default_rng([seed, 1]), slip=0.0)
        assert verdicts(attempt) == (True,) * len(attempt.turns)


def test_play_with_a_skill_is_accepted(games: list) -> None:
    """Going straight to the place that a skill names is a search step as good as any other."""
    for seed, (env, task) in enumerate(games):
        first, _ = play(env, task, np.random.default_rng(seed), slip=0.0)
        skill = skill_text(Goal.parse(task.description), first.turns, first.success)
        again, _ = play(env, task, np.random.default_rng(seed), skill, slip=0.0)
        assert all(verdicts(again))


def test_slips_are_mostly_refused_and_what_follows_them_is_not(games: list) -> None:
    slipped, own = [], []
    for seed, (env, task) in enumerate(games):
        attempt, kept = play(env, task, np.random.default_rng(seed), slip=0.4)
        for verdict, is_own in zip(verdicts(attempt), kept, strict=True):
            (own if is_own else slipped).append(verdict)
    assert all(own) and len(own) > 50
    assert 0.5 < np.mean([verdict is False for verdict in slipped]) < 1 and len(slipped) > 30


@pytest.mark.parametrize("nonsense", ["", "look", "inventory", "go to desk 99", "take spoon 7 from desk 1", "help"])
def test_nonsense_is_refused_on_every_turn(games: list, nonsense: str) -> None:
    env, task = games[0]
    attempt, _ = play(env, task, np.random.default_rng(0), slip=0.0)
    said = [replace(turn, action=nonsense) for turn in attempt.turns]
    assert verdicts(replace(attempt, turns=tuple(said[:1]))) == (False,)
    assert not any(verdicts(replace(attempt, turns=tuple(said))))


def expert(task: str, room: str, known: dict[str, str] | None = None, **state: object) -> Expert:
    made = Expert(Goal.parse(task), np.random.default_rng(0), known=known or {})
    made.begin(f"Looking quickly around you, you see {room}.")
    return replace(made, **state)


ROOM = "a desk 1, a desk 2, a shelf 1, a shelf 2, a drawer 1"


def test_places_not_searched_yet_are_as_good_as_each_other() -> None:
    searching = expert("put a mug in shelf.", ROOM, visited={"desk 1"})
    found = {place: accepts(searching, f"go to {place}") for place in ("desk 1", "desk 2", "drawer 1", "shelf 2")}
    assert found == {"desk 1": False, "desk 2": True, "drawer 1": True, "shelf 2": True}
    assert accepts(searching, "go to shelf 1") is False  # the target: what already lies there need not be found
    at = replace(searching, here="drawer 1", closed={"drawer 1"})
    assert accepts(at, "open drawer 1") and not accepts(at, "go to desk 2")


def test_what_was_seen_is_fetched_and_each_of_it_is_as_good() -> None:
    seen = {"mug 1": "desk 1", "mug 2": "desk 2", "pen 1": "drawer 1"}
    fetching = expert("put a mug in shelf.", ROOM, seen, visited={"desk 1", "desk 2"})
    assert accepts(fetching, "go to desk 1") and accepts(fetching, "go to desk 2")
    assert not accepts(fetching, "go to drawer 1")  # not searched, but nothing is sought any more
    at = replace(fetching, here="desk 2")
    assert accepts(at, "take mug 2 from desk 2") and accepts(at, "go to desk 1")
    assert not accepts(at, "take mug 1 from desk 2") and not accepts(at, "take pen 1 from drawer 1")


def test_any_target_and_any_tool_of_the_kind_will_do() -> None:
    held = expert("clean some mug and put it in shelf.", f"{ROOM}, a sinkbasin 1, a sinkbasin 2", holding="mug 1")
    assert accepts(held, "go to sinkbasin 1") and accepts(held, "go to sinkbasin 2")
    assert not accepts(held, "go to shelf 2")
    assert accepts(replace(held, here="sinkbasin 2"), "clean mug 1 with sinkbasin 2")
    cleaned = replace(held, treated=True, here="sinkbasin 1")
    assert accepts(cleaned, "go to shelf 1") and accepts(cleaned, "go to shelf 2")
    assert accepts(replace(cleaned, here="shelf 2"), "move mug 1 to shelf 2")
    assert not accepts(replace(cleaned, here="desk 1"), "move mug 1 to desk 1")


def test_the_second_of_two_goes_where_the_first_went() -> None:
    said = [
        ("go to desk 1", "You arrive at desk 1. On the desk 1, you see a mug 1, and a mug 2."),
        ("take mug 1 from desk 1", "You pick up the mug 1 from the desk 1."),
        ("go to shelf 2", "You arrive at shelf 2. On the shelf 2, you see nothing."),
        ("move mug 1 to shelf 2", "You move the mug 1 to the shelf 2."),
        ("go to desk 1", "You arrive at desk 1. On the desk 1, you see a mug 2."),
        ("take mug 2 from desk 1", "You pick up the mug 2 from the desk 1."),
    ]
    observations = [f"You see {ROOM}.", *(answer for _, answer in said)]
    for last, verdict in (("go to shelf 2", True), ("go to shelf 1", False)):
        commands = [*(command for command, _ in said), last]
        turns = [Turn(o, (), "", c, True) for o, c in zip(observations, commands, strict=True)]
        assert verdicts(episode("find two mug and put them in shelf.", turns)) == (*(True,) * len(said), verdict)


def test_where_every_place_was_searched_there_is_no_answer() -> None:
    lost = expert("put a mug in shelf.", "a desk 1, a shelf 1", visited={"desk 1"})
    assert accepts(lost, "go to desk 1") is None


def test_other_environments_and_sentences_are_left_out() -> None:
    one = episode("put a mug in shelf.", [Turn(f"You see {ROOM}.", (), "", "go to desk 2", True)])
    others = [replace(one, id="shop", env="webshop"), replace(one, id="own words", description="Get me that mug!")]
    assert judged([one, *others]) == {one.id: (True,)}
    assert verdicts(replace(one, turns=())) == ()


def episode(task: str, turns: list[Turn]) -> Trajectory:
    return Trajectory(
        id="t", task_id="task", task_type="pick", env="household", split="train", description=task, group=0, attempt=0,
        seed=0, step=0, turns=tuple(turns), segments=(), reward=0.0, success=False, stop_reason="done",
        first_observation_sha256="",
    )  # fmt: skip
