"""Two whole episodes token by token: text, log-probs, hidden change by block, and the weight each method gives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from diagnostics.artifact import to_table
from diagnostics.change import CLASSES, hidden_change
from diagnostics.measure import Measure, Needs, Subject
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import Provenance, Trajectory
from diagnostics.render import decode

EPISODES = 2
LEFT_OUT = ("floor",)  # it reads what `none` reads

TOKEN_COLUMNS = {
    "trajectory": pa.string(),
    "task": pa.string(),
    "context": pa.string(),
    "segment": pa.int32(),  # 0 for the first one that any context reads
    "index": pa.int32(),  # over all segments of the trajectory in this context, in the order of reading
    "turn": pa.int32(),
    "text": pa.string(),  # joined over the tokens of a turn: the reply; "" inside a character that later tokens end
    "token_class": pa.string(),
    "student_logprob": pa.float32(),  # nats
    "teacher_logprob": pa.float32(),  # nats
    "gap": pa.float32(),  # nats
    "hidden_change": pa.list_(pa.float32()),  # 1 - cosine, raw, one a block
}
WEIGHT = "weight/"  # in front of a method's name: float32, dimensionless
CONTEXT_COLUMNS = {"trajectory": "string", "context": "string", "text": "string", "description": "string"}
CONTEXT_COLUMNS |= {"success": "bool"}


@dataclass(frozen=True, eq=False)
class _Read:
    """One segment as it was read in one context."""

    pair: PairedSegment
    student: np.ndarray  # float32 [M]
    teacher: np.ndarray  # float32 [M]
    change: np.ndarray  # float32 [M, L]


@dataclass
class Tokens:
    """Keeps every response token of two episodes in every context but `floor`; nothing of the others.

    The episodes are the first two in the order of the sha256 of their trajectory id, those that were
    played and have a skill first, so that no order and no number of trajectories matters. Source: ours.
    """

    subject: Subject
    read: dict[tuple[str, str], list[_Read]] = field(default_factory=dict)  # by context and trajectory

    def __post_init__(self) -> None:
        self.episodes = {trajectory.id: trajectory for trajectory in chosen(self.subject)}

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Nothing is needed in advance."""

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Keeps the segments of the two episodes in this batch."""
        for index, pair in enumerate(pairs):
            if pair.trajectory_id not in self.episodes or pair.context in LEFT_OUT:
                continue
            assert passed.student_states is not None and passed.teacher_states is not None, "tokens need states"
            assert passed.teacher_logprobs is not None, "tokens need teacher log-probs"
            mine = passed.row == index
            change = hidden_change(passed.student_states[:, mine].detach(), passed.teacher_states[:, mine]).T
            values = passed.student_logprobs[mine].detach(), passed.teacher_logprobs[mine], change
            arrays = [each.float().cpu().numpy() for each in values]
            self.read.setdefault((pair.context, pair.trajectory_id), []).append(_Read(pair, *arrays))

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """Tables `tokens` (a row a response token and context) and `token_contexts` (the text that stood in each)."""
        starts: dict[str, set[int]] = {}
        for (_, trajectory), reads in self.read.items():
            starts.setdefault(trajectory, set()).update(_start(read) for read in reads)
        tables, contexts = [], []
        for (context, trajectory), reads in sorted(self.read.items(), key=lambda item: self._order(*item[0])):
            reads.sort(key=_start)
            segment = {start: place for place, start in enumerate(sorted(starts[trajectory]))}
            tables.append(self._table(reads, [segment[_start(read)] for read in reads]))
            episode = self.episodes[trajectory]
            about = {"description": episode.description, "success": episode.success}
            text = self.subject.texts.get(context, {}).get(trajectory, "")
            contexts.append({"trajectory": trajectory, "context": context, "text": text, **about})
        tokens = pa.concat_tables(tables) if tables else pa.schema(list(TOKEN_COLUMNS.items())).empty_table()
        return {"tokens": tokens, "token_contexts": to_table(contexts, CONTEXT_COLUMNS)}

    def _order(self, context: str, trajectory: str) -> tuple[int, int]:
        return list(self.episodes).index(trajectory), list(self.subject.texts).index(context)

    def _table(self, reads: Sequence[_Read], segments: Sequence[int]) -> pa.Table:
        """The tokens of one episode in one context."""
        pairs = [read.pair for read in reads]
        lengths = [len(pair.response_ids) for pair in pairs]
        turn = np.concatenate([pair.turn for pair in pairs])
        student, teacher, change = (
            np.concatenate([getattr(read, name) for read in reads]) for name in ("student", "teacher", "change")
        )
        gap = teacher - student
        columns: dict[str, Any] = {
            "trajectory": [pairs[0].trajectory_id] * len(gap),
            "task": [pairs[0].task_id] * len(gap),
            "context": [pairs[0].context] * len(gap),
            "segment": np.repeat(segments, lengths),
            "index": np.arange(len(gap)),
            "turn": turn,
            "text": [text for pair in pairs for text in _turn_texts(self.subject.tokenizer, pair)],
            "token_class": [CLASSES[kind] for pair in pairs for kind in pair.token_class.tolist()],
            "student_logprob": student,
            "teacher_logprob": teacher,
            "gap": gap,
            "hidden_change": list(change),
        }
        arrays = {name: pa.array(values, TOKEN_COLUMNS[name]) for name, values in columns.items()}
        # one trajectory is one row: methods that compare the turns of an episode see all of them, and (row, turn) still
        # names a response
        where = torch.from_numpy(turn.astype(np.int64)), torch.zeros(len(gap), dtype=torch.int64)
        for name, weight in self.subject.weights.items():
            values = weight(torch.from_numpy(gap), *where)
            arrays[WEIGHT + name] = pa.array(values.float().numpy(), pa.float32())
        return pa.table(arrays)


def chosen(subject: Subject) -> list[Trajectory]:
    """The episodes that are kept, in the order of the hash of their id."""

    def rank(trajectory: Trajectory) -> tuple[bool, bytes]:
        empty = not (trajectory.segments or trajectory.turns) or not subject.skills.get(trajectory.id, "").strip()
        return empty, hashlib.sha256(trajectory.id.encode()).digest()

    return sorted(subject.trajectories, key=rank)[:EPISODES]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the tokens before it; joined they are the decoded text.

    A character that is spread over several tokens belongs to the one that completes it; the others read "".
    """
    whole = decode(tokenizer, ids)
    pieces = [decode(tokenizer, [i]) for i in ids]
    if "".join(pieces) == whole:
        return pieces
    pieces, settled = [], 0
    for count in range(1, len(ids) + 1):  # what the first tokens say and the rest leaves as it is
        beside = zip(decode(tokenizer, ids[:count])[settled:], whole[settled:], strict=False)
        pieces.append("".join(said for said, _ in takewhile(lambda pair: pair[0] == pair[1], beside)))
        settled += len(pieces[-1])
    return pieces


def _turn_texts(tokenizer: Any, pair: PairedSegment) -> Iterator[str]:
    tokens = zip(pair.turn.tolist(), pair.response_ids.tolist(), strict=True)
    for _, same in groupby(tokens, key=lambda token: token[0]):
        yield from token_texts(tokenizer, [token for _, token in same])


def _start(read: _Read) -> int:
    """The first turn of a segment, which no other segment of its trajectory shares."""
    return int(read.pair.turn[0])


MEASURE = Measure("tokens", Needs(states=True), Tokens)
