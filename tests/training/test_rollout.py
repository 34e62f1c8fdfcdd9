from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from diagnostics.records import Segment, Trajectory
from diagnostics.render import prompt_ids
from tests.diagnostics.tiny import FORGETS_THOUGHTS, chat_tokenizer
from tests.training.clockwork import COMMANDS, GOOD, TASKS, ClockworkPool, ScriptedSampler, babbler, task
from training.rollout import RolloutStats, Start, group_starts, rollout
from training.samplers.hf import HFSampler


def play(
    sampler: Any, starts: list[Start], pool: Any = None, max_turns: int = 9, max_context: int = 4000, **given: Any
) -> tuple[list[Trajectory], RolloutStats]:
    given.setdefault("seed", 0)
    return rollout(sampler, pool or ClockworkPool(), starts, max_turns=max_turns, max_context=max_context, **given)


def played(say: str | list[int] | Callable, ending: str, **given: Any) -> tuple[Trajectory, RolloutStats]:
    """One episode with a scripted player."""
    sampler = given.pop("sampler", None) or ScriptedSampler(say if callable(say) else lambda key: say)
    (trajectory,), stats = play(sampler, [Start(task("t", ending), 0, 0)], **given)
    return trajectory, stats


def same(a: Trajectory, b: Trajectory, atol: float = 0.0) -> bool:
    """Equal in every field; log-probs within `atol` nats."""
    arrays = ("ids", "response_mask", "turn", "token_class")
    return (
        replace(a, segments=()).__dict__ == replace(b, segments=()).__dict__
        and len(a.segments) == len(b.segments)
        and all(
            x.messages == y.messages
            and all(np.array_equal(getattr(x, name), getattr(y, name)) for name in arrays)
            and np.allclose(x.rollout_logprobs, y.rollout_logprobs, rtol=0, atol=atol)
            for x, y in zip(a.segments, b.segments, strict=True)
        )
    )


def reread(model: Any, segment: Segment) -> np.ndarray:
    ids = torch.tensor(segment.ids.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    return np.where(segment.response_mask[1:], logprobs, 0.0)


class TestBatches:
    """Case B42: the same episodes at any batch size, each game once, whoever answers first."""

    def test_scripted_player(self) -> None:
        runs = [play(ScriptedSampler(lambda key: GOOD, batch_size=n), group_starts(TASKS, 2))[0] for n in (1, 3, 7)]
        runs.append(play(ScriptedSampler(lambda key: GOOD), group_starts(TASKS, 2), ClockworkPool(backwards=True))[0])
        for one, *others in zip(*runs, strict=True):
            assert all(same(one, other) for other in others)
        assert [t.success for t in runs[0]] == [task.source.startswith("won") for task in TASKS for _ in range(2)]
        assert len({(t.task_id, t.attempt) for t in runs[0]}) == 14

    @pytest.mark.parametrize("protocol", ["append", "windowed"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_model(self, protocol: str, temperature: float) -> None:
        model = babbler()
        settings = {"protocol": protocol, "temperature": temperature, "max_new_tokens": 6}
        runs, stats = zip(
            *(
                play(HFSampler(model, chat_tokenizer(), batch_size=n, **settings), group_starts(TASKS, 1), seed=4)
                for n in (1, 3, 7)
            ),
            strict=True,
        )
        assert stats[0].near_ties == 0, "choose another seed: near ties may differ"
        assert len({t.n_tokens for t in runs[0]}) > 3
        for one, *others in zip(*runs, strict=True):
            assert all(same(one, other, atol=1e-4) for other in others)

    def test_finished_episodes_are_neither_generated_for_nor_stepped(self) -> None:  # case R3
        sampler, pool = ScriptedSampler(lambda key: GOOD), ClockworkPool()  # the pool asserts the second half
        trajectories, stats = play(sampler, group_starts(TASKS, 1), pool)
        lengths = [int(task.source.split()[1]) for task in TASKS]
        assert [len(t.turns) for t in trajectories] == lengths
        assert len(sampler.asked) == sum(lengths) == stats.turns == sum(map(len, pool.sent.values()))
        assert stats.generated_tokens == sum(t.n_tokens for t in trajectories)

    def test_progress_ends_at_all(self) -> None:
        calls: list[tuple[int, int]] = []
        play(
            ScriptedSampler(lambda key: GOOD, batch_size=3), group_starts(TASKS, 1), progress=lambda *c: calls.append(c)
        )
        assert calls == sorted(calls) and calls[-1] == (7, 7)

    def test_groups_share_the_task_and_not_the_draws(self) -> None:  # case B49
        starts = group_starts([task(f"t{i}", "lost 1") for i in range(8)], 8)
        sampler = ScriptedSampler(lambda key: GOOD)
        trajectories, _ = play(sampler, starts)
        firsts = [{t.first_observation_sha256 for t in trajectories if t.group == g} for g in range(8)]
        assert all(len(first) == 1 for first in firsts) and len(set.union(*firsts)) == 8
        assert len({request.key for request in sampler.asked}) == 64
        assert len({t.id for t in trajectories}) == 64

    def test_a_start_listed_twice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="1 starts are listed twice"):
            play(ScriptedSampler(lambda key: GOOD), [*group_starts(TASKS, 1), Start(TASKS[0], 3, 0)])


class TestTokens:
    def test_sampled_ids_are_stored_as_sampled(self) -> None:  # case B07
        tokenizer = chat_tokenizer([("l", "l"), ("ll", "o"), ("h", "e"), ("he", "llo")])
        he, llo, hello = tokenizer.convert_tokens_to_ids(["he", "llo", "hello"])
        assert tokenizer("hello")["input_ids"] == [hello]
        sampler = ScriptedSampler(lambda key: [he, llo, tokenizer.eos_token_id], tokenizer=tokenizer)
        trajectory, _ = played("", "lost 3", sampler=sampler)
        (segment,) = trajectory.segments
        assert segment.ids[segment.response_mask].tolist() == [he, llo, tokenizer.eos_token_id] * 3
        assert hello not in segment.ids
        assert [turn.response for turn in trajectory.turns] == ["hello"] * 3

    def test_mask_and_turns_cover_generated_tokens_only(self) -> None:  # case B53
        trajectory, stats = played(GOOD, "won 3")
        (segment,) = trajectory.segments
        each = len(chat_tokenizer()(GOOD)["input_ids"]) + 1
        assert segment.response_mask.sum() == 3 * each == stats.generated_tokens
        assert [int((segment.turn == k).sum()) for k in range(3)] == [each] * 3
        assert np.array_equal(segment.response_mask, segment.turn >= 0)
        assert np.array_equal(segment.response_mask, segment.token_class != 0)
        assert np.array_equal(segment.response_mask, segment.rollout_logprobs != 0)
        assert set(segment.token_class[segment.response_mask].tolist()) == {1, 2, 3}
        assert segment.ids[: segment.prompt_length].tolist() == prompt_ids(chat_tokenizer(), segment.messages)

    def test_an_append_episode_is_the_rendered_conversation(self) -> None:
        trajectory, _ = played(GOOD, "won 3")
        text = chat_tokenizer().decode(trajectory.segments[0].ids)
        assert text.count("<|im_start|>user\n") == 3 == text.count(GOOD + "<|im_end|>")
        assert text.endswith(f"t: it is 2 o'clock.\nCommands: {'; '.join(COMMANDS)}<|im_end|>\n"
                             f"<|im_start|>assistant\n{GOOD}<|im_end|>")  # fmt: skip

    @pytest.mark.parametrize("protocol", ["append", "windowed"])
    def test_stored_log_probs_equal_a_reread_of_the_segment(self, protocol: str) -> None:  # case B22
        model = babbler()
        sampler = HFSampler(model, chat_tokenizer(), protocol=protocol, max_new_tokens=6)
        trajectories, _ = play(sampler, group_starts(TASKS, 1), show_admissible=False)
        for segment in (segment for t in trajectories for segment in t.segments):
            assert np.allclose(segment.rollout_logprobs[1:], reread(model, segment), atol=1e-4)

    def test_a_template_that_rewrites_history_opens_a_segment(self) -> None:  # case B08
        tokenizer = chat_tokenizer(template=FORGETS_THOUGHTS)
        trajectory, stats = played("", "won 3", sampler=ScriptedSampler(lambda key: GOOD, tokenizer=tokenizer))
        assert len(trajectory.segments) == 3 and stats.split_segments == 2
        for k, segment in enumerate(trajectory.segments):
            assert set(segment.turn[segment.response_mask].tolist()) == {k}
            assert segment.ids[: segment.prompt_length].tolist() == prompt_ids(tokenizer, segment.messages)
        assert "<think>so" not in tokenizer.decode(trajectory.segments[2].ids[: trajectory.segments[2].prompt_length])
        unbroken, stats = played(GOOD, "won 3")
        assert len(unbroken.segments) == 1 and stats.split_segments == 0

    def test_a_cut_reply_is_closed_outside_the_mask(self) -> None:
        tokenizer = chat_tokenizer()
        eos, letter = tokenizer.eos_token_id, tokenizer("a")["input_ids"][0]
        trajectory, stats = played([letter] * 4, "lost 2")
        (segment,) = trajectory.segments
        assert segment.ids[segment.response_mask].tolist() == [letter] * 8 and stats.cut_replies == 2
        behind = int(np.flatnonzero(segment.turn == 0)[-1]) + 1
        assert segment.ids[behind] == eos and not segment.response_mask[behind]
        assert trajectory.n_invalid == 2


class TestWindowed:
    def test_one_segment_a_turn_with_the_last_turns_in_its_prompt(self) -> None:
        sampler = ScriptedSampler(lambda key: GOOD, protocol="windowed")
        trajectory, stats = played("", "won 5", sampler=sampler, history=2)
        assert len(trajectory.segments) == 5 and stats.split_segments == 0
        assert all(request.fresh for request in sampler.asked)
        last = trajectory.segments[4].messages[0].content
        assert [f"it is {k} o'clock" in last for k in range(5)] == [False, False, True, True, True]
        alone, _ = played("", "won 5", sampler=sampler, history=0)
        assert [f"it is {k} o'clock" in alone.segments[4].messages[0].content for k in range(5)] == [False] * 4 + [True]


class TestReplies:
    @pytest.mark.parametrize(
        "reply, valid, action, sent",
        [
            (GOOD, True, "look", "look"),
            ("<think>x</think><action> GO  to shelf 1 </action>", True, "go to shelf 1", "go to shelf 1"),
            ("<think>x</think><action>fly</action>", False, "fly", "fly"),
            ("<action>look</action>", False, "look", "look"),
            ("<think>x</think>look", False, "", "<think>x</think>look"),
            ("<think>x</think><action></action>", False, "", "<think>x</think><action></action>"),
        ],
    )
    def test_validity_and_what_the_environment_gets(self, reply: str, valid: bool, action: str, sent: str) -> None:
        pool = ClockworkPool()
        trajectory, stats = played(reply, "lost 2", pool=pool)
        assert {(turn.valid, turn.action) for turn in trajectory.turns} == {(valid, action)}
        assert pool.sent["t"] == [sent] * 2
        assert trajectory.n_invalid == stats.invalid_turns == (0 if valid else 2)  # an invalid reply costs its turn


class TestEndings:
    def test_won(self) -> None:
        trajectory, _ = played(GOOD, "won 2")
        assert (trajectory.success, trajectory.reward, trajectory.stop_reason) == (True, 10.0, "won")

    def test_done_is_not_won(self) -> None:  # case B38
        trajectory, _ = played(GOOD, "lost 50", max_turns=50, max_context=20_000)
        assert (trajectory.success, trajectory.reward, len(trajectory.turns)) == (False, 0.0, 50)
        assert trajectory.stop_reason == "turn_limit"
        assert played(GOOD, "lost 4")[0].stop_reason == "done"

    def test_turn_limit(self) -> None:
        trajectory, _ = played(GOOD, "won 5", max_turns=4)
        assert (trajectory.success, len(trajectory.turns), trajectory.stop_reason) == (False, 4, "turn_limit")
        assert played(GOOD, "won 4", max_turns=4)[0].success

    @pytest.mark.parametrize("ending, turns", [("crash 0", 0), ("crash 2", 2)])
    def test_a_crash_is_an_error_and_the_others_go_on(self, ending: str, turns: int) -> None:  # case B50
        starts = group_starts([task("a", "won 3"), task("b", ending), task("c", "won 4")], 1)
        (a, b, c), stats = play(ScriptedSampler(lambda key: GOOD), starts)
        assert a.success and c.success and stats.errors == 1
        assert (b.stop_reason, b.success, b.reward, len(b.turns)) == ("error", False, 0.0, turns)
        assert b.error is not None and "took longer than 1 s" in b.error
        assert len(b.segments) == min(turns, 1)

    @pytest.mark.parametrize("protocol", ["append", "windowed"])
    def test_context_limit(self, protocol: str) -> None:
        sampler = ScriptedSampler(lambda key: GOOD, protocol=protocol)
        free, _ = played("", "won 5", sampler=sampler, history=0)  # turns of a history would make room
        room = len(free.segments[0].ids if protocol == "append" else free.segments[3].ids) - 1
        sampler.max_new_tokens = 40  # the scripted reply has 40 tokens
        bounded, _ = played("", "won 5", sampler=sampler, max_context=room, history=0)
        assert bounded.stop_reason == "context_limit" and not bounded.success
        assert 0 < len(bounded.turns) < 5
        assert max(len(segment.ids) for segment in bounded.segments) <= room
        nothing, _ = played("", "won 5", sampler=sampler, max_context=50)
        assert (nothing.turns, nothing.segments, nothing.stop_reason) == ((), (), "context_limit")

    def test_a_row_without_room_for_its_first_reply_leaves_the_others_alone(self) -> None:
        long = replace(task("long", "won 2"), description="find a mug. " * 40)
        sampler = HFSampler(babbler(), chat_tokenizer(), protocol="append", max_new_tokens=4)
        (first, second), _ = play(sampler, group_starts([long, task("b", "won 2")], 1), max_context=400)
        assert first.stop_reason == "context_limit" and second.success


def test_skills_stand_in_their_own_prompt_only() -> None:
    starts = group_starts([task("a", "won 2"), task("b", "won 2")], 2)
    trajectories, _ = play(ScriptedSampler(lambda key: GOOD), starts, skills={("a", 1): "look twice"})
    assert [t.skill for t in trajectories] == [None, "look twice", None, None]
    assert ["look twice" in t.segments[0].messages[0].content for t in trajectories] == [False, True, False, False]
    plain, _ = play(ScriptedSampler(lambda key: GOOD), starts, skills={("a", 1): ""})
    assert plain[1].segments[0].ids.tolist() == plain[0].segments[0].ids.tolist()
