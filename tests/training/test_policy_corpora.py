"""What the tiny policies of Search-QA and WebShop imitate: valid play of their environments, and skills that help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnostics import render
from diagnostics.records import Message
from training.envs.base import Task
from training.envs.fact_world import parts
from training.envs.questions import PASSAGES, load_questions
from training.envs.search_folders import fact_world_folder
from training.envs.search_qa import SearchQAEnv
from training.envs.webshop.env import WebShopEnv
from training.envs.webshop.folders import generated_shop
from training.envs.webshop.shop import load_tasks
from training.models import search_corpus, shop_corpus
from training.models.corpus import Example, texts
from training.models.policies import POLICIES
from training.models.tiny import Lessons, encode_example, make_tokenizer
from training.skills.hindsight import CUE, parse_skill

TASKS = 24


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Task]]:
    folder = fact_world_folder(tmp_path_factory.mktemp("search") / "world", {"train": 128}, seed=5)
    tasks = load_questions(folder, "train")
    return SearchQAEnv(str(folder / PASSAGES)), [tasks[i] for i in range(0, 128, 128 // TASKS)]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Task]]:
    folder = generated_shop(tmp_path_factory.mktemp("shop") / "shop", 420, seed=5)
    return WebShopEnv(shop_corpus.MAX_TURNS, shop_corpus.PRODUCTS), load_tasks(folder, "train")[:TASKS]


@pytest.fixture(params=["tiny-search", "tiny-webshop"])
def taught(request: pytest.FixtureRequest) -> tuple[Any, Any, list[Task], Lessons]:
    """(corpus module, environment, tasks, lessons) of both policies."""
    search = request.param == "tiny-search"
    env, tasks = request.getfixturevalue("search" if search else "shop")
    return search_corpus if search else shop_corpus, env, tasks, POLICIES[request.param][1]


def examples(corpus: Any, env: Any, tasks: Sequence[Task]) -> list[Example]:
    return [example for task in tasks for example in corpus.examples_of(env, task, 0, 1)]


def replies(example: Example) -> list[str]:
    return [message.content for message in example.messages if message.role == "assistant"]


# Play


@pytest.mark.parametrize("haste", [0.0, 0.5, 1.0])
def test_every_reply_is_a_thought_and_a_command_of_the_environment(taught: Any, haste: float) -> None:
    corpus, env, tasks, _ = taught
    for number, task in enumerate(tasks):
        attempt = corpus.play(env, task, np.random.default_rng(number), haste=haste)
        for turn in attempt.turns:
            thought, command = render.parse_reply(turn.response)
            assert thought and command and command == turn.action and render.admits(turn.admissible, command)
        assert attempt.success == (attempt.reward == 10.0) and len(attempt.turns) <= env.max_turns


def test_care_pays_and_haste_costs(taught: Any) -> None:
    corpus, env, tasks, _ = taught
    rates = [
        np.mean([corpus.play(env, task, np.random.default_rng(k), haste=haste).success for k, task in enumerate(tasks)])
        for haste in (0.0, 0.4, 1.0)
    ]
    assert rates[0] > rates[1] > rates[2]
    assert rates[0] >= 0.5 and rates[2] <= 0.2


def test_play_is_decided_by_its_generator(taught: Any) -> None:
    corpus, env, tasks, _ = taught
    assert examples(corpus, env, tasks[:3]) == examples(corpus, env, tasks[:3])
    assert examples(corpus, env, tasks[:3]) != [e for t in tasks[:3] for e in corpus.examples_of(env, t, 1, 1)]


# Skills


def test_a_skill_from_an_attempt_helps_the_next_one(taught: Any) -> None:
    corpus, env, tasks, _ = taught
    before, after = [], []
    for number, task in enumerate(tasks):
        attempt = corpus.play(env, task, np.random.default_rng(number))
        skill = parse_skill(replies(corpus.writing(attempt))[0])
        again = corpus.play(env, task, np.random.default_rng(number), skill, haste=0.0)
        assert again.skill == skill and attempt.skill is None
        before.append(attempt.success)
        after.append(again.success)
        if attempt.success:
            assert again.success and len(again.turns) <= len(attempt.turns)
    assert np.mean(after) > np.mean(before)


def test_a_writing_example_answers_the_hindsight_prompt(taught: Any) -> None:
    corpus, env, tasks, _ = taught
    attempt = corpus.play(env, tasks[0], np.random.default_rng(0))
    prompt, answer = corpus.writing(attempt).messages
    assert (
        prompt.content.endswith(CUE) and f"Outcome: {'success' if attempt.success else 'failure'} (" in prompt.content
    )
    assert parse_skill(answer.content)


def test_a_fact_of_a_skill_is_not_searched_for_again(search: Any) -> None:
    env, tasks = search
    for task in tasks:
        told = search_corpus.play(env, task, np.random.default_rng(0), haste=0.0)
        skill = parse_skill(replies(search_corpus.writing(told))[0]) or ""
        again = search_corpus.play(env, task, np.random.default_rng(0), skill, haste=0.0)
        assert told.success and [turn.action[:8] for turn in again.turns] == ["<answer>"]
        assert search_corpus.facts(skill) and skill.endswith(f"Answer {again.turns[-1].action[8:-9]}.")


def test_a_hasty_answer_stands_in_the_passages_and_is_wrong(search: Any) -> None:
    env, tasks = search
    rng, found = np.random.default_rng(0), 0
    for task in tasks:
        env.reset(task)
        assert search_corpus.hasty_move(task.description, [], rng) is None
        subject = search_corpus.expert_move(task.description, []).action
        seen = env.step(subject).observation
        move = search_corpus.hasty_move(task.description, [seen], rng)
        if move is not None:
            answer = move.action.removeprefix("<answer>").removesuffix("</answer>")
            assert answer in seen and not env.step(move.action).won
            found += 1
    assert found >= TASKS / 2


# Other names, and tokens


def test_renamed_play_is_still_play(taught: Any) -> None:
    """What was copied from the context is still there to be copied."""
    corpus, env, tasks, lessons = taught
    rng = np.random.default_rng(0)
    for example in examples(corpus, env, tasks[:6]):
        other = lessons.renamed(example.messages, rng, False)
        assert other != example.messages and [m.role for m in other] == [m.role for m in example.messages]
        for before, after in zip(example.messages, other, strict=True):
            assert re.sub(r"\w+", "", before.content) == re.sub(r"\w+", "", after.content)
        copied = r"B0[0-9A-Z]{8}" if corpus is shop_corpus else r"(?<=<answer> )[^<]*"
        seen = ""
        for message in other:
            for name in re.findall(copied, message.content) if message.role == "assistant" else ():
                assert name in seen
            seen += message.content


def test_names_are_permuted_within_their_kind() -> None:
    kinds = search_corpus.names()
    text = " ".join(name for kind in kinds for name in kind)
    (out,) = search_corpus.renamed((Message("user", text),), np.random.default_rng(1), True)
    words = out.content.split()
    for kind in kinds:
        got, words = words[: len(kind)], words[len(kind) :]
        assert sorted(got) == sorted(kind) and got != list(kind)
    assert len({name for kind in kinds for name in kind}) == sum(map(len, kinds))
    assert set(parts()["first"]) == set(kinds[0])


def test_words_that_are_copied_are_the_same_tokens_everywhere(taught: Any) -> None:
    corpus, env, tasks, lessons = taught
    made = examples(corpus, env, tasks)
    tokenizer = make_tokenizer(list(texts(made)), 1024, lessons)
    if corpus is search_corpus:
        assert [piece for piece in search_corpus.pieces() if len(tokenizer.tokenize(piece)) != 1] == []
        assert tokenizer.tokenize("<search> Ada Bardan born</search>")[:4] == ["<search>", " Ada", " Bar", "dan"]
        whole = {name for kind in search_corpus.names()[:3] for name in kind}
        lengths = {name: len(tokenizer.tokenize(f" {name}")) for kind in search_corpus.names()[:-1] for name in kind}
        begun = {"Rosavia", "Maravia"}  # with a first name
        assert lengths == {name: 1 if name in whole else 3 if name in begun else 2 for name in lengths}
    else:
        shown, clicked = (tokenizer.tokenize(t) for t in ("a [SEP] B0SILVSHO1 [SEP] Silvane", "click[B0SILVSHO1]"))
        assert clicked == ["click[", *(parts := ["B0", "SILV", "SHO", "1"]), "]"]
        assert shown[2:-2] == ["\u0120", *parts] and shown[-1] == "\u0120Silvane"
    text = "".join(texts(made))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_loss_lies_on_the_replies(taught: Any) -> None:
    corpus, env, tasks, lessons = taught
    recipe = replace(POLICIES["tiny"][0], max_tokens=4096)
    made = examples(corpus, env, tasks[:4])
    tokenizer = make_tokenizer(list(texts(made)), 1024, lessons)
    for example in made:
        ids, weight = encode_example(tokenizer, example.messages, example.scored, recipe)
        scored = tokenizer.decode(ids[weight == 1.0])
        assert scored == "".join(f"{reply}<|im_end|>" for reply in replies(example))
        assert set(np.unique(weight)) == {1.0, np.float32(recipe.observation_weight)}
        prompt = render.prompt_ids(tokenizer, example.messages[:1])
        assert prompt == ids[: len(prompt)].tolist()


@pytest.mark.parametrize("name", ["tiny-search", "tiny-webshop"])
def test_a_corpus_is_of_a_world_that_no_run_uses(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path))
    recipe, lessons = POLICIES[name]
    stages: list[tuple[Any, ...]] = []
    corpus = lessons.corpus(replace(recipe, games=2, plays=1), tmp_path, lambda *given: stages.append(given[:3]))
    assert [e.kind for e in corpus] == ["act", "write", "act_with_skill"] * 2
    assert stages == [("expert play", 1, 2), ("expert play", 2, 2)]
    assert recipe.games_seed != 0
