"""The nouns shared by training, diagnostics and analysis: plain frozen records, no torch.

Everything that is written to disk or handed between packages is one of these. Arrays are NumPy; axis names
follow the house convention (token T, response token M, turn K).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np


class TokenClass(IntEnum):
    """What a generated token belongs to; NONE marks every token that was not generated."""

    NONE = 0
    THINK = 1
    ACTION = 2
    FORMAT = 3


@dataclass(frozen=True)
class Message:
    """One chat message: role is "system", "user", "assistant" or, in imported ones, "tool"."""

    role: str
    content: str


@dataclass(frozen=True)
class Turn:
    """One exchange with the environment, as text."""

    observation: str  # what the policy saw before answering
    admissible: tuple[str, ...]  # the environment's commands at that moment
    response: str  # decoded reply of the policy
    action: str  # the command sent to the environment ("" if the reply had none)
    valid: bool  # tags present and action admissible


@dataclass(frozen=True, eq=False)
class Segment:
    """One token sequence that is trained on and measured as sampled (token in, token out).

    All arrays have length T. Under `append` an episode is one segment (more where a chat template rewrites its
    history); under `windowed` it is one segment a turn.
    """

    messages: tuple[Message, ...]  # the prompt before the first generated token
    ids: np.ndarray  # int32 [T]
    response_mask: np.ndarray  # bool [T]; True on generated tokens (end-of-turn included)
    turn: np.ndarray  # int16 [T]; -1 outside the response
    token_class: np.ndarray  # int8 [T]; TokenClass
    rollout_logprobs: np.ndarray  # float32 [T]; nats at the sampling temperature, 0 outside the response

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first generated one."""
        return int(np.argmax(self.response_mask)) if self.response_mask.any() else len(self.ids)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode. A crashed environment is an `error`, never a silent zero reward."""

    id: str  # unique inside an artifact
    task_id: str
    task_type: str
    env: str
    split: str
    description: str  # the task sentence
    group: int  # index of the task inside its step or panel
    attempt: int  # index inside the group
    seed: int
    step: int
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    reward: float  # environment's reward (10 if won)
    success: bool
    stop_reason: str  # "won" | "turn_limit" | "context_limit" | "done" | "error"
    first_observation_sha256: str
    error: str | None = None
    skill: str | None = None  # skill text that stood in the player's own prompt
    score: float | None = None  # 0 to 1, of environments that grade an episode: WebShop's raw score, Search-QA's F1
    outcome: str | None = None  # what the environment's judgement consists of, in words, where it tells

    @property
    def n_invalid(self) -> int:
        return sum(not turn.valid for turn in self.turns)

    @property
    def n_tokens(self) -> int:
        """Generated tokens of all segments."""
        return sum(int(segment.response_mask.sum()) for segment in self.segments)


@dataclass(frozen=True)
class Skill:
    """Privileged text and where it came from."""

    text: str
    kind: str  # "retrieved" | "hindsight" | "control"
    task_id: str
    trajectory_id: str | None = None
    source_success: bool | None = None  # outcome of the trajectory it was written from


# Long form: one row a value. Column name -> pyarrow type name.
MEASUREMENT_COLUMNS: dict[str, str] = {
    "run": "string",
    "method": "string",
    "env": "string",
    "model": "string",
    "seed": "int64",
    "step": "int64",
    "task": "string",
    "trajectory": "string",
    "turn": "int32",  # -1: not resolved by turn
    "layer": "string",  # "embed", "0" .. "L-1", "final_norm", "mean", "" (not a hidden-state metric)
    "token_class": "string",  # "think", "action", "format", "all"
    "context": "string",  # "own_skill", "other_skill", "unrelated", "shuffled", "none", "floor"
    "metric": "string",
    "value": "float64",
    "unit": "string",
}


def measurement(**columns: Any) -> dict[str, Any]:
    """One measurement row; columns left out get their neutral value. Raises ValueError on an unknown column."""
    unknown = set(columns) - set(MEASUREMENT_COLUMNS)
    if unknown:
        raise ValueError(f"unknown measurement column {sorted(unknown)[0]!r}; columns are {list(MEASUREMENT_COLUMNS)}")
    neutral = {"string": "", "int64": 0, "int32": -1, "float64": float("nan")}
    row: dict[str, Any] = {name: neutral[kind] for name, kind in MEASUREMENT_COLUMNS.items()}
    row.update(columns)
    return row


@dataclass(frozen=True)
class Provenance:
    """Where measured numbers come from; fills the leading columns of every measurement row."""

    run: str = ""
    method: str = ""
    env: str = ""
    model: str = ""
    seed: int = 0
    step: int = 0
