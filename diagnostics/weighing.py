"""The gaps of the response tokens by turn, and the weights that methods would give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float

from diagnostics.measure import WeightFn
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import TokenClass


@dataclass
class TurnGaps:
    """The gap of every response token, by context and trajectory, then by turn, and which tokens are the action's.

    A method may weigh a token by its whole episode (sod: by the first turn), whose segments come in different batches;
    so the gaps are kept, 4 bytes a token and context, less than what the trajectory itself takes.
    """

    gaps: dict[tuple[str, str], dict[int, Float[np.ndarray, "m"]]] = field(default_factory=dict)  # nats, float32
    actions: dict[str, dict[int, Bool[np.ndarray, "m"]]] = field(default_factory=dict)  # by trajectory, then by turn

    def add(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds a batch of pairs, each with a teacher."""
        assert passed.teacher_logprobs is not None, "a gap needs a teacher"
        gaps = (passed.teacher_logprobs - passed.student_logprobs).detach().float().cpu().numpy()
        start = 0
        for pair in pairs:
            turns = self.gaps.setdefault((pair.context, pair.trajectory_id), {})
            actions = self.actions.setdefault(pair.trajectory_id, {})
            for turn in np.unique(pair.turn).tolist():
                mine = np.flatnonzero(pair.turn == turn)
                turns[turn] = gaps[start + mine]
                actions[turn] = pair.token_class[mine] == TokenClass.ACTION
            start += len(pair.turn)


def weigh(
    weights: Mapping[str, WeightFn], gaps: Mapping[int, Float[np.ndarray, "m"]], turns: Sequence[int]
) -> dict[str, Float[np.ndarray, "M"]]:
    """Weight of each token of some turns of one trajectory, by method, in the order of the turns.

    Source: the methods (weights are theirs). Args: gaps, by turn; turns, at least one, those the methods get to see.
    """
    gap = torch.from_numpy(np.concatenate([gaps[turn] for turn in turns]))
    turn = torch.tensor(np.repeat(turns, [len(gaps[turn]) for turn in turns]))
    row = torch.zeros_like(turn)
    return {name: weight(gap, turn, row).detach().double().numpy() for name, weight in weights.items()}
