"""Messages -> token ids: the only module that templates text.

Everything a policy reads is written here: the task prompt, later observations, the skill block, and, through the
tokenizer's own chat template, the ids. Everything it writes is read here: its thought, its command, and the class of
each of its tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from diagnostics.records import Message, Segment, TokenClass, Trajectory, Turn

log = logging.getLogger(__name__)

SKILL = "Skill: "
TASK = "Task: "
COMMANDS = "Commands: "
REPLY_FORMAT = (  # only beside a list of commands: a policy that plays without one was taught the format
    "First think briefly inside <think></think>. Then give exactly one of the commands inside <action></action>."
)
TAGGED_FORMAT = "First think briefly inside <think></think>. Then give exactly one of the commands, with its tags."

_BANNER = re.compile(r"-=.*?=-\s*")
_TASK_SENTENCE = re.compile(r"\s*Your task is to:.*", re.DOTALL)
_THINK = re.compile(r"<think>(?P<text>.*?)</think>", re.DOTALL | re.IGNORECASE)
# Search-QA's commands have tags of their own, all others stand inside <action></action>.
_ACTION = re.compile(r"<(?P<tag>action|search|answer)>(?P<text>.*?)</(?P=tag)>", re.DOTALL | re.IGNORECASE)
_RETRIEVED = "<information>"
_FREE = re.compile(r"<your [a-z ]+>")


# --- prompts ---------------------------------------------------------------------------------------------------------


def task_messages(
    description: str, observation: str, admissible: Sequence[str] | None, skill: str | None = None
) -> tuple[Message, ...]:
    """The first prompt of an episode: one user message with the task and what is seen.

    Args: observation, the environment's first one (banner and task sentence are taken out); admissible, the commands
    to list, None to list none and to leave out the format instruction.
    """
    lines = [TASK + description, _scene(observation), *_command_lines(admissible, instruct=True)]
    return place_skill((Message("user", "\n".join(lines)),), skill)


def observation_message(observation: str, admissible: Sequence[str] | None) -> Message:
    """A later user message of one growing conversation."""
    return Message("user", "\n".join([_scene(observation), *_command_lines(admissible, instruct=False)]))


def windowed_messages(
    description: str,
    step_index: int,
    history: Sequence[Turn],
    observation: str,
    admissible: Sequence[str] | None,
    skill: str | None = None,
) -> tuple[Message, ...]:
    """The prompt of one turn under `windowed`: task, steps so far, the last turns, the current observation, commands.

    Args: step_index, turns already played; history, the last of them that are shown, oldest first. The first turn's
    prompt equals `task_messages`.
    """
    if step_index == 0:
        return task_messages(description, observation, admissible, skill)
    lines = [TASK + description, f"You have taken {step_index} steps. The last {len(history)}:"]
    for number, turn in enumerate(history, start=step_index - len(history) + 1):
        lines += [f"Observation {number}: {_scene(turn.observation)}", f"Action {number}: {turn.action or 'none'}"]
    lines += [f"Now at step {step_index + 1}: {_scene(observation)}", *_command_lines(admissible, instruct=True)]
    return place_skill((Message("user", "\n".join(lines)),), skill)


def place_skill(messages: Sequence[Message], skill_text: str | None) -> tuple[Message, ...]:
    """Puts the skill block at the start of the first user message, in front of the task text.

    An empty skill leaves the messages, and so their ids, unchanged. Raises ValueError without a user message.
    Source: PR-OPD (the hindsight-conditioned teacher prompt); ours for the other methods, see docs/methods.md.
    """
    messages = tuple(messages)
    if not skill_text or not skill_text.strip():
        return messages
    for index, message in enumerate(messages):
        if message.role == "user":
            placed = Message("user", f"{SKILL}{skill_text.strip()}\n{message.content}")
            return (*messages[:index], placed, *messages[index + 1 :])
    raise ValueError(f"no user message to place the skill in; the prompt has roles {[m.role for m in messages]}")


def _scene(observation: str) -> str:
    if observation.startswith(_RETRIEVED):  # whatever a passage says
        return observation.strip()
    return _TASK_SENTENCE.sub("", _BANNER.sub("", observation)).strip()


def _command_lines(admissible: Sequence[str] | None, *, instruct: bool) -> list[str]:
    if admissible is None:
        return []
    listed = COMMANDS + "; ".join(command for command in admissible if command != "help")
    tagged = any(command.startswith("<") for command in admissible)
    return [listed, TAGGED_FORMAT if tagged else REPLY_FORMAT] if instruct else [listed]


# --- ids -------------------------------------------------------------------------------------------------------------


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text` alone, special tokens recognised, none added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> str:
    """The exact text of `ids`, special tokens included."""
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def decode_reply(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> str:
    """The text of a generated reply without its end-of-turn token."""
    ids = [int(i) for i in ids]
    return decode(tokenizer, ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids)


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of the messages through the chat template, generation prompt included.

    A BOS stands in front exactly once where the template or the tokenizer asks for one. Raises ValueError when the
    tokenizer has no chat template or the template doubles the BOS.
    """
    ids = encode(tokenizer, _template(tokenizer, messages))
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    adds_bos = list(tokenizer("")["input_ids"])[:1] == [bos]
    if adds_bos and ids[:1] != [bos]:
        ids = [bos, *ids]
    if ids[:2] == [bos, bos]:
        raise ValueError(
            f"the prompt starts with two {tokenizer.bos_token!r} tokens; take it out of one of the chat template and "
            "the messages"
        )
    return ids


def continuation_ids(
    tokenizer: Any, messages: Sequence[Message], reply_text: str, next_message: Message
) -> list[int] | None:
    """Ids that lead from the end-of-turn token of a reply to the next generation in one growing conversation.

    Args: messages, what the reply answered; reply_text, its text without the end-of-turn token (a reply that was cut
    before that token needs it appended, outside the response mask).
    Returns the template's closing newline, the next user message and the generation prompt; None when the template
    rewrites its history, so that the rendered conversation no longer starts with the tokens in hand: open a new
    segment there.
    """
    told = _template(tokenizer, messages) + reply_text
    grown = _template(tokenizer, [*messages, Message("assistant", reply_text), next_message])
    if not grown.startswith(told + tokenizer.eos_token):
        return None
    end, *ids = encode(tokenizer, grown[len(told) :])
    return ids if end == tokenizer.eos_token_id else None


def _template(tokenizer: Any, messages: Sequence[Message]) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r} has no chat template; set "
            "tokenizer.chat_template or use an instruct model"
        )
    return tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,  # Qwen3's own think block; other templates ignore it
    )


# --- replies ---------------------------------------------------------------------------------------------------------


def parse_reply(text: str) -> tuple[str | None, str | None]:
    """(thought, command) of a reply: the first <think>..</think> and the first <action>..</action>.

    The command is lower-cased with its whitespace collapsed; None where the tags are missing or the command is empty.
    <search>..</search> and <answer>..</answer> are commands too: they keep their tags and their case.
    """
    think, action = _THINK.search(text), _ACTION.search(text)
    words, tag = (" ".join(action["text"].split()), action["tag"].lower()) if action else ("", "")
    command = words.lower() if tag == "action" else f"<{tag}>{words}</{tag}>"
    return think[1].strip() if think else None, command if words else None


def admits(admissible: Sequence[str], command: str) -> bool:
    """Whether a command is among those that an environment lists, whatever the case of its letters.

    What is listed may leave room for the policy's own words: `search[<your query>]` admits any query but an empty one.
    """
    if command.lower() in {listed.lower() for listed in admissible}:
        return True
    open_ended = (_FREE.split(listed) for listed in admissible if _FREE.search(listed))
    patterns = (r"\s*\S.*".join(re.escape(part) for part in parts) for parts in open_ended)
    return any(re.fullmatch(pattern, command, re.DOTALL | re.IGNORECASE) for pattern in patterns)


def token_classes(tokenizer: Any, response_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """TokenClass of each token of one reply; the spans are those of `parse_reply`.

    A token that holds any character of a tag is FORMAT, also where a tag is split over several pieces or a piece
    reaches over the border; so are the end-of-turn token and whatever stands outside both pairs of tags.
    Returns int8 [M].
    """
    ids = [int(i) for i in response_ids]
    text, spans = _character_spans(tokenizer, ids)
    classes = np.full(len(text), TokenClass.FORMAT, dtype=np.int8)
    for match, token_class in ((_THINK.search(text), TokenClass.THINK), (_ACTION.search(text), TokenClass.ACTION)):
        if match:
            classes[match.start() : match.end()] = TokenClass.FORMAT
            classes[slice(*match.span("text"))] = token_class
    out = np.full(len(ids), TokenClass.FORMAT, dtype=np.int8)
    for index, (start, end) in enumerate(spans):
        covered = classes[start:end]
        if covered.size and not (covered == TokenClass.FORMAT).any():
            out[index] = covered[0]
    return out


def _character_spans(tokenizer: Any, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of `ids` and the characters that each id contributes to."""
    text = decode(tokenizer, ids)
    pieces = [decode(tokenizer, [i]) for i in ids]
    if "".join(pieces) == text:
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    else:  # pieces that decode differently alone: parts of one character, leading spaces, joined words
        ends = [len(decode(tokenizer, ids[: i + 1])) for i in range(len(ids))]
    starts = [0, *ends][:-1]
    # a further part of a character already counted adds no length: it belongs to that character
    return text, [(min(start, max(end - 1, 0)), end) for start, end in zip(starts, ends, strict=True)]


# --- re-tokenising ---------------------------------------------------------------------------------------------------


def segment_from_turns(tokenizer: Any, trajectory: Trajectory, max_tokens: int) -> list[Segment]:
    """A trajectory as one growing conversation in ANOTHER tokenizer's ids, from its texts.

    Replies are encoded apart from their context, so that no token crosses the border and a longer context leaves
    their ids unchanged. Each segment is cut after `max_tokens` tokens, and left out where the cut spares no reply.
    The sampler's log-probs do not exist for these ids: NaN on the response.
    """
    if not trajectory.turns:
        return []
    segments: list[Segment] = []
    cut = 0
    messages: list[Message] = list(task_messages(trajectory.description, trajectory.turns[0].observation, None))
    parts: list[tuple[list[int], int]] = [(prompt_ids(tokenizer, messages), -1)]  # (ids, turn or -1)
    opening = tuple(messages)
    for k, turn in enumerate(trajectory.turns):
        parts.append(([*encode(tokenizer, turn.response), tokenizer.eos_token_id], k))
        following = trajectory.turns[k + 1] if k + 1 < len(trajectory.turns) else None
        join = None
        if following is not None:
            message = observation_message(following.observation, None)
            join = continuation_ids(tokenizer, messages, turn.response, message)
            messages += [Message("assistant", turn.response), message]
        if join is not None:
            parts.append((join, -1))
            continue
        segment, lost = _assemble(tokenizer, opening, parts, max_tokens)
        cut += lost
        segments += [segment] if segment.response_mask.any() else []
        if following is not None:  # the template rewrote its history
            opening, parts = tuple(messages), [(prompt_ids(tokenizer, messages), -1)]
    if cut:
        log.info("trajectory %s: %d response tokens behind token %d are left out", trajectory.id, cut, max_tokens)
    return segments


def _assemble(
    tokenizer: Any, messages: tuple[Message, ...], parts: list[tuple[list[int], int]], max_tokens: int
) -> tuple[Segment, int]:
    ids = np.concatenate([np.asarray(part, dtype=np.int32) for part, _ in parts])
    turn = np.concatenate([np.full(len(part), k, dtype=np.int16) for part, k in parts])
    token_class = np.concatenate(
        [token_classes(tokenizer, part) if k >= 0 else np.zeros(len(part), np.int8) for part, k in parts]
    )
    kept = slice(max_tokens)
    mask = turn >= 0
    logprobs = np.where(mask, np.nan, 0.0).astype(np.float32)
    segment = Segment(messages, ids[kept], mask[kept], turn[kept], token_class[kept], logprobs[kept])
    return segment, int(mask[max_tokens:].sum())
