"""Prompts, ids, replies and token classes."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from diagnostics.records import Message, TokenClass, Turn
from diagnostics.render import (
    REPLY_FORMAT,
    TAGGED_FORMAT,
    admits,
    continuation_ids,
    decode,
    decode_reply,
    encode,
    observation_message,
    parse_reply,
    place_skill,
    prompt_ids,
    segment_from_turns,
    task_messages,
    token_classes,
    windowed_messages,
)
from tests.diagnostics.tiny import CHATML, FORGETS_THOUGHTS, chat_tokenizer, trajectory

FIRST = (
    "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. You see a desk 1.\n\n"
    "Your task is to: put a mug in desk."
)
THINK, ACTION, FORMAT = TokenClass.THINK, TokenClass.ACTION, TokenClass.FORMAT


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_first_prompt_without_commands_has_no_instruction() -> None:
    (message,) = task_messages("put a mug in desk.", FIRST, None)
    assert message.role == "user"
    assert message.content == "Task: put a mug in desk.\nYou are in the middle of a room. You see a desk 1."


def test_first_prompt_lists_commands_without_help() -> None:
    (message,) = task_messages("put a mug in desk.", FIRST, ("go to desk 1", "help", "look"))
    assert message.content.endswith(f"\nCommands: go to desk 1; look\n{REPLY_FORMAT}")


def test_later_observations() -> None:
    assert observation_message("Nothing happens.\n", None) == Message("user", "Nothing happens.")
    assert observation_message("Ok.", ("look", "help")).content == "Ok.\nCommands: look"


def test_windowed_prompt() -> None:
    history = [Turn("You see a mug.", (), "", "take mug", True), Turn("Nothing happens.", (), "", "", False)]
    (message,) = windowed_messages("put a mug.", 7, history, "A desk.", ("look", "help"), skill="look first")
    assert message.content == (
        "Skill: look first\nTask: put a mug.\nYou have taken 7 steps. The last 2:\n"
        "Observation 6: You see a mug.\nAction 6: take mug\nObservation 7: Nothing happens.\nAction 7: none\n"
        f"Now at step 8: A desk.\nCommands: look\n{REPLY_FORMAT}"
    )
    assert windowed_messages("put a mug.", 0, [], FIRST, None) == task_messages("put a mug.", FIRST, None)


def test_skill_stands_in_the_first_user_message_only() -> None:
    messages = (Message("system", "s"), Message("user", "Task: a"), Message("assistant", "b"), Message("user", "c"))
    placed = place_skill(messages, " open it\n")
    assert placed[1] == Message("user", "Skill: open it\nTask: a")
    assert [placed[i] for i in (0, 2, 3)] == [messages[i] for i in (0, 2, 3)]
    for nothing in ("", "  \n", None):
        assert place_skill(messages, nothing) == messages
    with pytest.raises(ValueError, match="no user message"):
        place_skill(messages[:1], "open it")


# --- ids -------------------------------------------------------------------------------------------------------------


def test_prompt_round_trips_through_the_template() -> None:
    tokenizer = chat_tokenizer()
    ids = prompt_ids(tokenizer, [Message("user", "hi é")])
    assert decode(tokenizer, ids) == "<|im_start|>user\nhi é<|im_end|>\n<|im_start|>assistant\n"


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(ValueError, match="chat template"):
        prompt_ids(chat_tokenizer(template=None), [Message("user", "hi")])


def _adds_bos(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


@pytest.mark.parametrize("template", [CHATML, "<s>" + CHATML], ids=["plain template", "template writes bos"])
@pytest.mark.parametrize("adds", [False, True], ids=["plain tokenizer", "tokenizer adds bos"])
def test_b13_one_bos_at_most(template: str, adds: bool) -> None:
    tokenizer = chat_tokenizer(template=template, bos="<s>")
    tokenizer = _adds_bos(tokenizer) if adds else tokenizer
    messages = (Message("user", "Task: a"),)
    for ids in (prompt_ids(tokenizer, messages), prompt_ids(tokenizer, place_skill(messages, "open it"))):
        assert ids.count(tokenizer.bos_token_id) == (adds or template.startswith("<s>"))
        assert tokenizer.bos_token_id not in ids[1:]


def test_b13_a_doubled_bos_is_refused_and_none_is_invented() -> None:
    with pytest.raises(ValueError, match="two '<s>' tokens"):
        prompt_ids(chat_tokenizer(template="<s><s>" + CHATML, bos="<s>"), [Message("user", "hi")])
    assert prompt_ids(chat_tokenizer(), [Message("user", "hi")])[0] == 1  # no BOS at all: starts with <|im_start|>


def test_continuation_equals_the_whole_conversation_rendered_at_once() -> None:
    tokenizer = chat_tokenizer(tags=True)
    messages = [Message("user", "Task: a")]
    reply = "<think>x</think><action>look</action>"
    following = Message("user", "Nothing happens.")
    join = continuation_ids(tokenizer, messages, reply, following)
    assert join is not None
    whole = prompt_ids(tokenizer, [*messages, Message("assistant", reply), following])
    assert [*prompt_ids(tokenizer, messages), *encode(tokenizer, reply), tokenizer.eos_token_id, *join] == whole


def test_b08_a_template_that_rewrites_history_gives_no_continuation() -> None:
    tokenizer = chat_tokenizer(template=FORGETS_THOUGHTS)
    messages, following = [Message("user", "Task: a")], Message("user", "Nothing happens.")
    assert continuation_ids(tokenizer, messages, "<think>x</think><action>look</action>", following) is None
    assert continuation_ids(tokenizer, messages, "<action>look</action>", following) is not None
    # the same length, other letters: positions alone would not tell
    shouting = CHATML.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}")
    assert continuation_ids(chat_tokenizer(template=shouting), messages, "look", following) is None
    # a template whose turns do not end where the sampler stops
    assert (
        continuation_ids(chat_tokenizer(template=CHATML.replace("<|im_end|>", "\n")), messages, "a", following) is None
    )


# --- replies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("<think> a\nb </think><action> Go  TO\ndesk 1 </action>", ("a\nb", "go to desk 1")),
        ("<action>look</action><action>open</action>", (None, "look")),
        ("<think></think><action></action>", ("", None)),
        ("<think>cut", (None, None)),
        ("<think>cut <action>look</action>", (None, "look")),
        ("look", (None, None)),
        ("<THINK>a</THINK><Action>b</Action>", ("a", "b")),
        ("<think>a</think><search> Who\nwas Ada </search>", ("a", "<search>Who was Ada</search>")),
        ("<think>a</think><Answer>Ada L</ANSWER>", ("a", "<answer>Ada L</answer>")),
        ("<search>a</search><answer>b</answer>", (None, "<search>a</search>")),
        ("<search> </search>", (None, None)),
        ("<search>a</answer>", (None, None)),
    ],
)
def test_parse_reply(text: str, parsed: tuple[str | None, str | None]) -> None:
    assert parse_reply(text) == parsed


def test_what_is_listed_is_admitted() -> None:
    listed = ("Look", "click[a (b) c]", "search[<your query>]", "<answer><your answer></answer>")
    for command in ("look", "click[A (b) c]", "search[a [2 pack] b]", "<answer>Ada</answer>", "<ANSWER>a\nb</answer>"):
        assert admits(listed, command)
    for command in (
        "looks",
        "click[a b c]",
        "search[]",
        "search[ ]",
        "search[a",
        "<answer></answer>",
        "<search>a</search>",
    ):
        assert not admits(listed, command)
    assert not admits((), "look")


def test_commands_with_their_own_tags_have_their_own_instruction() -> None:
    (message,) = task_messages("Who?", "", ("<search><your query></search>",))
    assert message.content.endswith(f"Commands: <search><your query></search>\n{TAGGED_FORMAT}")


def test_retrieved_text_is_shown_as_it_is() -> None:
    text = "<information>\nA game -= of =- words. Your task is to: win.\n</information>"
    assert observation_message(text, None).content == text
    assert observation_message(text.replace("information", "note"), None).content != text


REPLY = "<think>go</think><action>look</action>"


def _classes(tokenizer: PreTrainedTokenizerFast, text: str = REPLY) -> list[tuple[str, int]]:
    ids = [*encode(tokenizer, text), tokenizer.eos_token_id]
    classes = token_classes(tokenizer, ids)
    assert classes.dtype == np.int8 and len(classes) == len(ids)
    return [(decode(tokenizer, [i]), int(c)) for i, c in zip(ids, classes, strict=True)]


def test_classes_where_each_tag_is_one_token() -> None:
    assert _classes(chat_tokenizer(merges=[("g", "o")], tags=True)) == [
        ("<think>", FORMAT),
        ("go", THINK),
        ("</think>", FORMAT),
        ("<action>", FORMAT),
        *[(letter, ACTION) for letter in "look"],
        ("</action>", FORMAT),
        ("<|im_end|>", FORMAT),
    ]


@pytest.mark.parametrize("tag", ["search", "answer"])
def test_classes_of_commands_with_their_own_tags(tag: str) -> None:
    found = _classes(chat_tokenizer(), f"<think>go</think><{tag}>a b</{tag}>")
    assert [c for _, c in found] == [FORMAT] * 7 + [THINK] * 2 + [FORMAT] * 16 + [ACTION] * 3 + [FORMAT] * 10


def test_classes_where_tags_are_split_into_pieces() -> None:
    found = _classes(chat_tokenizer())
    assert [c for _, c in found] == [FORMAT] * 7 + [THINK] * 2 + [FORMAT] * 16 + [ACTION] * 4 + [FORMAT] * 10


def test_a_piece_over_the_border_of_a_tag_is_format() -> None:
    merges = [("k", "<"), (">", "l"), ("o", "<"), ("<", "/"), (">", "<")]
    found = _classes(chat_tokenizer(merges=merges))
    assert [(piece, c) for piece, c in found if len(piece) > 1] == [
        ("o<", FORMAT),
        ("><", FORMAT),
        (">l", FORMAT),
        ("k<", FORMAT),
        ("<|im_end|>", FORMAT),
    ]
    assert [piece for piece, c in found if c == THINK] == ["g"]
    assert [piece for piece, c in found if c == ACTION] == ["o", "o"]


def test_classes_of_parts_of_one_character() -> None:
    found = _classes(chat_tokenizer(tags=True), "<think>né🏠</think>é<action>é</action>")
    assert [c for _, c in found] == [FORMAT] + [THINK] * 7 + [FORMAT] * 4 + [ACTION] * 2 + [FORMAT] * 2


def test_classes_where_decoding_joins_words() -> None:
    words = ["<unk>", "<think>", "</think>", "<action>", "</action>", "go", "to", "look", "<e>"]
    word_level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, eos_token="<e>", unk_token="<unk>")
    found = _classes(tokenizer, "<think> go to </think> <action> look </action>")
    assert [c for _, c in found] == [FORMAT, THINK, THINK, FORMAT, FORMAT, ACTION, FORMAT, FORMAT]


def test_classes_where_pieces_carry_their_leading_space() -> None:
    pieces = ["<unk>", "<e>", *sorted({*"▁<>/thinkacogl"})]
    metaspace = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=metaspace, eos_token="<e>")
    found = _classes(tokenizer, "<think>go on</think><action>look</action>")
    assert [c for _, c in found] == [FORMAT] * 8 + [THINK] * 5 + [FORMAT] * 16 + [ACTION] * 4 + [FORMAT] * 10


def test_unfinished_and_second_pairs_are_format() -> None:
    assert {c for _, c in _classes(chat_tokenizer(tags=True), "<think>go")} == {FORMAT}
    found = _classes(chat_tokenizer(tags=True), "<action>a</action><action>b</action>")
    assert [piece for piece, c in found if c == ACTION] == ["a"]
    assert token_classes(chat_tokenizer(), []).shape == (0,)


def test_decode_reply_drops_only_the_end_of_turn() -> None:
    tokenizer = chat_tokenizer(tags=True)
    ids = encode(tokenizer, REPLY)
    assert decode_reply(tokenizer, [*ids, tokenizer.eos_token_id]) == REPLY == decode_reply(tokenizer, np.array(ids))
    assert decode_reply(tokenizer, []) == ""


# --- re-tokenising ---------------------------------------------------------------------------------------------------

TURNS = [(FIRST, REPLY), ("Nothing happens.", "<think>no</think><action>go to desk 1</action>")]


def test_retokenised_trajectory_is_the_conversation() -> None:
    tokenizer = chat_tokenizer()
    (segment,) = segment_from_turns(tokenizer, trajectory(TURNS), 1000)
    eos = tokenizer.eos_token_id
    assert decode(tokenizer, segment.ids) == (
        "<|im_start|>user\nTask: find a mug.\nYou are in the middle of a room. You see a desk 1.<|im_end|>\n"
        f"<|im_start|>assistant\n{TURNS[0][1]}<|im_end|>\n"
        f"<|im_start|>user\nNothing happens.<|im_end|>\n<|im_start|>assistant\n{TURNS[1][1]}<|im_end|>"
    )
    for k, (_, reply) in enumerate(TURNS):
        assert segment.ids[segment.turn == k].tolist() == [*encode(tokenizer, reply), eos]
    assert np.array_equal(segment.response_mask, segment.turn >= 0)
    assert np.array_equal(segment.response_mask, segment.token_class != TokenClass.NONE)
    assert np.isnan(segment.rollout_logprobs[segment.response_mask]).all()
    assert (segment.rollout_logprobs[~segment.response_mask] == 0).all()
    assert prompt_ids(tokenizer, segment.messages) == segment.ids[: segment.prompt_length].tolist()


def test_retokenised_trajectory_is_cut_at_a_whole_token(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = chat_tokenizer()
    (whole,) = segment_from_turns(tokenizer, trajectory(TURNS), 1000)
    with caplog.at_level(logging.INFO):
        (cut,) = segment_from_turns(tokenizer, trajectory(TURNS), whole.prompt_length + 5)
    assert np.array_equal(cut.ids, whole.ids[: whole.prompt_length + 5]) and cut.response_mask.sum() == 5
    assert f"{whole.response_mask.sum() - 5} response tokens" in caplog.text
    assert segment_from_turns(tokenizer, trajectory(TURNS), whole.prompt_length) == []
    assert segment_from_turns(tokenizer, trajectory([]), 1000) == []


def test_b08_retokenising_opens_a_segment_where_history_is_rewritten() -> None:
    tokenizer = chat_tokenizer(template=FORGETS_THOUGHTS)
    first, second = segment_from_turns(tokenizer, trajectory(TURNS), 1000)
    assert decode_reply(tokenizer, first.ids[first.response_mask]) == TURNS[0][1]
    assert decode_reply(tokenizer, second.ids[second.response_mask]) == TURNS[1][1]
    assert set(second.turn[second.response_mask].tolist()) == {1}
    assert "go</think>" not in decode(tokenizer, second.ids[: second.prompt_length])
    assert prompt_ids(tokenizer, second.messages) == second.ids[: second.prompt_length].tolist()


def test_b12_no_token_crosses_from_prompt_to_reply() -> None:
    tokenizer = chat_tokenizer(
        merges=[(".", "m")], template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )  # nothing between prompt and reply
    assert len(encode(tokenizer, ".memory")) == 6  # in one go the border is merged
    play = trajectory([("call .", "memory")], description="x")
    (segment,) = segment_from_turns(tokenizer, play, 1000)
    assert segment.ids[segment.response_mask].tolist() == [*encode(tokenizer, "memory"), tokenizer.eos_token_id]
