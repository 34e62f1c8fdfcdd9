"""Which skills a task gets: by table, by hand-made scores, and from saved state."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from training.skills.library import load_library
from training.skills.retrieval import Retrieved, Retriever
from training.skills.schema import Library, Rule

HEAT = "pick_heat_then_place_in_recep"
LIBRARY = Library(
    general=(Rule("g", "Look", "Look around."),),
    sections={name: (Rule(name, name, f"Do {name}."),) for name in ("cool", "heat", "clean")},
    task_to_skill={HEAT: "heat"},
    keywords={"cool": ("cool",), "heat": ("hot", "heat")},
)
GENERAL = LIBRARY.text()


@pytest.mark.parametrize(
    ("kind", "sentence", "section"),
    [
        (HEAT, "", "heat"),
        (HEAT, "put a cool mug in cabinet.", "heat"),  # the type is known: the sentence does not matter
        ("clean", "", "clean"),
        ("pick_cool_then_place_in_recep", "", "cool"),
        (None, "heat some mug and put it in cabinet.", "heat"),
        ("", "put a cool mug in cabinet.", "cool"),
        (None, "", None),
        (None, "None", None),
        (None, "the hotel", None),  # no whole word
        ("slice", "put a hot mug in cabinet.", None),  # a type the library does not know
    ],
)
def test_keyword(kind: str | None, sentence: str, section: str | None) -> None:
    found = Retriever(LIBRARY).retrieve(kind, sentence, ("t",))
    ids = ("g",) if section is None else ("g", section)
    text = GENERAL if section is None else LIBRARY.text(section)
    assert found == Retrieved(text, ids, section is not None, section)


def test_a_heat_task_no_task_and_an_unknown_one() -> None:  # case B35
    retriever = Retriever(load_library("household"))
    heat = retriever.retrieve(HEAT, "heat some mug and put it in cabinet.", ("a",))
    assert heat.hit and "heat X with Y" in heat.text and heat.section == "heat"
    nothing, unknown = retriever.retrieve(None, "", ("b",)), retriever.retrieve("slice_it", "slice a mug", ("c",))
    for found in (nothing, unknown):
        assert not found.hit and "heat X with Y" not in found.text and "take X from Y" in found.text
        assert "None" not in found.text and "slice" not in found.text
    retriever.retrieve(HEAT, "", ("d",))
    assert retriever.hit_table() == [
        {"task_type": "", "tasks": 1, "own": 0, "other": 0, "general": 1},
        {"task_type": HEAT, "tasks": 2, "own": 2, "other": 0, "general": 0},
        {"task_type": "slice_it", "tasks": 1, "own": 0, "other": 0, "general": 1},
    ]


def test_full_and_none() -> None:
    full = Retriever(LIBRARY, "full").retrieve(HEAT, "", ("t",))
    assert full.skill_ids == ("g", "cool", "heat", "clean") and full.hit and full.section is None
    household = load_library("household")
    assert "Mistakes to avoid:" in Retriever(household, "full").retrieve(None, "", ("t",)).text
    retriever = Retriever(LIBRARY, "none")
    assert retriever.retrieve(HEAT, "", ("t",)) == Retrieved("", (), False)
    assert retriever.hit_table()[0]["own"] == 0


def test_random_depends_on_seed_and_key_only() -> None:
    keys = [("task", k) for k in range(300)]
    drawn = {key: Retriever(LIBRARY, "random", 1).retrieve(HEAT, "", key).section for key in keys}
    one = Retriever(LIBRARY, "random", 1)
    assert {key: one.retrieve("clean", "", key).section for key in reversed(keys)} == drawn
    assert [Retriever(LIBRARY, "random", 2).retrieve(HEAT, "", key).section for key in keys] != list(drawn.values())
    counts = Counter(drawn.values())
    assert set(counts) == set(LIBRARY.sections) and min(counts.values()) > 70  # of 100 expected, sd 8
    row = one.hit_table()[0]
    assert (row["own"], row["other"], row["general"]) == (counts["clean"], 300 - counts["clean"], 0)


# --- ucb


def rewarded(retriever: Retriever, section: str, rewards: list[float], kind: str | None = HEAT) -> None:
    for reward in rewards:
        retriever.observe(Retrieved("", (), False, section), kind, reward)


def test_ucb_begins_with_the_own_section_then_the_librarys_order() -> None:
    retriever, tried = Retriever(LIBRARY, "ucb"), []
    for k in range(3):
        found = retriever.retrieve(HEAT, "", (k,))
        assert found.section is not None and found == retriever.retrieve(
            HEAT, "", ("again", k)
        )  # reading learns nothing
        tried.append(found.section)
        retriever.observe(found, HEAT, 1.0)
    assert tried == ["heat", "cool", "clean"]


def test_ucb_scores_by_hand() -> None:
    # N = 7: heat 0.5 + sqrt(ln 7 / 4) = 1.1975, cool 0 + sqrt(ln 7 / 1) = 1.3950, clean 1 + sqrt(ln 7 / 2) = 1.9864
    rewards = {"heat": [1.0, 0.0, 1.0, 0.0], "cool": [0.0], "clean": [1.0, 1.0]}

    def best(c: float) -> str | None:
        retriever = Retriever(LIBRARY, "ucb", c=c)
        for section, values in rewards.items():
            rewarded(retriever, section, values)
        scores = {s: sum(r) / len(r) + c * math.sqrt(math.log(7) / len(r)) for s, r in rewards.items()}
        found = retriever.retrieve(HEAT, "", ("t",)).section
        assert found == max(scores, key=lambda s: scores[s])
        return found

    assert (best(0.0), best(1.0), best(10.0)) == ("clean", "clean", "cool")


def test_ucb_learns_each_task_type_apart() -> None:
    retriever = Retriever(LIBRARY, "ucb")
    for section in LIBRARY.sections:
        rewarded(retriever, section, [float(section == "cool")])
    assert retriever.retrieve(HEAT, "", ("t",)).section == "cool"
    assert retriever.retrieve("clean", "", ("t",)).section == "clean"  # nothing seen yet
    assert retriever.retrieve(None, "a hot mug", ("t",)).section == "heat"


def share_of_best(retriever: Retriever, chance: Callable[[str], float], tasks: int = 400) -> float:
    rng, best = np.random.default_rng(0), 0
    for k in range(tasks):
        found = retriever.retrieve(HEAT, "", (k,))
        assert found.section is not None
        best += found.section == "clean" and k >= tasks // 2
        retriever.observe(found, HEAT, float(rng.random() < chance(found.section)))
    return best / (tasks // 2)


def test_ucb_finds_the_better_section_and_random_does_not() -> None:
    def chance(section: str) -> float:
        return 0.9 if section == "clean" else 0.2

    assert share_of_best(Retriever(LIBRARY, "ucb"), chance) > 0.85
    assert 0.2 < share_of_best(Retriever(LIBRARY, "random"), chance) < 0.47
    assert share_of_best(Retriever(LIBRARY, "ucb"), lambda section: 0.5) < 0.6  # nothing to find


def test_a_resumed_retriever_goes_on_as_the_first_would() -> None:
    rng = np.random.default_rng(1)
    first = Retriever(LIBRARY, "ucb")

    def play(retriever: Retriever, rewards: list[float]) -> list[str | None]:
        chosen = []
        for k, reward in enumerate(rewards):
            kind = (HEAT, "clean", None)[k % 3]
            found = retriever.retrieve(kind, "a hot mug", (k,))
            retriever.observe(found, kind, reward)
            chosen.append(found.section)
        return chosen

    play(first, rng.random(40).tolist())
    saved = json.dumps(first.state())
    second = Retriever(LIBRARY, "ucb")
    second.restore(json.loads(saved))
    rewards = rng.random(40).tolist()
    assert play(first, rewards) == play(second, rewards) and first.state() == second.state()
    assert first.hit_table() == second.hit_table() and sum(row["tasks"] for row in first.hit_table()) == 80
    assert play(Retriever(LIBRARY, "ucb"), rewards) != play(second, rewards)


def test_only_ucb_learns() -> None:
    retriever = Retriever(LIBRARY, "keyword")
    before = json.dumps(retriever.state())
    retriever.observe(Retrieved("", (), True, "heat"), HEAT, 1.0)
    assert json.dumps(retriever.state()) == before


def test_state_of_another_library_is_refused() -> None:
    with pytest.raises(ValueError, match="the section 'slice', which this library does not have"):
        Retriever(LIBRARY, "ucb").restore({"rewards": {HEAT: {"slice": [1, 1.0]}}, "counts": {}})
