"""The gap between teacher and student: its distribution, and where in an episode it lives.

gap = log p_T - log p_S of the sampled token, nats. Minus its sum over a turn estimates, from a single sample, the
KL(student || teacher) of the whole turn, where the tokens were sampled by this student at this temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from diagnostics.artifact import to_table
from diagnostics.change import CLASSES
from diagnostics.measure import Measure, Needs
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, measurement

EDGES = np.arange(-20, 21) / 20  # of the histogram, nats: -1, -0.95, .. 1, with exactly 0 among them
TURNS = 50  # later turns are counted with the last one, as the trainer does
TENTHS = 10  # of a turn, by relative position; two of them are one of the trainer's fifths

GAP_COLUMNS = {
    "trajectory": "string",
    "task": "string",
    "context": "string",
    "by": "string",  # "turn", "position", "token_class", "all"
    "at": "string",  # "1" .. "50"; middle of the tenth, "0.05" .. "0.95"; "think", "action", "format"; ""
    "n_tokens": "int64",
    "n_turns": "int64",  # turns that these tokens make up; 0 where they make up parts of turns
    "gap_sum": "float64",  # nats
    "abs_gap_sum": "float64",  # nats
    "n_negative": "int64",
}
PLACES = [("turn", str(turn + 1)) for turn in range(TURNS)]
PLACES += [("position", str((2 * tenth + 1) / (2 * TENTHS))) for tenth in range(TENTHS)]
PLACES += [("token_class", name) for name in CLASSES.values()]


@dataclass
class _Counts:
    """Sums over the tokens of one (context, trajectory), by place P, and by token class C and bin of the histogram."""

    task: str
    sums: np.ndarray  # float64 [P, 4]; tokens, gap, |gap|, gap below 0
    turns: np.ndarray  # int64 [50]
    histogram: np.ndarray  # int64 [C, 42]; the first and last bin are open
    not_finite: int = 0


@dataclass
class Gaps:
    """Streaming sums of the gap by turn, by relative position inside the turn and by token class, and its histogram.

    Bins are [left, right), so that those left of 0 hold exactly the negative gaps. The relative position of a token is
    0 for the first of its turn and 1 for the last; a turn that was cut counts as it was read. A token whose gap is not
    finite is left out and counted apart.
    Source: SDAR Fig. 2 (KL by turn) and Fig. 3 (histogram on [-1, 1]; size by ten turns; 5, 30, 55 and 80 % of a turn).
    Departures: turns are kept apart up to 50 and put together by tens later; tenths of a turn; contexts and classes.
    """

    counts: dict[tuple[str, str], _Counts] = field(default_factory=dict)

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Nothing is needed in advance."""

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds a batch of pairs, each to its own context."""
        assert passed.teacher_logprobs is not None, "gaps need teacher log-probs"
        gaps = (passed.teacher_logprobs.double() - passed.student_logprobs.detach().double()).cpu().numpy()
        row = passed.row.cpu().numpy()
        for index, pair in enumerate(pairs):
            key = pair.context, pair.trajectory_id
            if key not in self.counts:
                self.counts[key] = _Counts(
                    pair.task_id,
                    sums=np.zeros((len(PLACES), 4)),
                    turns=np.zeros(TURNS, np.int64),
                    histogram=np.zeros((len(CLASSES), len(EDGES) + 1), np.int64),
                )
            _add(self.counts[key], pair, gaps[row == index])

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """Tables `gaps` (sums by place), `gap_histogram` (tokens by bin) and `measurements` (what was not finite)."""
        rows: list[dict[str, Any]] = []
        lost: list[dict[str, Any]] = []
        histograms = [_histogram_table(*key, counts) for key, counts in self.counts.items()]
        for (context, trajectory), counts in self.counts.items():
            place = {"trajectory": trajectory, "task": counts.task, "context": context}
            rows += [{**place, **row} for row in _rows(counts)]
            if counts.not_finite:
                value = {"metric": "gap/tokens_not_finite", "value": counts.not_finite, "unit": "tokens"}
                lost.append(measurement(**asdict(provenance), **place, token_class="all", **value))
        return {
            "gaps": to_table(rows, GAP_COLUMNS),
            "gap_histogram": pa.concat_tables(histograms) if histograms else pa.table({}),
            "measurements": to_table(lost, MEASUREMENT_COLUMNS),
        }


def tenth_of_turn(turn: Int[np.ndarray, "M"]) -> Int[np.ndarray, "M"]:
    """The tenth of its turn that each token lies in, 0 .. 9, by place / (tokens of the turn - 1); 0 for an only one.

    Args: turn of each token of one segment; equal neighbours are one turn.
    """
    first = _first(turn)
    length = np.diff(first, append=len(turn))
    index = np.arange(len(turn)) - np.repeat(first, length)
    return np.minimum(index * TENTHS // np.maximum(np.repeat(length, length) - 1, 1), TENTHS - 1)


def _first(turn: np.ndarray) -> np.ndarray:
    """Places of the first token of each turn."""
    return np.flatnonzero(np.diff(turn, prepend=turn[:1] - 1))


def _add(counts: _Counts, pair: PairedSegment, gaps: np.ndarray) -> None:
    turn = np.minimum(pair.turn.astype(np.int64), TURNS - 1)
    kind = pair.token_class.astype(np.int64) - min(CLASSES)
    places = turn, TURNS + tenth_of_turn(pair.turn), TURNS + TENTHS + kind
    counts.turns += np.bincount(turn[_first(pair.turn)], minlength=TURNS)
    finite = np.isfinite(gaps)
    counts.not_finite += int((~finite).sum())
    kept = gaps[finite]
    values = np.stack([np.ones_like(kept), kept, np.abs(kept), kept < 0], axis=1)
    for place in places:
        np.add.at(counts.sums, place[finite], values)
    np.add.at(counts.histogram, (kind[finite], np.searchsorted(EDGES, kept, side="right")), 1)


def _rows(counts: _Counts) -> list[dict[str, Any]]:
    turns = [*counts.turns.tolist(), *[0] * (len(PLACES) - TURNS), int(counts.turns.sum())]
    cells = [*counts.sums, counts.sums[:TURNS].sum(0)]
    return [
        {"by": by, "at": at, "n_tokens": int(tokens), "n_turns": played}
        | {"gap_sum": gap, "abs_gap_sum": size, "n_negative": int(negative)}
        for (by, at), played, (tokens, gap, size, negative) in zip([*PLACES, ("all", "")], turns, cells, strict=True)
        if tokens
    ]


def _histogram_table(context: str, trajectory: str, counts: _Counts) -> pa.Table:
    n_classes, n_bins = counts.histogram.shape
    size = n_classes * n_bins
    return pa.table(
        {
            "trajectory": [trajectory] * size,
            "task": [counts.task] * size,
            "context": [context] * size,
            "token_class": [name for name in CLASSES.values() for _ in range(n_bins)],
            "left": np.tile(np.append(-np.inf, EDGES), n_classes),
            "right": np.tile(np.append(EDGES, np.inf), n_classes),
            "count": counts.histogram.reshape(-1),
        }
    )


MEASURE = Measure("gaps", Needs(), start=lambda subject: Gaps())
