"""Trajectories that were made elsewhere: messages as JSONL, and the rollout and validation dumps of verl.

messages   one episode a line: {"messages": [{"role": .., "content": ..}, ..], "reward": 1.0}, and if known "success",
           "id", "task", "task_type", "description", "env", "step"; and "ids", "response_mask" and "logprobs" of the
           whole conversation where the sampled tokens were kept
verl       <step>.jsonl of trainer.rollout_data_dir or trainer.validation_data_dir: {"input", "output", "score", "step",
           ..}, texts without special tokens; rows that share <uid>_<rollout> of "uid" are one episode, in their order

Token ids that are not there are rendered from the texts with the tokenizer and chat template at hand, and `Imported`
says so: they need not be those that were sampled. Source: field names as written by verl up to 0.9; the rest ours.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from diagnostics.conversations import conversation_segments, sampled_segment, take_out_passages
from diagnostics.records import Message, Segment, Skill, Trajectory, Turn
from diagnostics.render import parse_reply
from diagnostics.transcripts import markers, read_transcript

ROLES = ("system", "user", "assistant", "tool")
IMPORTED = "imported"  # env and split of episodes that name none


@dataclass(frozen=True)
class Imported:
    """Imported episodes, and what was assumed about them."""

    trajectories: list[Trajectory]
    rendered: int  # episodes whose token ids were made here, from their texts
    remarks: list[str]  # sentences for the report; empty when everything was said by the file


@dataclass(frozen=True)
class _Row:
    """One line of a file. `where` names it in errors."""

    where: str
    number: int
    file: Path
    fields: Mapping[str, Any]


def import_trajectories(path: str | Path, tokenizer: Any) -> Imported:
    """Episodes of a JSONL file, or of all *.jsonl files of a folder, for `diagnose`; the form is told by its fields.

    Args: tokenizer, of the model that will read them, with its chat template.
    Returns: episodes in the order of the files (by number where they are named so) and lines.
    Raises: ValueError naming file and line for what cannot be read.
    """
    rows, notes = list(_rows(Path(path))), Counter[str]()
    episodes = _messages_episodes if "messages" in rows[0].fields else _verl_episodes
    trajectories = _grouped(episodes(rows, tokenizer, notes))
    remarks = [text.format(notes[name], len(trajectories)) for name, text in _REMARKS.items() if notes[name]]
    return Imported(trajectories, notes["rendered"], remarks)


def import_skills(path: str | Path, trajectories: Sequence[Trajectory]) -> tuple[dict[str, Skill], list[str]]:
    """Skills of a JSONL file with a line {"trajectory": id, "skill": text} for each.

    Returns: skills by trajectory id, and remarks for the report.
    Raises: ValueError naming file and line for what cannot be read; or when no line is of one of the trajectories.
    """
    known = {trajectory.id: trajectory for trajectory in trajectories}
    skills, others = {}, 0
    for row in _rows(Path(path)):
        name, text = row.fields.get("trajectory"), row.fields.get("skill")
        with _named(row):
            if not isinstance(name, str) or not isinstance(text, str) or not text.strip():
                raise ValueError('expected {"trajectory": id, "skill": text}, both texts and not empty')
            if name in skills:
                raise ValueError(f"trajectory {name!r} has a skill already, in a line above; keep one of them")
        if name in known:
            skills[name] = Skill(text, "hindsight", known[name].task_id, name, known[name].success)
        else:
            others += 1
    if not skills:
        some = min(known, default="")
        raise ValueError(f"no skill of {path} is of a trajectory that is read, whose ids are like {some!r}")
    remarks = [f"{others} imported skills are of trajectories that are not read and were left out."] if others else []
    return skills, remarks


_REMARKS = {
    "rendered": "Token ids of {} of {} imported trajectories were rendered from their texts with this tokenizer: they "
    "need not be those that were sampled, and there are no sampler's log-probs.",
    "success": "Success of {} of {} imported trajectories was not given and is taken as a reward above 0.",
    "task": "The task of {} of {} imported trajectories was not given; those with the same first prompt share one.",
    "passages": "Replies of {} of {} imported trajectories hold passages in <information> tags, which are read as what "
    "was answered to the search: the policy did not write them.",
    "untagged": "{} of {} imported trajectories have no <action> tags: the whole reply counts as what was done.",
    "other_prompt": "{} prompts of {} imported trajectories render to another text here than in the dump.",
}


@contextmanager
def _named(row: _Row) -> Iterator[None]:
    """Whatever is wrong with a row is said with its file and line."""
    try:
        yield
    except TemplateError as error:
        raise ValueError(f"{row.where}: the tokenizer's chat template refuses the conversation ({error})") from None
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from None


# --- messages --------------------------------------------------------------------------------------------------------


def _messages_episodes(rows: Sequence[_Row], tokenizer: Any, notes: Counter[str]) -> list[Trajectory]:
    found = []
    for row in rows:
        with _named(row):
            prompt, told = _messages(row.fields)
            played = take_out_passages(told)
            notes["passages"] += played != told
            if "ids" in row.fields:
                segments = [_sampled(row.fields, prompt, tokenizer)]
            else:
                segments = conversation_segments(tokenizer, prompt, played)
                notes["rendered"] += 1
            name = str(row.fields.get("id", f"{row.file.stem}-{row.number}"))
            reward = _number(row.fields, "reward")
            found.append(_episode(row.fields, name, _turns(prompt, played), segments, reward, notes))
    return found


def _messages(fields: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages before the first reply, and those from it on."""
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError("there is no list of messages, expected [{role, content}, ...]")
    messages = []
    for place, message in enumerate(given, start=1):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part.get("text") for part in content]  # parts, as some interfaces write them
            content = "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(
                f"message {place} has role {role!r} and a {type(content).__name__} as content, expected a role of "
                f"{', '.join(ROLES)} and a text; write calls of tools into the text"
            )
        messages.append(Message(role, content))
    roles = [message.role for message in messages]
    if "assistant" not in roles or "user" not in roles[: roles.index("assistant")]:
        raise ValueError(f"expected a user message and an assistant's reply behind it, got roles {', '.join(roles)}")
    first = roles.index("assistant")
    return tuple(messages[:first]), tuple(messages[first:])


def _sampled(fields: Mapping[str, Any], prompt: Sequence[Message], tokenizer: Any) -> Segment:
    ids, mask, logprobs = (fields.get(name) for name in ("ids", "response_mask", "logprobs"))
    known = logprobs is None or (isinstance(logprobs, list) and all(isinstance(x, int | float) for x in logprobs))
    if not isinstance(ids, list) or not isinstance(mask, list) or not known:
        raise ValueError(
            "beside ids there must be a response_mask, and logprobs if they are known, as lists; leave ids out to have "
            "the messages rendered"
        )
    return sampled_segment(tokenizer, prompt, ids, mask, logprobs)


# --- verl ------------------------------------------------------------------------------------------------------------


def _verl_episodes(rows: Sequence[_Row], tokenizer: Any, notes: Counter[str]) -> list[Trajectory]:
    written, found = markers(tokenizer), []
    for name, task, lines in _sessions(rows):
        turns: list[Turn] = []
        segments: list[Segment] = []
        inside = False
        for row in lines:
            given, reply = row.fields.get("input"), row.fields.get("output")
            with _named(row):
                if not isinstance(given, str) or not isinstance(reply, str):
                    raise ValueError("there are neither messages nor an input and an output of text")
                read = read_transcript(tokenizer, written, given, reply)
                played = take_out_passages(read.played)
                made = conversation_segments(tokenizer, read.prompt, played)
                inside |= played != read.played
            segments += [replace(part, turn=np.where(part.response_mask, part.turn + len(turns), -1)) for part in made]
            turns += _turns(read.prompt, played)
            notes["other_prompt"] += not read.same_prompt
        fields = {"task": task, **lines[-1].fields} if task else dict(lines[-1].fields)
        if isinstance(fields.get("acc"), int | float):  # of the reward function: whether the answer is right
            fields.setdefault("success", bool(fields["acc"]))
        notes["rendered"] += 1
        notes["passages"] += inside
        with _named(lines[-1]):
            found.append(_episode(fields, name, turns, segments, _number(fields, "score"), notes))
    return found


def _sessions(rows: Sequence[_Row]) -> list[tuple[str, str, list[_Row]]]:
    """Rows of one episode together: its id, its task ("": unknown), its rows in order."""
    found: dict[str, tuple[str, str, list[_Row]]] = {}
    for row in rows:
        uid = str(row.fields.get("uid", "")).rsplit("_", 2)  # <task>_<rollout>_<output>
        joined = len(uid) == 3 and uid[1].isdigit() and uid[2].isdigit()
        name = f"{row.file.stem}-{f'{uid[0]}_{uid[1]}' if joined else row.number}"
        found.setdefault(name, (name, uid[0] if joined else "", []))[2].append(row)
    return [
        (name, task, sorted(lines, key=lambda row: int(str(row.fields["uid"]).rpartition("_")[2])) if task else lines)
        for name, task, lines in found.values()
    ]


# --- both ------------------------------------------------------------------------------------------------------------


def _turns(prompt: Sequence[Message], played: Sequence[Message]) -> list[Turn]:
    """One turn a reply; where no reply of the conversation has <action> tags, all of it is what was done."""
    replies = [message.content for message in played if message.role == "assistant"]
    tagged = any(parse_reply(reply)[1] is not None for reply in replies)
    turns, seen = [], prompt[-1].content
    for message in played:
        if message.role == "assistant":
            command = parse_reply(message.content)[1] if tagged else message.content.strip()
            turns.append(Turn(seen, (), message.content, command or "", bool(command)))
        else:
            seen = message.content
    return turns


def _episode(
    fields: Mapping[str, Any],
    name: str,
    turns: Sequence[Turn],
    segments: Sequence[Segment],
    reward: float,
    notes: Counter[str],
) -> Trajectory:
    success = fields.get("success")
    if success is None:
        notes["success"] += 1
        success = reward > 0
    if success not in (0, 1):  # False and True among them
        raise ValueError(f"success is {success!r}, expected true or false")
    notes["task"] += "task" not in fields
    notes["untagged"] += all(turn.action == turn.response.strip() for turn in turns)
    prompt = segments[0].messages
    digest = hashlib.sha256(json.dumps([[m.role, m.content] for m in prompt]).encode()).hexdigest()
    asked = next(message.content for message in prompt if message.role == "user")
    return Trajectory(
        id=name,
        task_id=str(fields.get("task", f"task-{digest[:12]}")),
        task_type=str(fields.get("task_type", "")),
        env=str(fields.get("env", IMPORTED)),
        split=IMPORTED,
        description=str(fields.get("description", asked)).strip(),
        group=0,  # set by _grouped
        attempt=0,
        seed=0,
        step=int(_number(fields, "step")) if "step" in fields else 0,
        turns=tuple(turns),
        segments=tuple(segments),
        reward=reward,
        success=bool(success),
        stop_reason="won" if success else "done",
        first_observation_sha256=hashlib.sha256(turns[0].observation.encode()).hexdigest(),
    )


def _grouped(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Tasks numbered as they come, and their attempts. Raises ValueError on an id that stands twice."""
    doubled = [name for name, count in Counter(t.id for t in trajectories).items() if count > 1]
    if doubled:
        raise ValueError(f"the id {doubled[0]!r} stands for two episodes; give each its own, or leave ids out")
    groups = {task: group for group, task in enumerate(dict.fromkeys(t.task_id for t in trajectories))}
    attempts: Counter[str] = Counter()
    numbered = []
    for trajectory in trajectories:
        numbered.append(replace(trajectory, group=groups[trajectory.task_id], attempt=attempts[trajectory.task_id]))
        attempts[trajectory.task_id] += 1
    return numbered


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, expected a number")
    return float(value)


def _rows(path: Path) -> Iterator[_Row]:
    files = sorted(path.glob("*.jsonl"), key=lambda file: (not file.stem.isdigit(), len(file.stem), file.stem))
    files = files if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(
            f"there is no JSONL file {path}, nor one in such a folder; give what is to be imported as *.jsonl"
        )
    empty = True
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"{file} is no text in UTF-8; give what is to be imported as *.jsonl") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"line {number} of {file}"
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error.msg} at character {error.pos + 1})") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{where} holds a {type(fields).__name__}, expected an object with named fields")
            empty = False
            yield _Row(where, number, file, fields)
    if empty:
        raise ValueError(f"{path} holds nothing to import")
