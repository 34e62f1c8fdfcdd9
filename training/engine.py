"""What the training loop asks of whatever holds the weights, and what it does with the answers on any engine.

The local engine is training/update.py (one process), the other one training/cluster/engine.py (workers of verl). Both
run the same loop, the same method files and, inside, the same functions of training/update.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from diagnostics.paired import PairedPass, PairedSegment
from training.batch import Row, collate, denominators
from training.config import Config
from training.method import Method, Needs
from training.monitor import Means
from training.skills.step_level import StepPair, place_steps

Reader = Literal["policy", "reference"]  # the weights as they are now, or the KL anchor's


@runtime_checkable
class Engine(Protocol):
    """A policy that is trained. Its weights change in `learn` and `finish` only."""

    config: Config
    method: Method
    method_config: Any
    step: int  # steps done
    update: int  # updates done

    @property
    def longest(self) -> int:
        """Tokens of the longest context that the policy reads."""
        ...

    def log_probs(self, reader: Reader, pairs: Sequence[PairedSegment]) -> Sequence[torch.Tensor]:
        """Log-probs (nats) of the response tokens in the student's contexts, pair by pair."""
        ...

    def freeze(self, keep: bool) -> None:
        """Keep a copy of the policy as the rollout-time teacher of the coming updates, or forget the last step's."""
        ...

    def learn(self, needs: Needs, rows: Sequence[Row], means: Means) -> None:
        """One optimiser update from a mini-batch; its metrics go to `means`."""
        ...

    def finish(self, needs: Needs) -> None:
        """What follows the last update of a step."""
        ...

    def save(self, run: Path, tokenizer: Any, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of the steps done."""
        ...


def generator(seed: int, step: int, stream: int = 0) -> torch.Generator:
    """The random numbers of one purpose (`stream`) in one step."""
    state = np.random.SeedSequence([seed, step, stream]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> 1))


def score(engine: Engine, needs: Needs, rows: Sequence[Row], updates: int) -> list[Row]:
    """Adds what stays fixed during a step, read by this engine with the weights of its start; then the advantages.

    The reference's log-probs where there is a KL term; the policy's own where there are several updates (with one they
    equal the student's, detached) or a method's advantage asks for them; a rollout-time or initial teacher's.
    """
    config, method = engine.config, engine.method
    pairs, nothing = [row.pair for row in rows], [None] * len(rows)
    anchored = needs.regularised and config.objective.kl_coefficient
    reference = engine.log_probs("reference", pairs) if anchored else nothing
    asked = method.advantage is not None and needs.teacher_logprobs
    old = engine.log_probs("policy", pairs) if updates > 1 or asked else nothing
    teacher: Sequence[Any] = nothing
    if fixed_teacher(needs):
        reader: Reader = "reference" if needs.teacher == "initial" else "policy"
        teacher = engine.log_probs(reader, [as_student(pair) for pair in pairs])
    engine.freeze(needs.teacher == "rollout" and not fixed_teacher(needs) and updates > 1)
    scored = [
        replace(row, old_logprobs=b, reference_logprobs=r, teacher_logprobs=q)
        for row, b, r, q in zip(rows, old, reference, teacher, strict=True)
    ]
    return scored if method.advantage is None or not rows else _with_advantages(engine, scored)


def read_steps(engine: Engine, rows: Sequence[Row], steps: Sequence[StepPair]) -> list[Row]:
    """Adds what the policy, at the start of a step, makes of the turns that have a skill of their own."""
    logprobs = engine.log_probs("policy", [as_student(step.pair) for step in steps])
    read = torch.cat(list(logprobs)) if steps else torch.zeros(0)
    placed = place_steps(steps, read, [row.n_tokens for row in rows])
    return [
        replace(row, step_teacher_logprobs=q, step_distilled=mask) for row, (q, mask) in zip(rows, placed, strict=True)
    ]


def fixed_teacher(needs: Needs) -> bool:
    """Whether the teacher's log-probs can be read once a step: its weights stay, and nothing else of it is needed."""
    alone = needs.states == "none" and needs.divergence == "none"
    return needs.teacher_logprobs and alone and needs.teacher in ("rollout", "initial")


def as_student(pair: PairedSegment) -> PairedSegment:
    """The teacher's context in the student's place; the student's own where there is no teacher."""
    if pair.teacher_ids is None or pair.teacher_positions is None:
        return pair
    return replace(pair, student_ids=pair.teacher_ids, student_positions=pair.teacher_positions)


def _with_advantages(engine: Engine, rows: list[Row]) -> list[Row]:
    """The method's per-token advantages, over all rows of the step at once."""
    assert engine.method.advantage is not None
    config = engine.config
    batch = collate(rows, denominators(rows, config.objective.reduction), torch.device("cpu"))
    old = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    pair = PairedPass(batch.row, batch.distilled, old, teacher_logprobs=batch.teacher_logprobs)
    advantages = engine.method.advantage(batch, pair, engine.method_config, engine.step)
    parts = advantages.split([row.n_tokens for row in rows])
    return [replace(row, advantages=part) for row, part in zip(rows, parts, strict=True)]
