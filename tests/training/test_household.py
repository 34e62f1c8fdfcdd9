"""Generated games: decided by their arguments, plausible, posed in ALFWorld's proportions, and won as planned."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare

from training.envs.alfworld import AlfworldEnv
from training.envs.games import game_data, load_tasks, read_record
from training.envs.household import (
    TRAIN_LAYOUTS,
    UNSEEN_LAYOUTS,
    Difficulty,
    game_record,
    generate,
    pddl_problem,
    plan_game,
)
from training.envs.rooms import TREATMENTS, Game, Layout, keyed_generator, make_game, make_layout, pick, rooms
from training.envs.sights import contents

SIZES = {"train": 5, "valid_seen": 2, "valid_unseen": 2}  # more than one worker's share
SPLITS = tuple(SIZES)


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("games") / "one", SIZES, seed=3, workers=1)


@pytest.fixture(scope="module")
def plans() -> list[Game]:
    """Training games as planned, not yet written."""
    return [plan_game("train", index, 11) for index in range(2000)]


@pytest.fixture(scope="module")
def env() -> AlfworldEnv:
    return AlfworldEnv()


# What decides a game


def test_same_arguments_same_bytes_at_one_and_two_workers(games: Path) -> None:
    calls = []
    again = generate(
        games.with_name("two"), SIZES, seed=3, workers=2, progress=lambda done, total: calls.append((done, total))
    )
    names = sorted(path.name for path in games.iterdir())
    assert names == sorted(path.name for path in again.iterdir())  # and nothing partial is left behind
    assert [(games / name).read_bytes() for name in names] == [(again / name).read_bytes() for name in names]
    assert calls == [(done, 9) for done in range(1, 10)]


def test_a_game_depends_on_its_own_arguments_only() -> None:
    alone = plan_game("train", 7, 11)
    assert [plan_game("train", index, 11) for index in range(8)][7] == alone
    others = [plan_game("train", 8, 11), plan_game("train", 7, 12), plan_game("valid_seen", 7, 11)]
    assert alone not in others


def test_the_id_names_the_task_and_the_game() -> None:
    first, second = (game_record(plan_game("train", index, 11), "train") for index in (0, 1))
    kind = first["traj"]["task_type"]
    assert first["task"].startswith(f"{kind}-")
    assert first["trial"] != second["trial"]
    assert first == game_record(plan_game("train", 0, 11), "train")


def test_a_walkthrough_that_does_not_win_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.envs.rooms._without_idle_moves", lambda commands: commands[:-1])
    with pytest.raises(RuntimeError, match="walkthrough of household game train/0"):
        generate(tmp_path / "games", {"train": 1, "valid_seen": 0, "valid_unseen": 0}, workers=1)
    assert not (tmp_path / "games" / "games_train.jsonl.xz").exists()


# Splits


def test_splits_share_no_game(games: Path) -> None:
    ids = [task.id for split in SPLITS for task in load_tasks(games, split)]
    assert len(ids) == len(set(ids)) == sum(SIZES.values())
    assert [task.split for split in SPLITS for task in load_tasks(games, split)] == [
        s for s in SPLITS for _ in range(SIZES[s])
    ]


def test_seen_rooms_return_and_unseen_rooms_are_new(plans: list[Game]) -> None:
    layouts = {split: {plan_game(split, index, 11).layout for index in range(400)} for split in SPLITS}
    layouts["train"] = {game.layout for game in plans}
    identity = {split: {(layout.room, layout.id) for layout in found} for split, found in layouts.items()}
    assert all(id < TRAIN_LAYOUTS for split in ("train", "valid_seen") for _, id in identity[split])
    assert all(TRAIN_LAYOUTS <= id < TRAIN_LAYOUTS + UNSEEN_LAYOUTS for _, id in identity["valid_unseen"])
    # the same room of the same number has the same receptacles in either split
    assert len(layouts["train"] | layouts["valid_seen"]) == len(identity["train"] | identity["valid_seen"])
    assert len(identity["valid_seen"] & identity["train"]) > 0.9 * len(identity["valid_seen"])


# Proportions


def test_six_kinds_of_task_in_alfworlds_proportions(plans: list[Game]) -> None:
    weights = rooms()["tasks"]
    counts = Counter(game.task_type for game in plans)
    assert set(counts) == set(weights)
    expected = [len(plans) * weight / sum(weights.values()) for weight in weights.values()]
    assert chisquare([counts[kind] for kind in weights], expected).pvalue > 0.01
    assert chisquare([counts[kind] for kind in weights], [len(plans) / 6] * 6).pvalue < 1e-6  # the test can tell


def test_the_weights_are_those_of_the_real_training_games(shared: Path) -> None:
    real = Counter(task.task_type for task in load_tasks(shared / "data" / "alfworld", "train"))
    assert real == rooms()["tasks"]


def test_pick_follows_the_weights() -> None:
    rng = keyed_generator("pick")
    counts = Counter(pick(rng, {"a": 1, "b": 3, "c": 0}) for _ in range(4000))
    assert counts["c"] == 0
    assert chisquare([counts["a"], counts["b"]], [1000, 3000]).pvalue > 0.01


# What is plausible


def test_every_planned_game_is_plausible(plans: list[Game]) -> None:
    table = rooms()
    for game in plans[:500]:
        present, room = dict(game.layout.receptacles), table["rooms"][game.layout.room]
        assert set(present) <= set(room["receptacles"])
        assert game.layout.room in table["task_rooms"][game.task_type]
        for kind, _, spot, index in game.places:
            assert 1 <= index <= present[spot]
            assert kind in table["holds"].get(spot, ()) or (kind == "DeskLamp" and spot in table["places"][kind])
        placed = [spot for kind, _, spot, _ in game.places if kind == game.wanted]
        assert placed
        assert game.target not in placed  # nothing is half done
        treatment = TREATMENTS.get(game.task_type)
        assert game.wanted in table[treatment.able if treatment else "pickupable"]
        if treatment:
            assert treatment.tool in present
        if game.task_type == "pick_two_obj_and_place":
            assert len(placed) >= 2
        if game.task_type == "look_at_obj_in_light":
            assert any(kind == "DeskLamp" for kind, *_ in game.places)
        else:
            assert game.wanted in table["holds"][game.target]


def test_a_room_that_cannot_pose_a_task_says_so() -> None:
    bare = Layout(0, "bathroom", (("Toilet", 1),))
    assert make_game(bare, "pick_heat_then_place_in_recep", keyed_generator(0)) is None


def test_facts_of_the_problem_agree_with_the_table(plans: list[Game]) -> None:
    table = rooms()
    for game in plans[:60]:
        problem = pddl_problem(game)
        facts = [line.strip()[1:-1].split() for line in problem.split("(:init")[1].split("(:goal")[0].splitlines()]
        facts = [fact for fact in facts if fact]
        by_name: dict[str, list[tuple[str, ...]]] = {}
        for name, *rest in facts:
            by_name.setdefault(name, []).append(tuple(rest))
        types = {
            entity: kind.removesuffix("Type") for entity, kind in by_name["objectType"] + by_name["receptacleType"]
        }
        where = dict(by_name["receptacleAtLocation"])
        assert len(set(where.values())) == len(where)  # a place of its own for each
        held = by_name["inReceptacle"]
        assert Counter((types[o], types[r]) for o, r in held) == Counter(
            (kind, spot) for kind, _, spot, _ in game.places
        )
        assert dict(by_name["objectAtLocation"]) == {o: where[r] for o, r in held}
        for receptacle, kind in by_name["canContain"]:
            assert kind.removesuffix("Type") in table["holds"][receptacle.removesuffix("Type")]
        for name in ("pickupable", "cleanable", "heatable", "coolable", "openable"):
            for (entity,) in by_name.get(name, ()):
                assert types[entity] in table[name]
        declared = {w for line in problem.split("(:init")[0].splitlines() for w in line.split()[:1]}
        assert {term for fact in facts for term in fact[1:]} <= declared


# Difficulty, in both directions


@pytest.mark.parametrize("room", ["kitchen", "bedroom", "living room", "bathroom"])
def test_size_scales_the_receptacles(room: str) -> None:
    def total(size: float) -> int:
        return sum(n for id in range(60) for _, n in make_layout(id, room, 11, size).receptacles)

    usual = total(1.0)
    assert total(0.5) < 0.8 * usual
    assert total(2.0) == 2 * usual
    kinds = [{kind for kind, _ in make_layout(4, room, 11, size).receptacles} for size in (0.5, 1.0, 2.0)]
    assert kinds[0] == kinds[1] == kinds[2]  # as many kinds, in other numbers


def test_hidden_decides_whether_wanted_objects_start_behind_doors() -> None:
    table = rooms()

    def closed_share(hidden: float | None) -> float:
        """Share of wanted objects in closed receptacles, where both kinds of place are usual for them."""
        found = []
        for index in range(300):
            game = plan_game("train", index, 11, Difficulty(hidden=hidden))
            present = dict(game.layout.receptacles)
            holders = {r for r in table["places"][game.wanted] if r in present and r != game.target}
            usual = {r for r in holders if game.wanted in table["holds"].get(r, ())}
            if 0 < len(usual & set(table["openable"])) < len(usual):
                found += [spot in table["openable"] for kind, _, spot, _ in game.places if kind == game.wanted]
        assert len(found) > 100
        return sum(found) / len(found)

    assert closed_share(1.0) == 1.0
    assert closed_share(0.0) == 0.0
    assert 0.05 < closed_share(None) < 0.95
    assert 0.35 < closed_share(0.5) < 0.65


# On the real engine


def test_walkthroughs_are_admissible_and_win_with_the_last_command_only(games: Path, env: AlfworldEnv) -> None:
    for split in SPLITS:
        for task in load_tasks(games, split):
            step = env.reset(task)
            assert not step.won  # the goal does not hold at the start
            assert f"Your task is to: {task.description}" in step.observation
            walkthrough = read_record(task)["walkthrough"]
            for command in walkthrough:
                assert not step.won
                assert command in step.admissible, (task.id, command)
                step = env.step(command)
            assert step.won
            assert step.reward == 10.0


def test_the_engine_names_things_as_planned(games: Path, env: AlfworldEnv) -> None:
    game: Any = plan_game("train", 0, 3)
    step = env.reset_game(game_data(game_record(game, "train"), games))
    places = [f"{kind.lower()} {n}" for kind, count in game.layout.receptacles for n in range(1, count + 1)]
    assert sorted(re.findall(r"\ban? ([a-z]+ \d+)", step.observation)) == sorted(places)
    env.max_turns = 10 * len(places)
    found = set()
    for place in places:
        step = env.step(f"go to {place}")
        if f"open {place}" in step.admissible:
            step = env.step(f"open {place}")
        found |= {(thing, place) for thing in contents(step.observation)[place]}
    assert found == {(f"{kind.lower()} {n}", f"{spot.lower()} {i}") for kind, n, spot, i in game.places}
