"""The searching expert wins by legal commands, its skills say where things were, and only its own replies teach."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from diagnostics import render
from diagnostics.records import Message, Trajectory, Turn
from training.envs.alfworld import AlfworldEnv
from training.envs.base import Task
from training.envs.games import load_tasks
from training.envs.household import generate
from training.envs.rooms import DESCRIPTIONS, rooms
from training.envs.sights import contents, things
from training.models.corpus import (
    MAX_TURNS,
    acting,
    examples_of,
    hints,
    make_corpus,
    overlooked,
    play,
    renamed,
    skill_text,
    truncated,
    writing,
)
from training.models.expert import Expert, Goal, kind_of
from training.skills.hindsight import CUE, parse_skill


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"train": 12, "valid_seen": 0, "valid_unseen": 0}
    return generate(tmp_path_factory.mktemp("games"), sizes, seed=5, workers=1)


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[Task]:
    return load_tasks(folder, "train")


@pytest.fixture(scope="module")
def env() -> AlfworldEnv:
    return AlfworldEnv()


@pytest.fixture(scope="module")
def plays(env: AlfworldEnv, tasks: list[Task]) -> list[Trajectory]:
    """One play a game, never led astray."""
    return [play(env, task, np.random.default_rng(k), slip=0.0)[0] for k, task in enumerate(tasks)]


class RecordingGenerator(np.random.Generator):
    """Keeps its uniform draws: one a turn, which decides whether the expert is led astray."""

    draws: list[float]

    def random(self, *args: object, **kwargs: object) -> float:
        draw = super().random(*args, **kwargs)
        self.draws.append(draw)
        return draw


def turn(action: str, observation: str = "") -> Turn:
    return Turn(observation, (action,), f"<action>{action}</action>", action, True)


# The expert


@pytest.mark.parametrize("kind", sorted(DESCRIPTIONS))
def test_every_task_sentence_is_understood(kind: str) -> None:
    expected = {
        "pick_and_place_simple": Goal("place", "mug", "shelf"),
        "look_at_obj_in_light": Goal("look", "mug", "desklamp"),
        "pick_clean_then_place_in_recep": Goal("clean", "mug", "shelf"),
        "pick_heat_then_place_in_recep": Goal("heat", "mug", "shelf"),
        "pick_cool_then_place_in_recep": Goal("cool", "mug", "shelf"),
        "pick_two_obj_and_place": Goal("two", "mug", "shelf"),
    }[kind]
    for template in DESCRIPTIONS[kind]:
        assert Goal.parse(template.format(o="mug", r="shelf")) == expected


def test_real_task_sentences_are_understood(shared: Path) -> None:
    kinds = {"place": "pick_and", "two": "pick_two", "look": "look_at"}
    for task in load_tasks(shared / "data" / "alfworld", "valid_seen"):
        goal = Goal.parse(task.description)
        assert task.task_type.startswith(kinds.get(goal.kind, f"pick_{goal.kind}"))
        _, wanted, _, target, _ = task.id.split("/")[0].split("-")
        assert (goal.wanted, goal.target) == (wanted.lower(), "desklamp" if goal.kind == "look" else target.lower())


def test_a_foreign_sentence_is_refused() -> None:
    with pytest.raises(ValueError, match="none of ALFWorld's templates"):
        Goal.parse("make me a sandwich.")


def test_tools_of_the_treatments() -> None:
    tools = [Goal(kind, "mug", "shelf").tool for kind in ("clean", "heat", "cool", "place", "two", "look")]
    assert tools == ["sinkbasin", "microwave", "fridge", None, None, None]


def test_the_expert_knows_nothing_before_it_looks() -> None:
    expert = Expert(Goal.parse("put a mug in shelf."), np.random.default_rng(0))
    expert.begin("Looking quickly around you, you see a drawer 1, a shelf 1, and a desk 1.")
    assert expert.known == {}
    assert sorted(expert.places) == ["desk 1", "drawer 1"]  # what already lies on the target need not be found
    thought, command = expert.act() or ("", "")
    assert "mug" in thought
    assert command in ("go to desk 1", "go to drawer 1")


def test_the_expert_gives_up_when_every_place_has_been_searched() -> None:
    expert = Expert(Goal.parse("put a mug in shelf."), np.random.default_rng(0))
    expert.begin("You see a desk 1, and a shelf 1.")
    expert.observe("go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing.")
    assert expert.act() is None


def test_wins_household_games_by_admissible_commands(plays: list[Trajectory]) -> None:
    assert sum(attempt.success for attempt in plays) > 0.9 * len(plays)
    assert all(turn.valid and turn.action in turn.admissible for attempt in plays for turn in attempt.turns)
    assert all(attempt.reward == 10.0 * attempt.success for attempt in plays)


def test_wins_real_games_by_admissible_commands(env: AlfworldEnv, shared: Path) -> None:
    real = load_tasks(shared / "data" / "alfworld", "train")
    sample = [real[k] for k in np.random.default_rng(0).choice(len(real), 12, replace=False)]
    attempts = [play(env, task, np.random.default_rng(0), slip=0.0)[0] for task in sample]
    assert sum(attempt.success for attempt in attempts) > 0.9 * len(attempts)
    assert all(turn.valid for attempt in attempts for turn in attempt.turns)


def test_play_is_decided_by_its_generator(env: AlfworldEnv, tasks: list[Task], plays: list[Trajectory]) -> None:
    again, _ = play(env, tasks[0], np.random.default_rng(0), slip=0.0)
    assert again.turns == plays[0].turns
    actions = {
        tuple(t.action for t in play(env, tasks[0], np.random.default_rng(k), slip=0.0)[0].turns) for k in range(5)
    }
    assert len(actions) > 1  # plays of one game differ


# Skills


def test_a_skill_of_a_won_game_says_where_things_were(plays: list[Trajectory]) -> None:
    for attempt in (attempt for attempt in plays if attempt.success):
        goal = Goal.parse(attempt.description)
        known, avoid = hints(skill_text(goal, attempt.turns, True))
        taken = [re.fullmatch(r"take (.*) from (.*)", t.action) for t in attempt.turns]
        used = {match[1]: match[2] for match in taken if match and kind_of(match[1]) == goal.wanted}
        lamps = {thing: place for thing, place in known.items() if kind_of(thing) == goal.target}
        assert known == used | lamps
        assert len(used) == (2 if goal.kind == "two" else 1)
        assert len(lamps) == (goal.kind == "look")
        assert not avoid


def test_a_skill_of_a_fruitless_search_says_where_nothing_was() -> None:
    goal = Goal.parse("put a mug in shelf.")
    turns = (
        turn("go to desk 1"),
        turn("go to safe 1", "You arrive at desk 1. On the desk 1, you see a cd 1."),
        turn("open safe 1", "You arrive at safe 1. The safe 1 is closed."),
        turn("go to bed 1", "You open the safe 1. The safe 1 is open. In it, you see nothing."),
    )
    assert hints(skill_text(goal, turns, False)) == ({}, frozenset({"desk 1", "safe 1"}))
    seen = (*turns, turn("look", "You arrive at bed 1. On the bed 1, you see a mug 1."))
    assert hints(skill_text(goal, seen, False)) == ({"mug 1": "bed 1"}, frozenset())
    assert hints(skill_text(goal, turns[:1], False)) == ({}, frozenset())
    assert hints("") == ({}, frozenset())


def test_a_skill_saves_turns_and_a_false_one_costs_them(
    env: AlfworldEnv, tasks: list[Task], plays: list[Trajectory]
) -> None:
    lengths = []
    for k, (task, attempt) in enumerate(zip(tasks, plays, strict=True)):
        if not attempt.success:
            continue
        goal = Goal.parse(task.description)
        skill = skill_text(goal, attempt.turns, True)
        false = f"No {goal.wanted} in {', '.join(sorted(set(hints(skill)[0].values())))}."  # the right places, last
        told, blind, misled = (
            play(env, task, np.random.default_rng(100 + k), text, slip=0.0)[0] for text in (skill, "", false)
        )
        assert (told.success, told.skill, blind.skill) == (True, skill, None)
        lengths.append([len(told.turns), len(blind.turns), len(misled.turns)])
    mean = np.mean(lengths, axis=0)
    assert mean[0] <= mean[1] <= mean[2]
    assert mean[0] < mean[2]


# Examples


@pytest.mark.parametrize("slip", [0.0, 0.3, 1.0])
def test_unscored_replies_are_exactly_the_slips(env: AlfworldEnv, tasks: list[Task], slip: float) -> None:
    for task in tasks[:3]:
        rng = RecordingGenerator(np.random.PCG64(1))
        rng.draws = []
        attempt, own = play(env, task, rng, slip=slip)
        assert own == tuple(draw >= slip for draw in rng.draws)
        assert len(own) == len(attempt.turns) <= MAX_TURNS
        example = acting(attempt, own)
        assert example.scored == own
        replies = [m.content for m in example.messages if m.role == "assistant"]
        assert replies == [t.response for t in attempt.turns]
        assert [render.parse_reply(reply)[1] for reply in replies] == [t.action for t in attempt.turns]


def test_an_acting_example_is_the_chat_the_policy_meets(env: AlfworldEnv, tasks: list[Task]) -> None:
    attempt, own = play(env, tasks[0], np.random.default_rng(0), "a mug 1 in desk 1. Go there first.", slip=0.0)
    example = acting(attempt, own)
    first = attempt.turns[0].observation
    assert example.kind == "act_with_skill"
    assert example.messages[0] == render.task_messages(tasks[0].description, first, None, attempt.skill)[0]
    assert [m.role for m in example.messages] == ["user", "assistant"] * len(attempt.turns)
    assert example.messages[2] == render.observation_message(attempt.turns[1].observation, None)
    assert acting(play(env, tasks[0], np.random.default_rng(0), slip=0.0)[0], own).kind == "act"


def test_a_careless_player_overlooks_goes_round_again_and_fails(env: AlfworldEnv, tasks: list[Task]) -> None:
    for task in tasks:
        attempt, _ = play(env, task, np.random.default_rng(0), slip=0.0, overlook=1.0)
        assert (attempt.success, len(attempt.turns)) == (False, MAX_TURNS)
    shown = "On the desk 1, you see a mug 2, a mugcake 1, and a desklamp 1."
    look, put = Goal.parse("examine the mug with the desklamp."), Goal.parse("put a mug in desk.")
    assert [kind_of(t) for t in things(overlooked(shown, put))] == ["thing", "mugcake", "desklamp"]
    assert [kind_of(t) for t in things(overlooked(shown, look))] == ["thing", "mugcake", "thing"]
    assert contents(overlooked(shown, put)).keys() == {"desk 1"}, "the place is still read"


def test_a_failed_attempt_tells_the_latest_find_at_the_place_where_it_was_first(tasks: list[Task]) -> None:
    def turn(observation: str, action: str, valid: bool = True) -> Turn:
        return Turn(observation, (), "", action, valid)

    turns = (
        turn("", "go to shelf 1"),
        turn("On the shelf 1, you see a mug 1.", "go to desk 1"),
        turn("On the desk 1, you see a mug 2.", "take mug 3 from desk 1", False),  # never there
        turn("Nothing happens.", "go to shelf 1"),
        turn("On the shelf 1, you see a mug 2, and a mug 1.", ""),
    )
    assert skill_text(Goal("place", "mug", "safe"), turns, False) == "a mug 2 in desk 1. Go there first."
    assert skill_text(Goal("two", "mug", "safe"), turns, False).startswith("a mug 2 in desk 1 and a mug 1 in shelf 1.")
    taken = (*turns[:4], turn("On the shelf 1, you see a mug 2, and a mug 1.", "take mug 1 from shelf 1"))
    assert skill_text(Goal("place", "mug", "safe"), taken, False) == "a mug 1 in shelf 1. Go there first."
    assert skill_text(Goal("place", "cup", "safe"), turns, False) == (
        "No cup in shelf 1, desk 1. Search other places first."
    )


def test_a_writing_example_answers_the_hindsight_prompt(plays: list[Trajectory]) -> None:
    for attempt in (plays[0], truncated(plays[0], 2)):
        example = writing(attempt)
        prompt, answer = example.messages
        assert prompt.content.endswith(CUE)
        assert f"Outcome: {'success' if attempt.success else 'failure'}" in prompt.content
        goal = Goal.parse(attempt.description)
        assert parse_skill(answer.content) == skill_text(goal, attempt.turns, attempt.success)
        assert example.scored == (True,)
    assert (truncated(plays[0], 2).success, truncated(plays[0], 2).reward) == (False, 0.0)


def test_examples_of_a_game_are_repeatable_and_of_three_kinds(env: AlfworldEnv, tasks: list[Task]) -> None:
    examples = examples_of(env, tasks[1], 0, 2)
    assert examples == examples_of(env, tasks[1], 0, 2)
    assert examples != examples_of(env, tasks[1], 1, 2)
    assert {example.kind for example in examples} == {"act", "act_with_skill", "write"}
    assert all(len(e.scored) == sum(m.role == "assistant" for m in e.messages) for e in examples)
    assert all(examples[0].scored)  # the first play of a game is never led astray


def test_the_corpus_is_the_same_from_worker_processes(env: AlfworldEnv, folder: Path, tasks: list[Task]) -> None:
    corpus = make_corpus([folder], seed=0, plays=1, workers=2)
    assert corpus == [example for task in tasks for example in examples_of(env, task, 0, 1)]


# Other names for the same things


def test_renaming_is_a_permutation_that_keeps_tools_and_lamps() -> None:
    table = rooms()
    things = sorted(name.lower() for name in table["pickupable"])
    receptacles = sorted(name.lower() for name in table["holds"])
    kept = {"fridge", "microwave", "sinkbasin", "desklamp"}
    for places in (False, True):
        words = [*things, *receptacles, "desklamp"]
        (out,) = renamed((Message("user", " ".join(words)),), np.random.default_rng(2), places)
        swap = dict(zip(words, out.content.split(), strict=True))
        assert sorted(swap[thing] for thing in things) == things
        assert sorted(swap[place] for place in receptacles) == receptacles
        assert all(swap[word] == word for word in kept)
        assert sum(swap[thing] != thing for thing in things) > len(things) / 2
        assert any(swap[place] != place for place in receptacles) == places


def test_renaming_keeps_everything_but_the_names_and_can_be_undone() -> None:
    chat = (
        Message("user", "Task: put a clean mug in shelf.\nYou see a shelf 2, a mug 11, a fridge 1, and a mugger."),
        Message("assistant", "<think>take mug 11</think><action>take mug 11 from shelf 2</action>"),
    )
    out = renamed(chat, np.random.default_rng(3), True)
    assert out == renamed(chat, np.random.default_rng(3), True)
    assert [m.role for m in out] == ["user", "assistant"]
    mug, shelf = re.search(r"put a clean (\w+) in (\w+)", out[0].content).groups()
    assert mug != "mug"
    there = {"mug": mug, "shelf": shelf}
    swapped = [re.sub(r"\b(mug|shelf)\b", lambda match: there[match[0]], m.content) for m in chat]
    assert [m.content for m in out] == swapped
    back = {name: word for word, name in there.items()}
    undone = [re.sub(rf"\b({mug}|{shelf})\b", lambda match: back[match[0]], m.content) for m in out]
    assert undone == [m.content for m in chat]
