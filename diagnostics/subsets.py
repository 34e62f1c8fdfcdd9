"""Small fixed subsets of what is read, chosen by hashes of names, so that no order or size of the rest matters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from diagnostics.paired import PairedSegment
from diagnostics.records import Segment, Trajectory

PREPARED = 32  # segments of the first pass
TURNS = 24  # single turns given to the measures that run the model themselves
TURN_TOKENS = 256  # of the student's context and the turn


def prepared_segments(rows: Sequence[tuple[Trajectory, Segment]]) -> list[tuple[Trajectory, Segment]]:
    """The first 32 segments in the order of the hash of their trajectory id. Source: ours."""
    return sorted(rows, key=lambda row: _hash(row[0].id))[:PREPARED]


def cut_segment(segment: Segment, tokens: int | None) -> Segment:
    """The first tokens of a segment; all of them for None."""
    arrays = ("ids", "response_mask", "turn", "token_class", "rollout_logprobs")
    return replace(segment, **{name: getattr(segment, name)[:tokens] for name in arrays})


def single_turns(pairs: Mapping[str, Sequence[PairedSegment]]) -> tuple[dict[str, list[PairedSegment]], int]:
    """The first 24 single turns of at most 256 tokens, in the order of the hash of trajectory id and turn.

    A turn of a growing conversation is the conversation up to its end, with its own tokens as the only response.
    Source: ours.
    Args: pairs, context -> pairs in one order of segments; a segment without a teacher context in any of them is
    passed over, so that all contexts hold the same turns.
    Returns: context -> pairs, and how many turns were longer.
    """
    chosen, too_long = [], 0
    for row in zip(*pairs.values(), strict=True):
        if any(pair.teacher_ids is None for pair in row):
            continue
        for turn in np.unique(row[0].turn).tolist():
            end = int(row[0].student_positions[row[0].turn == turn][-1]) + 1
            too_long += end > TURN_TOKENS
            if end <= TURN_TOKENS:
                chosen.append((_hash(f"{row[0].trajectory_id} {turn}"), turn, row))
    chosen.sort(key=lambda item: item[0])
    kept = [[_single_turn(pair, turn) for pair in row] for _, turn, row in chosen[:TURNS]]
    return {name: [row[place] for row in kept] for place, name in enumerate(pairs)}, too_long


def _single_turn(pair: PairedSegment, turn: int) -> PairedSegment:
    mine = pair.turn == turn
    student, teacher = pair.student_positions[mine], pair.teacher_positions
    assert pair.teacher_ids is not None and teacher is not None, "a pair without a teacher context has no such turn"
    return replace(
        pair,
        student_ids=pair.student_ids[: student[-1] + 1],
        teacher_ids=pair.teacher_ids[: teacher[mine][-1] + 1],
        student_positions=student,
        teacher_positions=teacher[mine],
        response_ids=pair.response_ids[mine],
        turn=pair.turn[mine],
        token_class=pair.token_class[mine],
    )


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()
