"""The shop to play in: pages, what an action does, who scores what, and that nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from diagnostics.artifact import load_trajectories, save_trajectories
from diagnostics.records import Trajectory
from diagnostics.render import admits, parse_reply
from tests.training.clockwork import ScriptedSampler
from tests.training.shoppers import Player, at_random, expert, oracle, play, play_pool
from tests.training.test_webshop_shop import ENTRY, record, write
from training.config import Config, EnvConfig
from training.envs.base import EnvError, Step, Task
from training.envs.kinds import KINDS
from training.envs.pool import EnvPool
from training.envs.webshop.env import WebShopEnv
from training.envs.webshop.folders import generated_shop
from training.envs.webshop.pages import Place, command, follow
from training.envs.webshop.shop import build, load_tasks, open_shop
from training.models.shopper import Request
from training.rollout import Start, rollout
from training.skills.hindsight import hindsight_messages, serialise
from training.skills.library import load_library
from training.skills.retrieval import Retriever
from training.skills.step_level import numbered_record

INDEX = "search[<your query>]"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_shop(tmp_path_factory.mktemp("webshop") / "shop")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 shirts, the last one the dearest, and one product that is no shirt."""
    folder = tmp_path_factory.mktemp("small")
    records = [record(f"B00000000{n:X}", pricing=f"${10 + n}.50") for n in range(12)]
    records.append(record("B0000000ZZ", name="Oak Table", query="tables", product_category="Home › Tables › Oak"))
    build(write(folder / "files", records, {r["asin"]: ENTRY for r in records}), folder / "shop")
    return folder / "shop"


def task(folder: Path, number: int = 0) -> Task:
    goal = open_shop(folder).goal(number)
    return Task(f"goal_{number}/{goal.asin}", "webshop", "test", goal.family, goal.instruction, f"{folder}#{number}")


def goal_of(folder: Path, asin: str, options: tuple[str, ...]) -> Task:
    shop = open_shop(folder)
    for number in range(13 * 4):
        goal = shop.goal(number)
        if (goal.asin, goal.options) == (asin, options):
            return task(folder, number)
    raise AssertionError("no such goal")


# Pages


def test_the_way_from_the_index_to_a_purchase(small: Path) -> None:
    env = WebShopEnv()
    step = env.reset(goal_of(small, "B000000003", ("black", "m")))
    assert step == Step("Search", (INDEX,), score=0.0, outcome="nothing was bought")

    step = env.step("search[Shirt B000000003]")
    pieces = step.observation.split(" [SEP] ")
    assert pieces[:6] == [
        "Back to Search",
        "Page 1 (Total results: 12)",
        "Next >",
        "B000000003",
        "Shirt B000000003",
        "$13.5",
    ]
    assert len(pieces) == 3 + 3 * 10
    assert step.admissible[:3] == ("click[back to search]", "click[next >]", "click[b000000003]")
    assert len(step.admissible) == 2 + 10

    step = env.step("click[next >]")
    assert step.observation.startswith("Back to Search [SEP] Page 2 (Total results: 12) [SEP] < Prev [SEP] B0000000")
    assert step.admissible[:2] == ("click[back to search]", "click[< prev]")
    assert len(step.admissible) == 2 + 2
    assert env.step("click[< prev]").observation.split(" [SEP] ") == pieces

    step = env.step("click[b000000003]")
    item = step.observation
    assert item == (
        "Back to Search [SEP] < Prev [SEP] color [SEP] navy | red [SEP] black [SEP] size [SEP] xl [SEP] m [SEP] "
        "Shirt B000000003 [SEP] Price: $13.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] "
        "Attributes [SEP] Buy Now"
    )
    clicks = ("back to search", "< prev", "navy | red", "black", "xl", "m")
    clicks += ("description", "features", "reviews", "attributes", "buy now")
    assert step.admissible == tuple(f"click[{name}]" for name in clicks)

    for part, text in (
        ("description", " [SEP] Soft."),
        ("features", " [SEP] Washable. [SEP] Warm."),
        ("reviews", ""),
        ("attributes", " [SEP] soft [SEP] warm"),
    ):
        step = env.step(f"click[{part}]")
        assert step.observation == f"Back to Search [SEP] < Prev{text}"
        assert step.admissible == ("click[back to search]", "click[< prev]")
        step = env.step("click[< prev]")
        assert step.observation == item

    assert env.step("click[black]").observation == item  # as in the original, a choice is not marked
    assert not env.step("click[m]").done
    step = env.step("click[buy now]")
    assert step.observation == "Thank you for shopping with us!"
    assert (step.admissible, step.reward, step.done, step.won, step.score) == ((), 10.0, True, True, 1.0)
    assert step.outcome == "right kind of product, 1 of 1 attributes, 2 of 2 options, price within the limit"
    with pytest.raises(ValueError, match="call reset before step"):
        env.step("click[< prev]")


def test_the_last_choice_of_an_option_counts_and_another_product_starts_anew(small: Path) -> None:
    env = WebShopEnv()
    game = goal_of(small, "B000000003", ("black", "m"))

    def bought(*clicks: str) -> Step:
        env.reset(game)
        env.step("search[Shirt B000000003]")
        return [env.step(f"click[{name}]") for name in (*clicks, "buy now")][-1]

    assert bought("b000000003", "navy | red", "black", "m").score == 1.0
    assert bought("b000000003", "black", "navy | red", "m").score == 0.75
    assert bought("b000000003", "black", "description", "< prev", "m").score == 1.0  # sub-pages keep the choice
    assert bought("b000000003", "black", "m", "< prev", "b000000003").score == 0.5  # going back does not
    step = bought("b000000003", "m")
    assert (step.reward, step.won, step.done) == (0.0, False, True)  # paid only for a perfect purchase


def test_fifteen_turns(small: Path) -> None:
    env = WebShopEnv()
    env.reset(task(small))
    steps = [env.step("look around") for _ in range(15)]
    assert [step.done for step in steps] == [False] * 14 + [True]
    assert (steps[-1].won, steps[-1].score, steps[-1].outcome) == (False, 0.0, "nothing was bought")


# Actions (case R2)


NOTHING = (
    "search[]",
    "click[]",
    "click[ ]",
    "search",
    "search[shirt",
    "shirt]",
    "",
    "[x]",
    "click[nowhere]",
    "buy now",
)
NOTHING += ("open[x]", "Let me search[shirt]", "click[search]")


@pytest.mark.parametrize("action", NOTHING)
@pytest.mark.parametrize("way", [(), ("search[shirt]",), ("search[shirt]", "click[b000000003]", "click[xl]")])
def test_what_cannot_be_done_changes_nothing_but_the_turn(small: Path, action: str, way: tuple[str, ...]) -> None:
    env = WebShopEnv()
    before = env.reset(task(small))
    for move in way:
        before = env.step(move)
    place = env._place
    assert env.step(action) == before
    assert env._place == place
    assert not admits(before.admissible, action)
    assert follow(place, action, open_shop(small)) is None


def test_a_search_needs_a_search_bar(small: Path) -> None:
    env = WebShopEnv()
    env.reset(task(small))
    before = env.step("search[shirt]")
    assert env.step("search[table]") == before
    assert not admits(before.admissible, "search[table]")
    assert env.step("click[back to search]").admissible == (INDEX,)


def test_brackets_and_letters() -> None:
    assert command("search[a [2 pack] b]") == ("search", "a [2 pack] b")
    assert command(" SEARCH[ two  words ] ") == ("search", "two words")
    assert command("click[Buy Now]") == ("click", "Buy Now")
    assert command("click[]") is None is command("search[ ]") is None


def test_upper_case_targets_match(small: Path) -> None:
    shop = open_shop(small)
    results = follow(Place(), "search[shirt]", shop)
    assert results is not None
    item = follow(results, f"CLICK[{shop.product(results.shown[0]).asin}]", shop)
    assert item is not None
    assert follow(item, "click[XL]", shop) == follow(item, "click[xl]", shop) != item
    assert follow(item, "click[Buy Now]", shop) is not None


def test_every_command_that_is_listed_can_be_given_in_tags_and_done(shop: Path) -> None:
    """What a policy writes is lower-cased with its spaces collapsed; it must still be what is on the page."""
    opened = open_shop(shop)
    places = [Place(), *filter(None, [follow(Place(), "search[women's dress]", opened)])]
    places += [follow(places[1], f"click[{opened.product(row).asin}]", opened) or places[1] for row in places[1].shown]
    env = WebShopEnv()
    env.reset(load_tasks(shop, "test")[0])
    for place in places:
        env._place = place
        for listed in env._step(None).admissible:
            given = listed.replace("<your query>", "Red  Dress")
            _, action = parse_reply(f"<think>x</think><action> {given} </action>")
            assert action is not None
            assert admits(env._step(None).admissible, action)
            assert follow(place, action, opened) is not None


# Players


def scores(folder: Path, player: Callable[[Task], Player], count: int = 200) -> list[float]:
    env = WebShopEnv()
    return [play(env, game, player)[-1].score or 0.0 for game in load_tasks(folder, "eval")[:count]]


def test_the_oracle_scores_one_the_expert_nearly_and_chance_hardly(shop: Path) -> None:
    assert min(scores(shop, oracle)) == 1.0
    assert 0.9 < sum(scores(shop, expert)) / 200 < 1.0
    assert 0.0 < sum(scores(shop, at_random)) / 200 < 0.2


def test_what_the_expert_reads_in_a_sentence() -> None:
    asked = "with color: navy, and size: xl, and price lower than 40.00 dollars"
    request = Request.parse(f"Find me slim fit, quick drying men's flannel shirt {asked}")
    assert (request.limit, request.options) == (40.0, {"color": "navy", "size": "xl"})
    assert request.query == "slim fit, quick drying men's flannel shirt, navy, xl"
    assert "navy" not in request.words and {"slim", "flannel"} <= request.words
    plain = Request.parse("i need a lamp in black")
    assert (plain.limit, plain.options, plain.query) == (float("inf"), {}, "a lamp in black")


@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_at_any_batch_size_and_worker_count(shop: Path, workers: int) -> None:
    """1, 10 and 100 tasks, in waves of 1, 3 and 7 (case B42)."""
    games = load_tasks(shop, "test")[:100]
    env = WebShopEnv()
    alone = [play(env, game, expert)[-1] for game in games]
    with EnvPool(KINDS["webshop"].make_env(EnvConfig(kind="webshop", max_turns=15), None), workers, 60.0) as pool:
        for batch in (1, 3, 7):
            assert play_pool(pool, games[:10], expert, batch) == alone[:10]
        assert play_pool(pool, games[:1], expert, 3) == alone[:1]
        assert play_pool(pool, games, expert, 7) == alone


def test_two_hundred_environments_leave_nothing(shop: Path) -> None:
    """Case B45: threads, files and memory stay flat over 200 environments, opened, played and closed."""
    games = load_tasks(shop, "test")[:40]
    process = psutil.Process()

    def use() -> tuple[int, int, int]:
        gc.collect()
        return process.num_threads(), process.num_fds(), process.memory_info().rss

    readings = []
    for number in range(240):
        env = WebShopEnv()
        play(env, games[number % 40], expert)
        env.close()
        if number in (39, 239):
            readings.append(use())
    (threads, files, before), (*_, after) = readings
    assert readings[1][:2] == (threads, files)
    assert abs(after / before - 1) < 0.05


def test_a_task_whose_shop_is_gone_is_an_error_of_its_own(shop: Path, tmp_path: Path) -> None:
    with EnvPool(partial(WebShopEnv, max_turns=15), workers=1, timeout=60.0) as pool:
        lost = Task("a", "webshop", "test", "other", "x", f"{tmp_path}#0")
        answers = pool.reset({0: lost, 1: load_tasks(shop, "test")[0]})
    assert isinstance(answers[0], EnvError)
    assert "holds no shop" in answers[0].reason
    assert isinstance(answers[1], Step)


# In a rollout


class Local:
    """The pool's interface in this process."""

    def __init__(self) -> None:
        self.envs: dict[int, WebShopEnv] = {}

    def reset(self, tasks: Any) -> Any:
        return {slot: self.envs.setdefault(slot, WebShopEnv()).reset(game) for slot, game in tasks.items()}

    def step(self, actions: Any) -> Any:
        return {slot: self.envs[slot].step(action) for slot, action in actions.items()}


def rolled(game: Task, moves: list[str], **given: Any) -> Trajectory:
    replies = [f"<think>so</think><action>{move}</action>" for move in moves]
    sampler = ScriptedSampler(lambda key: replies[key[-1]])
    limits = {"seed": 0, "max_turns": 15, "max_context": 10**5}
    (played,), _ = rollout(sampler, Local(), [Start(game, 0, 0)], **{**limits, **given})
    return played


GOOD = ["search[Shirt B000000003]", "click[B000000003]", "click[black]", "click[M]", "click[Buy Now]"]


def test_a_trajectory_keeps_the_score_beside_success(small: Path, tmp_path: Path) -> None:
    game = goal_of(small, "B000000003", ("black", "m"))
    won = rolled(game, GOOD)
    assert (won.success, won.reward, won.score, won.stop_reason, won.n_invalid) == (True, 10.0, 1.0, "won", 0)
    part = rolled(game, [*GOOD[:3], "click[nowhere]", "search[]", "click[buy now]"])
    assert (part.success, part.reward, part.score, part.stop_reason, part.n_invalid) == (False, 0.0, 0.75, "done", 2)
    never = rolled(game, ["click[x]"] * 3, max_turns=3)
    assert (never.success, never.score, never.stop_reason, never.n_invalid) == (False, 0.0, "turn_limit", 3)
    save_trajectories(tmp_path / "kept", [part])
    (again,) = load_trajectories(tmp_path / "kept")
    assert (again.score, again.outcome) == (part.score, part.outcome)


def test_the_prompt_has_the_task_the_page_and_its_commands(small: Path) -> None:
    game = goal_of(small, "B000000003", ("black", "m"))
    played = rolled(game, GOOD)
    assert played.segments[0].messages[0].content == (
        f"Task: {game.description}\nSearch\nCommands: search[<your query>]\n"
        "First think briefly inside <think></think>. Then give exactly one of the commands inside <action></action>."
    )


def test_a_long_page_of_the_history_makes_room(small: Path) -> None:
    """Under `windowed` the oldest turns go where a prompt would pass the limit, and no more of them than must."""
    game = goal_of(small, "B000000003", ("black", "m"))

    def prompts(history: int, max_context: int = 10**5) -> list[tuple[int, str]]:
        sampler = ScriptedSampler(lambda key: f"<think>so</think><action>{GOOD[key[-1]]}</action>", protocol="windowed")
        limits = {"seed": 0, "max_turns": 15, "max_context": max_context, "history": history}
        (played,), _ = rollout(sampler, Local(), [Start(game, 0, 0)], **limits)
        assert played.success
        return [(segment.prompt_length, segment.messages[0].content) for segment in played.segments]

    room = max(length for length, _ in prompts(1))
    by_history = [dict(enumerate(prompts(history))) for history in (2, 1, 0)]
    expected = [next(by[turn] for by in by_history if by[turn][0] <= room) for turn in range(len(GOOD))]
    assert prompts(2, room + 64) == expected  # 64: max_new_tokens of the sampler
    assert expected not in (list(by_history[0].values()), list(by_history[1].values()))


def test_a_writer_sees_the_pages_and_how_the_purchase_was_judged(small: Path) -> None:
    game = goal_of(small, "B000000003", ("black", "m"))
    part = rolled(game, [*GOOD[:3], "click[buy now]"])
    text = serialise(part)
    lines = text.splitlines()
    assert lines[1] == (
        "Outcome: failure (right kind of product, 1 of 1 attributes, 1 of 2 options, price within the limit)"
    )
    assert lines[2].startswith("search[shirt b000000003] -> Back to Search [SEP] Page 1 (Total results: 12)")
    assert lines[3].startswith("click[b000000003] -> Back to Search [SEP] < Prev [SEP] color")
    assert lines[-1] == "click[buy now]"
    assert hindsight_messages(part)[0].content.startswith(f"Task: {game.description}\nOutcome: failure (right")
    assert "1. search[shirt b000000003] -> " in numbered_record(part)
    assert all(len(serialise(part, max_chars=n)) <= n for n in (50, 300, 900))


# Skills


def test_each_family_has_skills_of_its_own(shop: Path) -> None:
    library = load_library("webshop")
    retriever = Retriever(library)
    families = {"apparel", "footwear", "home_decor", "electronics", "accessories", "beauty_health", "other"}
    assert set(library.sections) == families
    assert library.general and library.mistakes
    seen = set()
    for game in load_tasks(shop, "test"):
        found = retriever.retrieve(game.task_type, game.description, (game.id,))
        assert found.hit
        assert found.section == game.task_type
        seen.add(game.task_type)
    assert seen == families


def test_the_settings_know_it(shop: Path) -> None:
    config = Config(env=EnvConfig(kind="webshop", data=str(shop), max_turns=15))
    kind = KINDS[config.env.kind]
    assert kind.folder(config.env) == shop
    assert len(kind.tasks(shop, "sdar_valid")) == 128
    assert isinstance(kind.make_env(config.env, None)(), WebShopEnv)
