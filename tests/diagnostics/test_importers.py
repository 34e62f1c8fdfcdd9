"""Trajectories made elsewhere: what is read is what was said, token for token; what is wrong is named by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnostics.artifact import load_trajectories, save_trajectories
from diagnostics.conversations import conversation_segments
from diagnostics.importers import import_skills, import_trajectories
from diagnostics.paired import build_pairs
from diagnostics.records import Message, Provenance, TokenClass, Trajectory
from diagnostics.render import (
    decode,
    encode,
    observation_message,
    prompt_ids,
    segment_from_turns,
    task_messages,
)
from diagnostics.run import diagnose
from diagnostics.transcripts import markers, read_transcript
from tests.diagnostics.tiny import CHATML, FORGETS_THOUGHTS, chat_tokenizer, tiny_model, trajectory

LLAMA = (  # headers instead of lines, a BOS, nothing between turns once special tokens are gone
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
EMPTY_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
TEMPLATES = {"chatml": CHATML, "system": DEFAULT_SYSTEM, "thought": EMPTY_THOUGHT, "forgets": FORGETS_THOUGHTS}
REPLIES = ("<think>a mug?</think><action>Go  to desk</action>", "<think>here</think><action>take mug</action>")
DIALOGUE = (
    Message("user", "Task: find a mug.\nA desk."),
    Message("assistant", REPLIES[0]),
    Message("user", "You see a mug."),
    Message("assistant", REPLIES[1]),
)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def plain(messages: Any) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def said(tokenizer: Any, found: Trajectory) -> list[str]:
    """The replies as their tokens say them."""
    texts = []
    for segment in found.segments:
        for turn in range(segment.turn.max() + 1):
            if (segment.turn == turn).any():
                texts.append(decode(tokenizer, segment.ids[segment.turn == turn]))
    return texts


def pairs(tokenizer: Any, found: Trajectory) -> list:
    return build_pairs(tokenizer, [(found, segment) for segment in found.segments], {found.id: "Look."}, "own", 10_000)[
        0
    ]


# --- messages --------------------------------------------------------------------------------------------------------


def test_messages_are_read_as_they_were_said(tmp_path):
    tokenizer = chat_tokenizer(tags=True)
    rows = (
        {"messages": plain(DIALOGUE), "reward": 10, "task": "mug", "id": "a", "success": True, "step": 3, "more": [1]},
        {"messages": plain((Message("system", "Be brief."), *DIALOGUE[:2])), "reward": 0.0, "task": "mug"},
    )
    imported = import_trajectories(write(tmp_path / "mine.jsonl", *rows, ""), tokenizer)
    first, second = imported.trajectories
    assert (first.id, first.task_id, first.reward, first.success, first.step) == ("a", "mug", 10.0, True, 3)
    assert (second.id, second.group, second.attempt, second.success) == ("mine-2", 0, 1, False)
    assert [(t.observation, t.response, t.action, t.valid) for t in first.turns] == [
        (DIALOGUE[0].content, REPLIES[0], "go to desk", True),
        (DIALOGUE[2].content, REPLIES[1], "take mug", True),
    ]
    (segment,) = first.segments
    assert segment.messages == DIALOGUE[:1]
    rendered = prompt_ids(tokenizer, DIALOGUE[:1])
    assert segment.ids[: len(rendered)].tolist() == rendered and segment.prompt_length == len(rendered)
    whole = decode(tokenizer, segment.ids)
    assert whole == decode(tokenizer, prompt_ids(tokenizer, DIALOGUE)).removesuffix("<|im_start|>assistant\n").rstrip(
        "\n"
    )
    assert said(tokenizer, first) == [reply + tokenizer.eos_token for reply in REPLIES]
    actions = segment.token_class == TokenClass.ACTION
    assert decode(tokenizer, segment.ids[actions]) == "Go  to desktake mug"
    assert np.isnan(segment.rollout_logprobs[segment.response_mask]).all()
    assert (segment.rollout_logprobs[~segment.response_mask] == 0).all()
    assert imported.rendered == 2
    assert [remark[:40] for remark in imported.remarks] == [
        "Token ids of 2 of 2 imported trajectorie",
        "Success of 1 of 2 imported trajectories ",
    ]
    assert all(pair.teacher_ids is not None for found in (first, second) for pair in pairs(tokenizer, found))


def test_a_conversation_equals_the_same_turns_re_tokenised():
    tokenizer = chat_tokenizer()
    played = trajectory([("A desk.", REPLIES[0]), ("You see a mug.", REPLIES[1])])
    (expected,) = segment_from_turns(tokenizer, played, 10_000)
    prompt = task_messages(played.description, "A desk.", None)
    rest = (DIALOGUE[1], observation_message("You see a mug.", None), DIALOGUE[3])
    (found,) = conversation_segments(tokenizer, prompt, rest)
    for name in ("ids", "response_mask", "turn", "token_class", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype


def test_segments_open_where_history_is_rewritten_or_several_messages_come_between():
    forgets = chat_tokenizer(template=FORGETS_THOUGHTS)
    first, second = conversation_segments(forgets, DIALOGUE[:1], DIALOGUE[1:])
    assert second.messages == DIALOGUE[:3] and (second.turn.max(), first.turn.max()) == (1, 0)
    assert "a mug?" not in decode(forgets, second.ids)  # the template forgets it
    tokenizer = chat_tokenizer()
    between = (DIALOGUE[1], Message("tool", "ok"), *DIALOGUE[2:], Message("user", "left out"))
    first, second = conversation_segments(tokenizer, DIALOGUE[:1], between)
    assert second.messages == (DIALOGUE[0], *between[:3])
    assert "left out" not in decode(tokenizer, second.ids)


def test_sampled_tokens_are_kept(tmp_path):
    tokenizer = chat_tokenizer(merges=[("t", "a")], tags=True)
    (segment,) = conversation_segments(tokenizer, DIALOGUE[:1], DIALOGUE[1:])
    ids, mask = segment.ids.tolist(), segment.response_mask.astype(int).tolist()
    split = encode(tokenizer, "ta")[0]
    place = next(k for k, i in enumerate(ids) if i == split and mask[k])  # tokens that nobody would encode so
    ids[place : place + 1], mask[place : place + 1] = [*encode(tokenizer, "t"), *encode(tokenizer, "a")], [1, 1]
    logprobs = [-0.5] * len(ids)
    row = {"messages": plain(DIALOGUE), "reward": 1, "success": 1, "task": "m", "ids": ids, "response_mask": mask}
    imported = import_trajectories(write(tmp_path / "x.jsonl", {**row, "logprobs": logprobs}), tokenizer)
    (found,) = imported.trajectories[0].segments
    assert found.ids.tolist() == ids and imported.rendered == 0 and imported.remarks == []
    assert (found.rollout_logprobs == np.where(found.response_mask, np.float32(-0.5), 0)).all()
    assert found.turn[found.response_mask].tolist() == sorted(found.turn[found.response_mask].tolist())
    assert found.turn.max() == 1 and (found.turn[~found.response_mask] == -1).all()
    assert (
        pairs(tokenizer, imported.trajectories[0])[0].response_ids.tolist() == found.ids[found.response_mask].tolist()
    )


def test_passages_inside_a_reply_are_no_reply(tmp_path):
    """Case B53: a search agent's episode in one text; what was retrieved is neither measured nor a class."""
    tokenizer = chat_tokenizer()
    text = (
        "<think>a</think>\n<search>Ada</search>\n\n<information>Doc 1: Ada was born.</information>\n\n"
        "<think>b</think><answer>Karsum</answer>"
    )
    told = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": text}]
    imported = import_trajectories(write(tmp_path / "mine.jsonl", {"messages": told, "reward": 1}), tokenizer)
    (found,) = imported.trajectories
    assert said(tokenizer, found) == [
        "<think>a</think>\n<search>Ada</search><|im_end|>",
        "<think>b</think><answer>Karsum</answer><|im_end|>",
    ]
    assert [turn.action for turn in found.turns] == ["<search>Ada</search>", "<answer>Karsum</answer>"]
    assert found.turns[1].observation == "<information>Doc 1: Ada was born.</information>"
    assert any("1 of 1 imported trajectories hold passages" in remark for remark in imported.remarks)
    assert sum(len(pair.response_ids) for pair in pairs(tokenizer, found)) == sum(
        int(segment.response_mask.sum()) for segment in found.segments
    )
    given = decode(tokenizer, prompt_ids(tokenizer, [Message("user", "Where?")]))
    (dumped,) = import_trajectories(
        write(tmp_path / "1.jsonl", {"input": given, "output": text, "score": 1.0, "step": 1}), tokenizer
    ).trajectories
    assert said(tokenizer, dumped) == said(tokenizer, found)


def test_untagged_replies_count_as_a_whole(tmp_path):
    rows = [{"messages": plain((DIALOGUE[0], Message("assistant", " It is 4. "))), "reward": -1} for _ in range(2)]
    rows[1]["messages"][0]["content"] = [{"type": "text", "text": "An"}, {"type": "text", "text": "other"}]
    imported = import_trajectories(write(tmp_path / "x.jsonl", *rows), chat_tokenizer())
    assert [(t.turns[0].action, t.turns[0].valid, t.group) for t in imported.trajectories] == [
        ("It is 4.", True, 0),
        ("It is 4.", True, 1),
    ]
    assert imported.trajectories[1].description == "Another"
    assert any("2 of 2 imported trajectories have no <action>" in remark for remark in imported.remarks)


# --- verl ------------------------------------------------------------------------------------------------------------


def dump(tokenizer: Any, messages: tuple[Message, ...], prompt: int, skip: bool = True) -> dict[str, str]:
    """Input and output as verl decodes its prompt and response tensors; observations are part of the response."""
    first = prompt_ids(tokenizer, messages[:prompt])
    ids: list[int] = list(first)
    for index in range(prompt, len(messages), 2):
        reply = [*encode(tokenizer, messages[index].content), tokenizer.eos_token_id]
        ids += reply
        if index + 1 < len(messages):
            grown = decode(tokenizer, prompt_ids(tokenizer, messages[: index + 2]))
            ids += encode(tokenizer, grown[grown.rindex(messages[index + 1].content) - len(gap(tokenizer, messages)) :])
    text = [tokenizer.decode(part, skip_special_tokens=skip) for part in (ids[: len(first)], ids[len(first) :])]
    return {"input": text[0], "output": text[1]}


def gap(tokenizer: Any, messages: tuple[Message, ...]) -> str:
    """What stands between a reply's end-of-turn token and the next content."""
    end = markers(tokenizer).turn["assistant"]
    return end[end.index(tokenizer.eos_token) + len(tokenizer.eos_token) :]


@pytest.mark.parametrize("skip", [True, False], ids=["without special tokens", "with them"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_dump_of_several_turns_is_read_back(template, skip):
    tokenizer = chat_tokenizer(template=TEMPLATES[template])
    for prompt in (DIALOGUE[:1], (Message("system", "Be brief."), DIALOGUE[0])):
        texts = dump(tokenizer, (*prompt, *DIALOGUE[1:]), len(prompt), skip)
        found = read_transcript(tokenizer, markers(tokenizer), texts["input"], texts["output"])
        assert found.played == DIALOGUE[1:] and found.same_prompt
        assert found.prompt[-len(prompt) :] == prompt  # a system message of the template may stand in front
        rendered = [prompt_ids(tokenizer, messages) for messages in (found.prompt, prompt)]
        assert rendered[0] == rendered[1]


@pytest.mark.parametrize("skip", [True, False])
def test_headers_instead_of_lines(skip):
    tokenizer = chat_tokenizer(template=LLAMA, bos="<s>")
    texts = dump(tokenizer, DIALOGUE, 1, skip)
    found = read_transcript(tokenizer, markers(tokenizer), texts["input"], texts["output"])
    assert found.prompt == DIALOGUE[:1] and found.played == DIALOGUE[1:] and found.same_prompt


def test_roles_are_looked_for_in_their_order_only():
    tokenizer = chat_tokenizer()
    hard = (Message("user", "one\nuser\ntwo\nassistant\nthree"), Message("assistant", "yes\nassistant\nno"))
    texts = dump(tokenizer, hard, 1)
    found = read_transcript(tokenizer, markers(tokenizer), texts["input"], texts["output"])
    assert found.prompt == hard[:1] and found.played == hard[1:] and found.same_prompt


def test_a_turn_without_a_reply_is_left_out():
    tokenizer = chat_tokenizer(template=EMPTY_THOUGHT)
    texts = dump(tokenizer, DIALOGUE, 1)
    for cut in ("\nuser\nYou see", "\nuser\nYou see a mug.\nassistant\n<think>\n\n</think>\n\n"):
        found = read_transcript(tokenizer, markers(tokenizer), texts["input"], REPLIES[0] + cut)
        assert found.played == DIALOGUE[1:2]
    empty = read_transcript(tokenizer, markers(tokenizer), texts["input"], "")
    assert empty.played == (Message("assistant", ""),)


def test_folder_of_a_training_run(tmp_path):
    """Rows of one rollout are one episode; rollouts of one prompt are attempts at one task; files go by number."""
    tokenizer = chat_tokenizer()
    windows = [dump(tokenizer, DIALOGUE[:2], 1), dump(tokenizer, (*DIALOGUE[:3], DIALOGUE[3]), 3)]
    steps = [
        {**windows[k], "gts": None, "score": score, "step": 10, "uid": f"b-7_{rollout}_{k}"}
        for rollout, k, score in ((0, 1, 1.0), (0, 0, 0.0), (1, 0, 0.0), (10, 0, 0.5))
    ]
    write(tmp_path / "10.jsonl", *steps)
    write(tmp_path / "9.jsonl", {**windows[0], "gts": "x", "score": 2.0, "step": 9, "acc": False})
    imported = import_trajectories(tmp_path, tokenizer)
    assert [t.id for t in imported.trajectories] == ["9-1", "10-b-7_0", "10-b-7_1", "10-b-7_10"]
    alone, two, one, _ = imported.trajectories
    assert (alone.step, alone.reward, alone.success) == (9, 2.0, False)  # what the reward function says
    assert (two.reward, two.success, len(two.segments), len(two.turns)) == (1.0, True, 2, 2)
    assert said(tokenizer, two) == [reply + tokenizer.eos_token for reply in REPLIES]
    assert [segment.turn.max() for segment in two.segments] == [0, 1] and two.segments[1].messages == DIALOGUE[:3]
    assert two.segments[1].turn.dtype == np.int16
    assert [(t.task_id, t.group, t.attempt) for t in (two, one)] == [("b-7", 1, 0), ("b-7", 1, 1)]
    assert imported.rendered == 4 and "Token ids of 4 of 4" in imported.remarks[0]
    assert len(pairs(tokenizer, two)) == 2


def test_another_rendering_is_said(tmp_path):
    """verl let the model think, this project's prompts do not: the prompt is told apart, and counted."""
    row = dump(chat_tokenizer(), DIALOGUE[:2], 1)
    imported = import_trajectories(
        write(tmp_path / "1.jsonl", {**row, "score": 1, "step": 1}), chat_tokenizer(template=EMPTY_THOUGHT)
    )
    assert imported.trajectories[0].segments[0].messages == DIALOGUE[:1]
    assert any("1 prompts of 1 imported trajectories render to another text" in text for text in imported.remarks)


def test_imported_episodes_are_saved_and_diagnosed(tmp_path):
    tokenizer = chat_tokenizer()
    rows = [{"messages": plain(DIALOGUE), "reward": k, "id": f"e{k}", "task": f"t{k}"} for k in range(3)]
    imported = import_trajectories(write(tmp_path / "x.jsonl", *rows), tokenizer)
    artifact = save_trajectories(tmp_path / "episodes", imported.trajectories, extra={"remarks": imported.remarks})
    back = load_trajectories(artifact.path)
    assert [t.id for t in back] == ["e0", "e1", "e2"] and artifact.manifest["remarks"] == imported.remarks
    skills = {t.id: f"Look at desk {t.id}." for t in back}
    measured = diagnose(
        tiny_model(), tokenizer, back, skills, ["own_skill", "unrelated"], ["change"], Provenance(), tmp_path / "m"
    )
    assert set(measured.table("measurements").column("context").to_pylist()) >= {"own_skill", "unrelated"}


# --- refusals --------------------------------------------------------------------------------------------------------

GOOD = {"messages": plain(DIALOGUE), "reward": 1}


@pytest.mark.parametrize(
    "bad, says",
    [
        ('{"messages": [', "is not JSON"),
        ("[1]", "holds a list, expected an object"),
        ({"messages": [], "reward": 1}, "no list of messages"),
        ({"messages": plain(DIALOGUE)}, "reward is None, expected a number"),
        ({**GOOD, "reward": "10"}, "reward is '10', expected a number"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "reward": NaN}',
            "nan",
        ),
        ({**GOOD, "success": "yes"}, "success is 'yes', expected true or false"),
        (
            {**GOOD, "messages": plain(DIALOGUE[1:])},
            "a user message and an assistant's reply behind it, got roles assi",
        ),
        ({**GOOD, "messages": plain(DIALOGUE[:1])}, "got roles user"),
        ({**GOOD, "messages": [{"role": "human", "content": "x"}]}, "message 1 has role 'human' and a str as content"),
        ({**GOOD, "messages": [{"role": "user", "content": None}]}, "a NoneType as content"),
        ({**GOOD, "messages": ["hello"]}, "message 1 has role None"),
        ({**GOOD, "ids": [1, 2]}, "beside ids there must be a response_mask"),
        ({**GOOD, "ids": [1, 2], "response_mask": [1]}, "have 2, 1, 2 entries"),
        ({**GOOD, "ids": [1, 9999], "response_mask": [0, 1]}, "expected ids from 0 to"),
        ({**GOOD, "ids": [1, 2], "response_mask": [0, 0]}, "with 1 on what the policy wrote"),
        ({**GOOD, "ids": [1, 2], "response_mask": [0, 1]}, "are not what this tokenizer renders"),
        ({**GOOD, "ids": [1, 2], "response_mask": [0, 1], "logprobs": [0, "x"]}, "beside ids there must be"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(tmp_path, bad, says):
    path = write(tmp_path / "mine.jsonl", GOOD, "", bad)
    with pytest.raises(ValueError, match=says) as error:
        import_trajectories(path, chat_tokenizer())
    assert str(error.value).startswith(f"line 3 of {path}")


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"input": "Hello", "output": "x", "score": 1}, "not written by this tokenizer's chat template"),
        ({"input": "user\nHello", "output": "x", "score": 1}, "not written by this tokenizer's chat template"),
        ({"input": "system\nHello\nassistant\n", "output": "x", "score": 1}, "holds no message of a user"),
        ({"input": "user\nHello\nassistant\n", "score": 1}, "neither messages nor an input and an output"),
        ({"input": "user\nHello\nassistant\n", "output": "x"}, "score is None"),
    ],
)
def test_what_is_wrong_in_a_dump_is_named_by_its_line(tmp_path, bad, says):
    good = {**dump(chat_tokenizer(), DIALOGUE[:2], 1), "score": 1, "step": 2}
    path = write(tmp_path / "2.jsonl", good, bad)
    with pytest.raises(ValueError, match=says) as error:
        import_trajectories(path, chat_tokenizer())
    assert str(error.value).startswith(f"line 2 of {path}")


def test_files_that_cannot_be_imported(tmp_path):
    with pytest.raises(ValueError, match="there is no JSONL file"):
        import_trajectories(tmp_path / "missing.jsonl", chat_tokenizer())
    with pytest.raises(ValueError, match="there is no JSONL file"):
        import_trajectories(tmp_path, chat_tokenizer())
    with pytest.raises(ValueError, match="holds nothing to import"):
        import_trajectories(write(tmp_path / "empty.jsonl", ""), chat_tokenizer())
    with pytest.raises(ValueError, match="the id 'a' stands for two episodes"):
        import_trajectories(write(tmp_path / "twice.jsonl", {**GOOD, "id": "a"}, {**GOOD, "id": "a"}), chat_tokenizer())
    refuses = chat_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="line 1 of .* refuses the conversation .roles must alternate"):
        import_trajectories(write(tmp_path / "one.jsonl", GOOD), refuses)
    bare = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    with pytest.raises(ValueError, match="does not show who spoke"):
        read_transcript(chat_tokenizer(template=bare), markers(chat_tokenizer(template=bare)), "x", "y")
    shuffled = "{% for m in messages | reverse %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ValueError, match="each message once, in order"):
        markers(chat_tokenizer(template=shuffled))


# --- skills ----------------------------------------------------------------------------------------------------------


def test_skills_are_imported_by_trajectory(tmp_path):
    path = write(tmp_path / "mine.jsonl", {**GOOD, "id": "a", "task": "mug"}, {**GOOD, "id": "b", "reward": 0.0})
    played = import_trajectories(path, chat_tokenizer()).trajectories
    lines = (
        {"trajectory": "b", "skill": "Look."},
        {"trajectory": "a", "skill": "Go."},
        {"trajectory": "z", "skill": "x"},
    )
    skills, remarks = import_skills(write(tmp_path / "skills.jsonl", *lines), played)
    assert {name: (skill.text, skill.task_id) for name, skill in skills.items()} == {
        "b": ("Look.", played[1].task_id),
        "a": ("Go.", "mug"),
    }
    assert skills["a"].source_success is True and skills["b"].source_success is False
    assert remarks == ["1 imported skills are of trajectories that are not read and were left out."]
    assert import_skills(write(tmp_path / "skills.jsonl", *lines[:2]), played)[1] == []
    for bad in ({"trajectory": "a"}, {"trajectory": 1, "skill": "x"}, {"trajectory": "a", "skill": " "}):
        with pytest.raises(
            ValueError, match=r"line 1 of .*skills.jsonl: expected {\"trajectory\": id, \"skill\": text}"
        ):
            import_skills(write(tmp_path / "skills.jsonl", bad), played)
    with pytest.raises(ValueError, match="line 2 of .* trajectory 'a' has a skill already"):
        import_skills(write(tmp_path / "skills.jsonl", lines[1], lines[1]), played)
    with pytest.raises(ValueError, match="no skill of .* is of a trajectory that is read, whose ids are like 'a'"):
        import_skills(write(tmp_path / "skills.jsonl", lines[2]), played)
