"""Skill perturbation: does a method's weight fall where a worse skill makes the teacher worse?

For each trajectory and each perturbed skill (removed, shuffled, another one, unrelated text) two differences, own skill
minus perturbed: of the method's mean weight, and of the teacher's quality. Quality is how probable the teacher finds
the actions of a SUCCESSFUL other episode of the task, so it is never read off the tokens that the weights come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from diagnostics.artifact import to_table
from diagnostics.forward import Context, read_contexts, reading_mode
from diagnostics.measure import Measure, Needs, Subject
from diagnostics.paired import PairedPass, PairedSegment, build_pairs, teacher_context
from diagnostics.progress import progress
from diagnostics.records import Provenance, Segment, TokenClass, Trajectory
from diagnostics.subsets import cut_segment
from diagnostics.weighing import TurnGaps, weigh

OWN = "own_skill"
NOT_PERTURBED = (OWN, "floor")  # floor: the empty text again
TOKENS = 768  # of the other episode as it was played that are read, in whole turns from the first, at least one
BUDGET = 128_000  # of such tokens in all readings together: trajectories in the order of the hash of their id

NO_SKILL = "no skill"
NO_TEXT = "no text in this context"
SAME_TEXT = "the text is the skill itself"
NOT_PAIRED = "no turn has a teacher in both contexts"
NO_MATE = "no other episode of the task"
NO_SUCCESS = "no successful other episode of the task"
NOT_READ = f"beyond the {BUDGET:,} tokens that are read for the quality"
TOO_LONG = "the other episode is too long for the teacher"
NO_ACTION = "no action token in what is read of the other episode"
NOT_FINITE = "a log-prob is not finite"

PERTURBATION_COLUMNS = {
    "trajectory": "string",
    "task": "string",
    "context": "string",  # the perturbed one
    "method": "string",
    "weight_own": "float64",  # mean over the response tokens
    "weight_perturbed": "float64",
    "action_weight_own": "float64",  # mean over the action tokens among them; null where there is none
    "action_weight_perturbed": "float64",
    "quality_own": "float64",  # nats, mean log-prob of the action tokens of the other episode
    "quality_perturbed": "float64",
    "n_tokens": "int64",  # response tokens behind the weights
    "n_action_tokens": "int64",  # of the other episode, behind the quality
    "mate": "string",  # that episode
    "undefined": "string",  # the reason, "" for a unit with both differences
}


class Quality(NamedTuple):
    """The teacher's mean log-prob of action tokens, nats, or why there is none."""

    value: float | None
    n_tokens: int
    undefined: str = ""


@dataclass
class Perturbation:
    """Gaps of all contexts in a stream, and the quality of the teacher in a reading of its own behind it.

    Source: PCSD Fig. 5, whose quality is not described; its form here is ours.
    Cost: for each trajectory one reading of at most 768 tokens and the text in every context, and of at most 128,000
    tokens in all (but for one trajectory).
    """

    subject: Subject
    seen: TurnGaps = field(default_factory=TurnGaps)

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Nothing is needed in advance."""

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds the gaps of a batch."""
        if pairs[0].context != "floor":
            self.seen.add(pairs, passed)

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """Table perturbation: a row for each trajectory, perturbed context and method, with the reason where there is
        no difference of weight or quality."""
        subject = self.subject
        contexts = [name for name in subject.texts if name not in NOT_PERTURBED] if subject.weights else []
        mates = {t.id: _mate(t, subject.trajectories) for t in subject.trajectories}
        asked = {(t.id, name): self._text_fault(t, name) for t in subject.trajectories for name in contexts}
        able = [t.id for t in subject.trajectories if isinstance(mates[t.id], Trajectory)]
        able = [id for id in able if not all(asked[id, name] for name in contexts)]
        chosen = self._affordable(sorted(able, key=_hash), mates, len(contexts) + 1)
        quality = self._qualities(chosen, mates, [key for key, fault in asked.items() if not fault])
        rows = []
        for trajectory in subject.trajectories:
            for name in contexts:
                unit = self._unit(trajectory, name, asked[trajectory.id, name], mates[trajectory.id], quality)
                rows += [{"task": trajectory.task_id, "context": name, **row} for row in unit]
        return {"perturbation": to_table(rows, PERTURBATION_COLUMNS)}

    def _affordable(self, ids: Sequence[str], mates: Mapping[str, Any], readings: int) -> frozenset[str]:
        """The first trajectories whose mates can be read so many times each within the budget, at least one."""
        read = [excerpt(self.subject.segments.get(mates[id].id, ()), TOKENS) for id in ids]
        spent = np.cumsum([readings * sum(len(segment.ids) for segment in segments) for segments in read])
        return frozenset(ids[: max(1, int((spent <= BUDGET).sum()))])

    def _text_fault(self, trajectory: Trajectory, context: str) -> str:
        """Why the weights of two contexts cannot be compared, "" where they can."""
        own, text = (self.subject.texts.get(name, {}).get(trajectory.id) for name in (OWN, context))
        if own is None:
            return NO_SKILL
        if text is None:
            return NO_TEXT
        if own.strip() == text.strip():
            return SAME_TEXT
        return "" if self._turns(trajectory, context) else NOT_PAIRED

    def _turns(self, trajectory: Trajectory, context: str) -> list[int]:
        own, perturbed = (self.seen.gaps.get((name, trajectory.id), {}) for name in (OWN, context))
        return sorted(own.keys() & perturbed.keys())

    def _qualities(
        self, chosen: frozenset[str], mates: Mapping[str, Trajectory | str], asked: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], Quality]:
        """Quality by (trajectory, text): each mate is read once under each text."""
        texts = self.subject.texts
        wanted: dict[tuple[str, str], Trajectory] = {}  # (mate, text)
        keys: dict[tuple[str, str], tuple[str, str]] = {}  # (trajectory, text) -> (mate, text)
        for id, context in asked:
            mate = mates[id]
            for text in (texts[OWN][id], texts[context][id]) if id in chosen else ():
                assert isinstance(mate, Trajectory), "only trajectories with a mate are chosen"
                keys[id, text] = mate.id, text
                wanted[mate.id, text] = mate
        found: dict[tuple[str, str], Quality] = {}
        with progress("perturbation", len(wanted)) as report:
            for (id, text), mate in wanted.items():
                found[id, text] = quality_of(self.subject, mate, text)
                report(len(found))
        return {key: found[read] for key, read in keys.items()}

    def _unit(
        self,
        trajectory: Trajectory,
        context: str,
        fault: str,
        mate: Trajectory | str,
        quality: Mapping[tuple[str, str], Quality],
    ) -> list[dict[str, Any]]:
        """The rows of all methods."""
        common: dict[str, Any] = {"trajectory": trajectory.id, "n_tokens": 0, "n_action_tokens": 0}
        if fault:
            return [{**common, "method": name, "undefined": fault} for name in self.subject.weights]
        turns = self._turns(trajectory, context)
        own, perturbed = (
            weigh(self.subject.weights, self.seen.gaps[name, trajectory.id], turns) for name in (OWN, context)
        )
        common["n_tokens"] = sum(len(self.seen.gaps[context, trajectory.id][turn]) for turn in turns)
        texts = [self.subject.texts[name][trajectory.id] for name in (OWN, context)]
        read = [quality[trajectory.id, text] for text in texts if (trajectory.id, text) in quality]
        if isinstance(mate, str):
            fault = mate
        elif not read:
            fault = NOT_READ
        else:
            fault = next((each.undefined for each in read if each.undefined), "")
            common |= {"mate": mate.id, "n_action_tokens": read[0].n_tokens}
            common |= {"quality_own": read[0].value, "quality_perturbed": read[1].value}
        action = np.concatenate([self.seen.actions[trajectory.id][turn] for turn in turns])
        rows = []
        for name in self.subject.weights:
            means = {"weight_own": own[name].mean(), "weight_perturbed": perturbed[name].mean()}
            finite = np.isfinite([*means.values()]).all()
            if action.any():
                means |= {"action_weight_own": own[name][action].mean()}
                means |= {"action_weight_perturbed": perturbed[name][action].mean()}
            means = {column: float(mean) for column, mean in means.items()}
            rows.append({**common, **means, "method": name, "undefined": fault if finite else NOT_FINITE})
        return rows


def quality_of(subject: Subject, mate: Trajectory, text: str) -> Quality:
    """How probable the teacher finds the actions of an episode when `text` stands in front of it.

    quality = mean over its action tokens of log p_T, in the first whole turns that 768 tokens of its prompts and
    replies hold (at least one turn). Source: ours. Returns: nats, at the subject's temperature.
    """
    rows = [(mate, segment) for segment in excerpt(subject.segments.get(mate.id, ()), TOKENS)]
    limit = subject.model.config.get_text_config().max_position_embeddings
    pairs, counts = build_pairs(subject.tokenizer, rows, {mate.id: text}, "quality", limit)
    if counts["too_long"]:
        return Quality(None, 0, TOO_LONG)
    contexts = [_actions(pair) for pair in pairs if (pair.token_class == TokenClass.ACTION).any()]
    if not contexts:
        return Quality(None, 0, NO_ACTION)
    with reading_mode(subject.model, False):
        passed = read_contexts(subject.model, contexts, temperature=subject.temperature, capture=subject.capture)
    value = float(passed.logprobs.double().mean())
    count = len(passed.logprobs)
    return Quality(value, count) if np.isfinite(value) else Quality(None, count, NOT_FINITE)


def excerpt(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """The first whole turns of an episode that fit into so many tokens of its segments, at least one turn."""
    kept: list[Segment] = []
    for segment in segments:
        turns = np.unique(segment.turn[segment.response_mask])
        ends = [int(np.flatnonzero(segment.turn == turn)[-1]) + 1 for turn in turns]
        fitting = [end for end in ends if end <= tokens] or ([] if kept else ends[:1])
        if not fitting:
            break
        kept.append(cut_segment(segment, fitting[-1]))
        tokens -= fitting[-1]
        if len(fitting) < len(ends):
            break
    return kept


def _actions(pair: PairedSegment) -> Context:
    context, mine = teacher_context(pair), pair.token_class == TokenClass.ACTION
    return context._replace(positions=context.positions[mine], response_ids=context.response_ids[mine])


def _mate(trajectory: Trajectory, trajectories: Sequence[Trajectory]) -> Trajectory | str:
    """Of the successful other episodes of the task the first by the hash of its id; the reason where there is none."""
    others = [t for t in trajectories if t.task_id == trajectory.task_id and t.id != trajectory.id]
    won = [t for t in others if t.success]
    if won:
        return min(won, key=lambda t: _hash(t.id))
    return NO_SUCCESS if others else NO_MATE


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


MEASURE = Measure("perturbation", Needs(), start=Perturbation)
