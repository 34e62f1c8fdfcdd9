"""A conversation of messages as segments: in a tokenizer's own ids, or with the tokens that were sampled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from diagnostics.records import Message, Segment
from diagnostics.render import continuation_ids, encode, prompt_ids, token_classes

_PASSAGES = re.compile(r"(<information>.*?</information>)", re.DOTALL)


def take_out_passages(played: Sequence[Message]) -> tuple[Message, ...]:
    """The messages with passages that stand inside a reply as messages of their own: the policy did not write them.

    Search agents that generate in one go (Search-R1) have <information>..</information> in the middle of their text.
    """
    messages: list[Message] = []
    for message in played:
        parts = _PASSAGES.split(message.content) if message.role == "assistant" else []
        if len(parts) < 2:
            messages.append(message)
            continue
        roles = ("assistant", "user")  # in turn
        messages += [Message(roles[k % 2], part.strip()) for k, part in enumerate(parts) if part.strip()]
    return tuple(messages)


def conversation_segments(tokenizer: Any, prompt: Sequence[Message], played: Sequence[Message]) -> list[Segment]:
    """A conversation in this tokenizer's ids: one segment, and a new one wherever the template rewrites its history
    or more than one message stands between two replies.

    Replies are encoded apart from their context, so that no token crosses the border and a longer context leaves their
    ids unchanged. The sampler's log-probs do not exist for these ids: NaN on the response.
    Args: prompt, the messages before the first reply; played, those from it on. What follows the last reply is left
    out.
    """
    messages = [*prompt, *played]
    replies = [k for k in range(len(prompt), len(messages)) if messages[k].role == "assistant"]
    segments: list[Segment] = []
    opening, parts = replies[0], [(prompt_ids(tokenizer, prompt), -1)]
    for turn, (index, following) in enumerate(zip(replies, [*replies[1:], None], strict=True)):
        parts.append(([*encode(tokenizer, messages[index].content), tokenizer.eos_token_id], turn))
        join = None
        if following == index + 2:
            join = continuation_ids(tokenizer, messages[:index], messages[index].content, messages[index + 1])
        if join is not None:
            parts.append((join, -1))
            continue
        ids = np.concatenate([np.asarray(part, np.int32) for part, _ in parts])
        turns = np.concatenate([np.full(len(part), k, np.int16) for part, k in parts])
        segments.append(_segment(tokenizer, messages[:opening], ids, turns, np.full(len(ids), np.nan)))
        if following is not None:
            opening, parts = following, [(prompt_ids(tokenizer, messages[:following]), -1)]
    return segments


def sampled_segment(
    tokenizer: Any,
    prompt: Sequence[Message],
    ids: Sequence[int],
    response_mask: Sequence[int],
    logprobs: Sequence[float] | None,
) -> Segment:
    """A whole conversation with its tokens as they were sampled.

    Args: prompt, the messages before the first reply; ids [T]; response_mask [T], 1 on what the policy wrote; logprobs
    [T], nats, what stands outside the mask is not read (None: unknown).
    Raises: ValueError for arrays that do not fit, ids that are not the tokenizer's, or a prompt that it renders to
    other ids.
    """
    lengths = [len(ids), len(response_mask), len(ids) if logprobs is None else len(logprobs)]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"ids, response_mask and logprobs have {', '.join(map(str, lengths))} entries, expected as many"
        )
    if not all(type(i) is int and 0 <= i < len(tokenizer) for i in ids):
        raise ValueError(f"expected ids from 0 to {len(tokenizer) - 1}, those of the tokenizer at hand")
    mask = np.array(response_mask, dtype=bool)
    if not all(m in (0, 1) for m in response_mask) or not mask.any():
        raise ValueError("expected a response_mask of 0 and 1, with 1 on what the policy wrote")
    if list(ids[: int(mask.argmax())]) != prompt_ids(tokenizer, prompt):
        raise ValueError(
            "the ids before the first reply are not what this tokenizer renders of the messages; read them with the "
            "tokenizer that made them, or leave ids out to have the messages rendered"
        )
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    turns = np.where(mask, np.cumsum(starts) - 1, -1).astype(np.int16)
    found = np.full(len(ids), np.nan) if logprobs is None else np.array(logprobs, dtype=np.float64)
    return _segment(tokenizer, prompt, np.array(ids, np.int32), turns, found)


def _segment(
    tokenizer: Any, prompt: Sequence[Message], ids: np.ndarray, turns: np.ndarray, logprobs: np.ndarray
) -> Segment:
    """Args: turns [T], -1 outside the response; logprobs [T], read on the response."""
    classes = np.zeros(len(ids), np.int8)
    for turn in range(turns.max() + 1):
        classes[turns == turn] = token_classes(tokenizer, ids[turns == turn])
    mask = turns >= 0
    return Segment(tuple(prompt), ids, mask, turns, classes, np.where(mask, logprobs, 0.0).astype(np.float32))
