from __future__ import annotations

from dataclasses import replace

from diagnostics.records import Skill, Trajectory, Turn
from diagnostics.render import prompt_ids
from tests.diagnostics.tiny import chat_tokenizer, trajectory
from tests.training.clockwork import ScriptedSampler, babbler
from training.samplers.hf import HFSampler
from training.skills.hindsight import WriterCounts, hindsight_messages, parse_skill, serialise, write_skills

ROOM = "You are in the middle of a room. Looking quickly around you, you see a shelf 1 and a desk 1."


def episode(success: bool = True, id: str = "t0", **changes: object) -> Trajectory:
    turns = (
        Turn(ROOM, (), "", "go to shelf 1", True),
        Turn("You arrive at shelf 1. On the shelf 1, you see a mug 2.", (), "", "fly", False),
        Turn("Nothing happens.", (), "mumble", "", False),
        Turn("Nothing happens.", (), "", "take mug 2 from shelf 1", True),
        Turn("You pick up the mug 2 from the shelf 1.", (), "", "go to desk 1", True),
    )
    base = trajectory([], id=id, description="put a mug on the desk.")
    return replace(base, turns=turns, success=success, **changes)


class TestSerialise:
    def test_task_outcome_and_one_line_a_valid_turn(self) -> None:
        assert serialise(episode()).splitlines() == [
            "Task: put a mug on the desk.",
            "Outcome: success",
            "go to shelf 1 -> a mug 2 in shelf 1",
            "take mug 2 from shelf 1 -> You pick up the mug 2 from the shelf 1.",
            "go to desk 1",
        ]
        assert serialise(episode(success=False)).splitlines()[1] == "Outcome: failure"

    def test_its_length_is_bounded(self) -> None:
        seen = "You arrive at desk 1. " + "On the desk 1, you see a pen 1. " * 40
        long = replace(episode(), turns=tuple(Turn(seen, (), "", f"go to desk {i}", True) for i in range(200)))
        for limit in (30, 100, 1000, 6000):
            assert len(serialise(long, max_chars=limit)) <= limit
        lines = serialise(long).splitlines()
        assert max(map(len, lines)) <= 480 + len("go to desk 199 -> ")
        assert lines[-1] == "go to desk 199", "the end decides the outcome, it is kept"
        assert len(serialise(long, max_turns=3).splitlines()) == 5

    def test_an_unplayed_episode_has_a_head_only(self) -> None:
        assert len(serialise(replace(episode(), turns=())).splitlines()) == 2


class TestMessages:
    def test_the_cue_is_short(self) -> None:
        (message,) = hindsight_messages(episode())
        assert message.role == "user" and message.content == serialise(episode()) + "\nWrite a skill."

    def test_the_instruction_depends_on_the_outcome(self) -> None:
        won, lost = (hindsight_messages(episode(success=s), terse=False)[0].content for s in (True, False))
        assert "reusable procedure" in won and "observation that decided" in won and "mistake" not in won
        assert "mistake" in lost and "procedure" not in lost
        assert all("<skill>your text</skill>" in text for text in (won, lost))


def test_parse() -> None:
    assert parse_skill("ok <skill> look\n twice </skill> <skill>no</skill>") == "look twice"
    assert parse_skill("<skill>  </skill>") == ""
    assert parse_skill("<skill>cut before its en") is None
    assert parse_skill("look twice") is None


def test_one_skill_a_finished_trajectory_and_the_rest_is_counted() -> None:
    said = {0: "<skill>look twice</skill>", 1: "<skill></skill>", 2: "mumble", 3: "<skill>open it first</skill>"}
    shown = [episode(id=f"t{i}", attempt=i, success=i == 0) for i in range(4)]
    crashed = episode(id="t4", attempt=4, stop_reason="error", error="reset: hung")
    sampler = ScriptedSampler(lambda key: said[key[2]])
    skills, counts = write_skills(sampler, [*shown, crashed], seed=0, step=3)
    assert skills == {
        "t0": Skill("look twice", "hindsight", "task", "t0", True),
        "t3": Skill("open it first", "hindsight", "task", "t3", False),
    }
    assert counts == WriterCounts(written=2, empty=1, unparsable=1)
    assert len({request.key for request in sampler.asked}) == 4
    assert list(sampler.asked[0].ids) == prompt_ids(sampler.tokenizer, hindsight_messages(shown[0]))
    assert write_skills(sampler, [], seed=0) == ({}, WriterCounts(0, 0, 0))


def test_a_model_writes_the_same_text_in_any_company() -> None:
    tokenizer = chat_tokenizer()
    shown = [episode(id=f"t{i}", attempt=i, description="find it. " * (i + 1)) for i in range(5)]
    prompts = [prompt_ids(tokenizer, hindsight_messages(t)) for t in shown]
    keys = [(0, t.id) for t in shown]
    one, all_ = (
        HFSampler(babbler(), tokenizer, batch_size=n).generate(prompts, keys, max_new_tokens=6) for n in (1, 5)
    )
    assert [reply.text for reply in one] == [reply.text for reply in all_]
    assert max(len(reply.ids) for reply in one) <= 6
