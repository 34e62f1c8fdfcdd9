from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.trials import by_trial
from diagnostics.artifact import load_artifact, load_skills, load_trajectories
from diagnostics.records import Skill, Trajectory
from tests.diagnostics.tiny import tiny_model
from tests.training.clockwork import GOOD, TASKS, ClockworkPool, ScriptedSampler, task
from training.config import Config, EvalConfig, SkillsConfig
from training.envs.base import EnvError, Step, Task
from training.episodes import latest_episodes, panel_episodes
from training.protocols import MEMORY, experience, insight_skills, library_skills, reflexion
from training.session import Session
from training.skills.insights import Insight, contrasts, insight_messages, retrieve_insights, write_insights
from training.skills.library import load_library

HOUSEHOLD = tuple(
    Task(f"h{i}", "household", "valid_seen", kind, sentence, "won 1")
    for i, (kind, sentence) in enumerate(
        [
            ("pick_heat_then_place_in_recep", "put a hot mug on the desk."),
            ("look_at_obj_in_light", "look at the pen under the lamp."),
            ("a type nobody knows", "do something else."),
        ]
    )
)


@dataclass
class Stubborn(ClockworkPool):
    """A task whose ending is "won 2 1" is lost the first time it is played."""

    played: Counter[str] = field(default_factory=Counter)

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step | EnvError]:
        return super().reset({slot: self.resolved(task) for slot, task in tasks.items()})

    def resolved(self, task: Task) -> Task:
        kind, last, losses = [*task.source.split(), "0"][:3]
        self.played[task.id] += 1
        lost = kind == "won" and self.played[task.id] <= int(losses)
        return replace(task, source=f"{'lost' if lost else kind} {last}")


class Played(Session):
    """A session whose games are clockwork and whose policy reads a script."""

    def __init__(self, panel: Sequence[Task], train: Sequence[Task] = (), **config: Any) -> None:
        given = {"eval": EvalConfig(size=0), "tasks_per_step": max(len(train), 1), "group_size": 3, **config}
        super().__init__(Config(**given), tiny_model(layers=1), None, 7)
        self.speaker = ScriptedSampler(self.say)
        self.tokenizer = self.speaker.tokenizer
        self.__dict__.update(pool=Stubborn(), panel_tasks=list(panel), train_tasks=list(train))
        self.asked: list[Any] = []

    def say(self, key: Any) -> str:
        self.asked.append(key)
        if "skill" in key:
            return f"<skill>note {key[2]} of {key[1]}</skill>"
        if "insight" in key:
            return f"<skill>rule of {key[1]}</skill>"
        return GOOD

    def sampler(self, temperature: float) -> Any:
        return self.speaker


# --- reflexion


STUBBORN = [
    task("easy", "won 2"), task("hard", "won 2 1"), task("harder", "won 2 2"), task("never", "lost 2"),
    task("crashes", "crash 1"),
]  # fmt: skip


def test_reflexion_plays_again_what_was_lost_with_its_own_notes() -> None:
    session = Played(STUBBORN)
    seen: list[tuple[int, int]] = []
    played = reflexion(session, 5, 4, lambda done, total: seen.append((done, total)))
    attempts = {t.id: [p for p in played if p.task_id == t.id] for t in STUBBORN}
    assert [[p.attempt for p in attempts[t.id]] for t in STUBBORN] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    assert [p.skill for p in attempts["harder"]] == [None, "note 0 of harder", "note 0 of harder\nnote 1 of harder"]
    assert all(f"Skill: {p.skill}" in p.segments[0].messages[0].content for p in attempts["harder"][1:])
    assert [p.skill for p in attempts["crashes"]] == [None] * 4  # an environment's crash is nobody's mistake
    assert {p.seed for p in played} == {5} and {p.step for p in played} == {7}
    assert [p.group for p in attempts["never"]] == [
        [t.id for t in sorted(STUBBORN, key=lambda t: t.id)].index("never")
    ] * 4
    assert played == sorted(played, key=lambda p: (p.task_id, p.attempt))
    counts = [done for done, _ in seen]
    assert counts == sorted(counts) and seen[-1] == (20, 20)


def test_the_latest_notes_are_kept() -> None:
    last = reflexion(Played([task("never", "lost 2")]), 0, 6)[-1]
    assert last.skill == "\n".join(f"note {i} of never" for i in range(5 - MEMORY, 5))


def test_the_first_attempt_is_vanilla_and_one_trial_writes_nothing() -> None:
    session = Played(TASKS)
    once = reflexion(session, 0, 1)
    assert not any("skill" in key for key in session.asked)
    plain = Played(TASKS).evaluate(0)
    assert [(t.id, t.turns, t.success, t.skill) for t in once] == [(t.id, t.turns, t.success, t.skill) for t in plain]
    again = reflexion(Played(TASKS), 0, 3)
    assert [t.id for t in again if t.attempt == 0] == [t.id for t in plain]
    assert all(t.attempt == 0 for t in again if t.success)


def test_a_note_that_cannot_be_read_leaves_the_prompt_as_it_was() -> None:
    session = Played([task("never", "lost 1")])
    session.say = lambda key: "mumble" if "skill" in key else GOOD  # type: ignore[method-assign]
    session.speaker.script = session.say
    assert [t.skill for t in reflexion(session, 0, 3)] == [None] * 3


def frame(rows: list[tuple[str, int, int, bool, str | None]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["task", "seed", "attempt", "success", "error"])


def test_what_counts_after_each_trial() -> None:
    table = by_trial(
        frame(
            [
                ("a", 0, 0, True, None),
                ("b", 0, 0, False, None),
                ("b", 0, 1, True, None),
                ("c", 0, 0, False, None),
                ("c", 0, 1, False, "crash"),
                ("c", 0, 2, False, None),
                ("d", 0, 0, False, "crash"),
                ("d", 0, 1, False, "crash"),
                ("a", 1, 0, False, None),
            ]
        ),
        3,
    )
    chosen = {
        k: {(r.task, r.seed): (r.attempt, r.success) for r in part.itertuples()} for k, part in table.groupby("trials")
    }
    assert chosen[1] == {
        ("a", 0): (0, True),
        ("b", 0): (0, False),
        ("c", 0): (0, False),
        ("d", 0): (0, False),
        ("a", 1): (0, False),
    }
    assert chosen[2] == chosen[1] | {("b", 0): (1, True), ("d", 0): (1, False)}  # c's crash does not hide its loss
    assert chosen[3] == chosen[2] | {("c", 0): (2, False)}
    assert list(table["trials"]) == [1] * 5 + [2] * 5 + [3] * 5


# --- insights


def attempts(*ends: tuple[str, bool], kind: str = "heat") -> list[Trajectory]:
    made: list[Trajectory] = []
    for name, won in ends:
        source = Played([task(name, "won 1" if won else "lost 1")]).evaluate(0)[0]
        made.append(replace(source, task_type=kind, attempt=len(made), id=f"{name}{len(made)}"))
    return made


def test_a_contrast_is_the_first_failure_and_the_first_success_at_one_task() -> None:
    tried = attempts(("a", True), ("a", False), ("a", False), ("b", True), ("c", False), ("d", False), ("d", True))
    crashed = replace(tried[4], success=True, stop_reason="error", id="x", attempt=9)
    found = contrasts([*reversed(tried), crashed])
    assert [(lost.id, won.id) for lost, won in found] == [("a1", "a0"), ("d5", "d6")]
    lost, won = found[0]
    [message] = insight_messages(lost, won, terse=False)
    assert message.content.index("Outcome: failure") < message.content.index("Outcome: success")
    assert (
        "no particular object" in message.content
        and "no particular object" not in insight_messages(lost, won)[0].content
    )


def test_insights_that_cannot_be_read_are_counted() -> None:
    tried = attempts(("a", True), ("a", False), ("b", True), ("b", False), ("c", False), ("c", True))
    said = {"a": "<skill>look first</skill>", "b": "mumble", "c": "<skill></skill>"}
    insights, counts = write_insights(ScriptedSampler(lambda key: said[key[1]]), tried, seed=0)
    assert [(i.skill.text, i.skill.task_id, i.skill.trajectory_id, i.task_type) for i in insights] == [
        ("look first", "a", "a1", "heat")
    ]
    assert (counts.written, counts.empty, counts.unparsable) == (1, 1, 1)


def test_the_nearest_insights_of_the_same_type_are_retrieved() -> None:
    def insight(text: str, kind: str, sentence: str) -> Insight:
        return Insight(Skill(text, "hindsight", "t"), kind, sentence)

    known = [
        insight("1", "heat", "put a hot potato in the bin."),
        insight("2", "heat", "put a hot mug on the shelf."),
        insight("3", "cool", "put a hot mug on the desk."),
        insight("2", "heat", "put a hot mug on the desk."),
    ]
    assert retrieve_insights(known, "heat", "put a hot mug on the desk.", 2) == "2"
    assert retrieve_insights(known, "heat", "put a hot mug on the desk.") == "2\n1"
    assert retrieve_insights(known, "clean", "put a hot mug on the desk.") == ""


def test_expel_learns_from_training_tasks_only() -> None:
    train = [task("train a", "won 1 1"), task("train b", "won 1 2"), task("train c", "won 1")]
    session = Played([task("panel a", "won 1"), task("panel b", "lost 1")], train)
    tried = experience(session)
    assert {t.task_id for t in tried} == {t.id for t in train} and len(tried) == 9
    skills = insight_skills(session, tried)
    assert {id: skill.text for id, skill in skills.items()} == {"panel a": "rule of train a\nrule of train b"}
    with pytest.raises(ValueError, match="'panel a' of the panel"):
        insight_skills(session, [*tried, *session.evaluate(0)])
    with pytest.raises(ValueError, match="in the training split and in the panel"):
        experience(Played(train[:1], train))


# --- library


def test_each_task_gets_the_skill_of_its_kind() -> None:
    session = Played(HOUSEHOLD, skills=SkillsConfig(budget=100_000))
    texts = {id: skill.text for id, skill in library_skills(session).items()}
    assert len(set(texts.values())) == 3 and len(texts["h2"]) < len(texts["h0"])  # general rules alone
    library = load_library("household")
    assert texts["h0"] == library.text(library.section(HOUSEHOLD[0].task_type), mistakes=False)
    assert library_skills(Played(HOUSEHOLD, skills=SkillsConfig(retrieval="none"))) == {}


def test_a_skill_over_the_budget_is_left_out_and_never_cut(caplog: pytest.LogCaptureFixture) -> None:
    whole = library_skills(Played(HOUSEHOLD, skills=SkillsConfig(budget=100_000)))
    size = len(whole["h2"].text.encode())  # every byte is a token here
    kept = library_skills(Played(HOUSEHOLD, skills=SkillsConfig(budget=size)))
    assert kept == {"h2": whole["h2"]} and "2 of 3 skills" in caplog.text
    assert library_skills(Played(HOUSEHOLD, skills=SkillsConfig(budget=size - 1))) == {}


# --- artifacts


@pytest.fixture
def session() -> Played:
    train = [task("train a", "won 1 1"), task("train b", "lost 1")]
    return Played([*HOUSEHOLD, task("hard", "won 2 1")], train, skills=SkillsConfig(budget=100_000))


@pytest.mark.parametrize("protocol", ["vanilla", "skill_prompt", "own_skill", "reflexion", "expel"])
def test_episodes_are_kept_by_protocol(session: Played, protocol: Any, tmp_path: Path) -> None:
    made = panel_episodes(session, tmp_path, 0, protocol=protocol, trials=2)
    suffix = "" if protocol == "vanilla" else f"_{protocol}"
    assert made.path.name == f"household_valid_seen_step7_seed0{suffix}"
    assert made.manifest["played"]["evaluation"] == protocol
    before = len(session.asked)
    assert panel_episodes(session, tmp_path, 0, protocol=protocol, trials=2).digest == made.digest
    assert len(session.asked) == before  # nothing is played or written twice
    played = {t.task_id: t for t in load_trajectories(made.path)}
    expected = {
        "vanilla": {None},
        "skill_prompt": {skill.text for skill in library_skills(session).values()},
        "own_skill": {f"note 0 of {name}" for name in played},
        "reflexion": {None, "note 0 of hard"},
        "expel": {None, "rule of train a"},
    }[protocol]
    assert {t.skill for t in played.values()} == expected
    if protocol in ("skill_prompt", "own_skill", "expel"):
        [source] = made.manifest["inputs"]
        skills = load_artifact(made.path / source["path"], "skills")
        assert source["digest"] == skills.digest == made.manifest["played"]["skills"]
        assert {skill.text for skill in load_skills(skills.path).values()} <= expected


def test_other_trials_are_other_episodes(session: Played, tmp_path: Path) -> None:
    one, three = (panel_episodes(session, tmp_path, 0, protocol="reflexion", trials=n).digest for n in (1, 3))
    assert one != three
    assert panel_episodes(session, tmp_path, 1).digest == panel_episodes(session, tmp_path, 1, trials=9).digest


def test_episodes_with_help_are_never_taken_for_plain_ones(session: Played, tmp_path: Path) -> None:
    for protocol in ("expel", "reflexion", "skill_prompt"):
        panel_episodes(session, tmp_path, 0, protocol=protocol)
    with pytest.raises(ValueError, match="has no episodes"):
        latest_episodes(tmp_path)
    plain = panel_episodes(session, tmp_path, 3)
    assert latest_episodes(tmp_path).path == plain.path
