"""Episodes and measurements with known content."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from diagnostics.artifact import save_artifact
from diagnostics.change import Change
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import Provenance, TokenClass, Trajectory, Turn


@pytest.fixture
def episode() -> Callable[..., Trajectory]:
    return _episode


def _episode(task: str, success: bool = False, error: str | None = None, valid: tuple[bool, ...] = (True,), **fields):
    values = {
        "id": f"{task}-{fields.get('seed', 0)}-{fields.get('attempt', 0)}",
        "task_id": task,
        "task_type": "pick",
        "env": "household",
        "split": "valid_seen",
        "description": "put it there",
        "group": 0,
        "attempt": 0,
        "seed": 0,
        "step": 0,
        "turns": tuple(Turn("you see", ("look",), "<action>look</action>", "look", ok) for ok in valid),
        "segments": (),
        "reward": 10.0 * success,
        "success": success,
        "stop_reason": "error" if error else "won" if success else "turn_limit",
        "first_observation_sha256": "",
        "error": error,
    }
    return Trajectory(**{**values, **fields})


def _pair(trajectory: str, context: str, classes: list[TokenClass]) -> PairedSegment:
    n = len(classes)
    ids, positions = np.arange(n + 1, dtype=np.int32), np.arange(1, n + 1)
    return PairedSegment(
        student_ids=ids,
        teacher_ids=ids,
        student_positions=positions,
        teacher_positions=positions,
        response_ids=ids[1:],
        turn=np.zeros(n, np.int16),
        token_class=np.array(classes, np.int8),
        trajectory_id=trajectory,
        task_id=f"task of {trajectory}",
        context=context,
    )


def _passed(changes: list[float]) -> PairedPass:
    """A pass whose sampled tokens have probability 0.9 without and 0.9 - change with the context; states are equal."""
    n, states = len(changes), torch.ones(2, len(changes), 3)
    return PairedPass(
        row=torch.zeros(n, dtype=torch.long),
        has_teacher=torch.ones(n, dtype=torch.bool),
        student_logprobs=torch.full((n,), 0.9, dtype=torch.float64).log(),
        teacher_logprobs=(0.9 - torch.tensor(changes, dtype=torch.float64)).log(),
        student_states=states,
        teacher_states=states,
    )


@pytest.fixture
def measured(tmp_path):
    """Two trajectories: under `unrelated` 0.01, under the own skill 3 of 4 and 0 of 2 tokens change by more."""
    think, action = TokenClass.THINK, TokenClass.ACTION
    change = Change()
    for context, first, second in (
        ("unrelated", [0.01] * 4, [0.01] * 2),
        ("own_skill", [0.1, 0.3, 0.6, 0.001], [0.001, 0.002]),
    ):
        change.update([_pair("x", context, [think, think, action, action])], _passed(first))
        change.update([_pair("y", context, [think, think])], _passed(second))
    return save_artifact(tmp_path / "change", "measurements", tables=change.result(Provenance(model="tiny")))
