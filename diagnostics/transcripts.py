"""Messages recovered from the text of a conversation, as logs keep it: with the special tokens or without them.

What a chat template writes in front of each role is found by rendering a conversation of known contents; without
special tokens a line such as `user` is all that is left of it, so roles are looked for in the order they must have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from diagnostics.records import Message
from diagnostics.render import decode, prompt_ids

_FOLLOWS = {"system": "user", "user": "assistant", "assistant": "user"}


@dataclass(frozen=True)
class Markers:
    """The texts that a chat template puts around contents."""

    head: dict[str, str]  # first role -> what stands in front of its content
    turn: dict[str, str]  # role before -> what stands between its content and that of the next role
    answer: str  # between the last content and the reply: `turn["user"]`, for some templates with more behind it

    def map(self, change: Callable[[str], str]) -> Markers:
        head, turn = ({role: change(text) for role, text in texts.items()} for texts in (self.head, self.turn))
        return Markers(head, turn, change(self.answer))


@dataclass(frozen=True)
class Transcript:
    """A prompt and what came of it: replies (assistant) and what was answered to them (user), in turn."""

    prompt: tuple[Message, ...]
    played: tuple[Message, ...]
    same_prompt: bool  # the prompt renders to the very text it was read from


def markers(tokenizer: Any) -> Markers:
    """The markers of a tokenizer's chat template. Raises ValueError when it hides or reorders what it is given."""
    contents = {"system": "first content", "user": "second content", "assistant": "third content"}
    spoken = [Message(role, content) for role, content in contents.items()] + [Message("user", "fourth content")]
    try:
        between = _between(tokenizer, spoken)
        head = {"system": between[0]}
    except TemplateError:  # it knows no system message
        between, head = ["", "", *_between(tokenizer, spoken[1:])[1:]], {}
    head["user"] = _between(tokenizer, spoken[1:])[0]
    turn = {"system": between[1], "user": between[2], "assistant": between[3]}
    return Markers(head, turn, between[4])


def read_transcript(tokenizer: Any, found: Markers, given: str, reply: str) -> Transcript:
    """The messages of a prompt and of the reply that continued it, which may hold further turns.

    Args: found, of `markers`; given, the prompt's text up to where the reply begins; reply, the text from there on.
    Returns: messages; a last turn without a reply is left out.
    Raises: ValueError when the prompt was not written by this chat template.
    """
    special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)

    def bare(text: str) -> str:
        for token in special:
            text = text.replace(token, "")
        return text

    if any(token in given for token in special):
        given, reply = _strip(given, tokenizer.pad_token, 0), _strip(reply, tokenizer.pad_token, -1)
        reply = reply.removesuffix(tokenizer.eos_token)
    else:
        found = found.map(bare)
        if not all(found.turn.values()):
            raise ValueError(
                "without special tokens a text of this chat template does not show who spoke; import messages instead"
            )
    prompt = tuple(_prompt(found, given))
    thought = found.answer.removeprefix(found.turn["user"])  # of the template, in front of every reply
    played = _split(found, reply, "assistant")
    if len(played) > 1 and (played[-1].role == "user" or not played[-1].content.removeprefix(thought).strip()):
        played = played[: -1 if played[-1].role == "user" else -2]
    played = [
        Message(m.role, m.content.removeprefix(thought) if m.role == "assistant" and k else m.content)
        for k, m in enumerate(played)
    ]
    rendered = decode(tokenizer, prompt_ids(tokenizer, prompt))
    return Transcript(prompt, tuple(played), bare(rendered) == bare(given))


def _prompt(found: Markers, text: str) -> list[Message]:
    ending = next((end for end in (found.answer, found.turn["user"]) if end and text.endswith(end)), None)
    first = next((role for role, head in found.head.items() if head and text.startswith(head)), None)
    if ending is None or first is None:
        begins = " or ".join(repr(head) for head in found.head.values())
        raise ValueError(
            f"the prompt is not written by this tokenizer's chat template, which begins with {begins} and ends with "
            f"{found.answer!r}; read it with the tokenizer it was made with, or import messages instead"
        )
    messages = _split(found, text[len(found.head[first]) : len(text) - len(ending)], first)
    while messages[-1].role != "user" and len(messages) > 1:  # a marker was part of what a user said
        last = messages.pop()
        joined = messages[-1].content + found.turn[messages[-1].role] + last.content
        messages[-1] = Message(messages[-1].role, joined)
    if messages[-1].role != "user":
        raise ValueError("the prompt holds no message of a user; import messages instead")
    return messages


def _split(found: Markers, text: str, role: str) -> list[Message]:
    """The messages of a text that begins with the content of `role`."""
    messages = []
    while True:
        content, marker, rest = text.partition(found.turn[role])
        messages.append(Message(role, content))
        if not marker:
            return messages
        text, role = rest, _FOLLOWS[role]


def _between(tokenizer: Any, spoken: Sequence[Message]) -> list[str]:
    """What the template writes in front of each content, and behind the last one."""
    text, pieces = decode(tokenizer, prompt_ids(tokenizer, spoken)), []
    for message in spoken:
        before, found, text = text.partition(message.content)
        if not found:
            raise ValueError(
                "the tokenizer's chat template does not write each message once, in order; import messages"
            )
        pieces.append(before)
    return [*pieces, text]


def _strip(text: str, token: str | None, end: int) -> str:
    while token and (text.startswith(token) if end == 0 else text.endswith(token)):
        text = text.removeprefix(token) if end == 0 else text.removesuffix(token)
    return text
