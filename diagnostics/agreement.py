"""Agreement of weights with an expert: are action tokens that an expert accepts weighted more than others?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from diagnostics.artifact import to_table
from diagnostics.measure import Measure, Needs, Subject
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import Provenance, Trajectory
from diagnostics.weighing import TurnGaps, weigh

CONTEXT = "own_skill"
BINS = 8192  # of equal width in w / (1 + |w|): steps of w of 0.00024 at 0, 0.00055 at 0.5, 0.001 at 1

NO_VERDICT = "no expert judges this episode"
NO_TEACHER = "no turn was read with its own skill"
NO_ACTION = "no action token of a turn with a verdict"

AGREEMENT_COLUMNS = {
    "trajectory": "string",
    "task": "string",
    "context": "string",
    "method": "string",  # "" in the row of a trajectory that has no weight to compare
    "bin": "int64",  # see `bins_of`; ascends with the weight
    "weight": "float64",  # lower edge of the bin
    "accepted": "int64",  # action tokens of turns that the expert accepts
    "rejected": "int64",
    "not_finite": "int64",  # action tokens left out; the same in every row of a trajectory and method
    "undefined": "string",  # the reason, "" for a count
}


@dataclass
class Agreement:
    """How the weights of action tokens are distributed under the own skill, by the expert's verdict on their turn.

    Source: ours (PCSD Fig. 6, its alignment analysis, is not described).
    """

    subject: Subject
    seen: TurnGaps = field(default_factory=TurnGaps)

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Nothing is needed in advance."""

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds the gaps of a batch under the own skill."""
        if pairs[0].context == CONTEXT:
            self.seen.add(pairs, passed)

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """Table agreement: a row for each trajectory, method and bin of weights that holds a token, and one for each
        trajectory without any, with the reason."""
        trajectories = self.subject.trajectories if self.subject.weights else ()
        rows = [
            {"trajectory": trajectory.id, "task": trajectory.task_id, "context": CONTEXT, **row}
            for trajectory in trajectories
            for row in self._rows(trajectory)
        ]
        return {"agreement": to_table(rows, AGREEMENT_COLUMNS)}

    def _rows(self, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
        verdicts = self.subject.accepted.get(trajectory.id, ())
        gaps = self.seen.gaps.get((CONTEXT, trajectory.id), {})
        turns = sorted(gaps)
        said = [verdicts[turn] if turn < len(verdicts) else None for turn in turns]
        accepted, rejected = (
            self._actions(trajectory, turns, [v is verdict for v in said]) for verdict in (True, False)
        )
        if not (accepted | rejected).any():
            fault = NO_VERDICT if not len(verdicts) else NO_ACTION if turns else NO_TEACHER
            yield {"method": "", "accepted": 0, "rejected": 0, "not_finite": 0, "undefined": fault}
            return
        for method, weights in weigh(self.subject.weights, gaps, turns).items():
            finite = np.isfinite(weights)
            lost = int(((accepted | rejected) & ~finite).sum())
            counts = [np.bincount(bins_of(weights[mine & finite]), minlength=BINS) for mine in (accepted, rejected)]
            for place in np.flatnonzero(counts[0] + counts[1]).tolist():
                yield {
                    "method": method,
                    "bin": place,
                    "weight": float(lower_edges(np.array([place]))[0]),
                    "accepted": int(counts[0][place]),
                    "rejected": int(counts[1][place]),
                    "not_finite": lost,
                    "undefined": "",
                }

    def _actions(self, trajectory: Trajectory, turns: Sequence[int], chosen: Sequence[bool]) -> Bool[np.ndarray, "M"]:
        """Which tokens of the turns belong to an action of a chosen one."""
        found = [self.seen.actions[trajectory.id][turn] & mine for turn, mine in zip(turns, chosen, strict=True)]
        return np.concatenate([np.zeros(0, bool), *found])


def bins_of(weights: Float[np.ndarray, "m"]) -> Int[np.ndarray, "m"]:
    """Which of the 8192 bins of equal width in w / (1 + |w|) each weight falls into; equal weights share one."""
    squeezed = weights / (1 + np.abs(weights))  # (-1, 1), ascends with the weight
    return np.clip(np.floor((squeezed + 1) / 2 * BINS), 0, BINS - 1).astype(np.int64)


def lower_edges(bins: Int[np.ndarray, "m"]) -> Float[np.ndarray, "m"]:
    """The smallest weight of each bin; -infinity for the first."""
    squeezed = 2 * bins / BINS - 1
    with np.errstate(divide="ignore"):
        return squeezed / (1 - np.abs(squeezed))


MEASURE = Measure("agreement", Needs(), start=Agreement)
