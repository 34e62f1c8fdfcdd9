"""One pair, measured twice: the same response tokens read without and with a privileged text in the context.

`build_pairs` writes the two contexts, `run_pairs` reads them. Training calls it with gradients on the student branch;
`diagnostics.beside` reads one student beside several teachers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int

from diagnostics.capture import CaptureStates, layer_names
from diagnostics.forward import (
    Against,
    Context,
    Divergence,
    Output,
    ReadContexts,
    Reading,
    read_contexts,
    reading_mode,
)
from diagnostics.passes import PairedPass, student_pass, with_teacher
from diagnostics.records import Segment, Trajectory
from diagnostics.render import place_skill, prompt_ids


@dataclass(frozen=True, eq=False)
class PairedSegment:
    """One segment in two contexts. Positions are those OF the response tokens; response index pairs the branches."""

    student_ids: Int[np.ndarray, "T"]
    teacher_ids: Int[np.ndarray, "S"] | None  # None: no teacher context, see build_pairs
    student_positions: Int[np.ndarray, "M"]
    teacher_positions: Int[np.ndarray, "M"] | None
    response_ids: Int[np.ndarray, "M"]  # identical in both branches
    turn: Int[np.ndarray, "M"]
    token_class: Int[np.ndarray, "M"]
    trajectory_id: str
    task_id: str
    context: str  # "own_skill", "other_skill", "unrelated", "shuffled", "none", ...

    def __post_init__(self) -> None:
        for branch, ids, positions in (
            ("student", self.student_ids, self.student_positions),
            ("teacher", self.teacher_ids, self.teacher_positions),
        ):
            if ids is None or positions is None:
                continue
            where = f"trajectory {self.trajectory_id!r}, context {self.context!r}, {branch} branch"
            if (positions < 1).any():
                raise ValueError(f"{where}: a response cannot hold the first token, nothing is read before it")
            if not np.array_equal(ids[positions], self.response_ids):
                raise ValueError(f"{where}: the ids at the positions given are not the response ids; build both anew")


def build_pairs(
    tokenizer: Any,
    trajectory_segments: Sequence[tuple[Trajectory, Segment]],
    skills: Mapping[str, str] | None,
    context: str,
    max_teacher_tokens: int,
    keep_unpaired: bool = False,
) -> tuple[list[PairedSegment], dict[str, int]]:
    """Writes the teacher's context of each segment: the same conversation with a skill placed in its prompt.

    The response tokens are the sampled ones, never encoded again. A context over the limit is not cut: the segment
    is left out and counted, and so is one whose trajectory has no skill.
    Source: PR-OPD (student on (x, y), teacher on (H(x, skill), y)); the counts are ours.
    Args: skills, trajectory id -> text ("" for the empty skill), None for pairs without a teacher context;
    max_teacher_tokens, of prompt and response together; keep_unpaired, keep such segments with `teacher_ids` None
    instead (training reads every row).
    Returns the pairs in order, and how many segments were paired, too_long, no_skill.
    Raises ValueError when a stored prompt does not render to its stored ids (another tokenizer or template).
    """
    pairs: list[PairedSegment] = []
    counts = {"paired": 0, "too_long": 0, "no_skill": 0}
    for trajectory, segment in trajectory_segments:
        teacher_ids = None
        if skills is not None:
            outcome = "no_skill"
            if trajectory.id in skills:
                teacher_ids = _teacher_ids(tokenizer, trajectory, segment, skills[trajectory.id])
                outcome = "paired"
                if len(teacher_ids) > max_teacher_tokens:
                    teacher_ids, outcome = None, "too_long"
            counts[outcome] += 1
            if teacher_ids is None and not keep_unpaired:
                continue
        pairs.append(_pair(trajectory, segment, teacher_ids, context))
    return pairs, counts


def _teacher_ids(tokenizer: Any, trajectory: Trajectory, segment: Segment, skill: str) -> np.ndarray:
    length = segment.prompt_length
    if not np.array_equal(prompt_ids(tokenizer, segment.messages), segment.ids[:length]):
        raise ValueError(
            f"trajectory {trajectory.id!r}: its prompt does not render to the ids it was sampled with; read it with "
            "the tokenizer and chat template that sampled it, or re-tokenise it with segment_from_turns"
        )
    prompt = prompt_ids(tokenizer, place_skill(segment.messages, skill))
    return np.concatenate([np.array(prompt, dtype=segment.ids.dtype), segment.ids[length:]])


def _pair(trajectory: Trajectory, segment: Segment, teacher_ids: np.ndarray | None, context: str) -> PairedSegment:
    positions = np.flatnonzero(segment.response_mask)
    return PairedSegment(
        student_ids=segment.ids,
        teacher_ids=teacher_ids,
        student_positions=positions,
        teacher_positions=None if teacher_ids is None else positions + len(teacher_ids) - len(segment.ids),
        response_ids=segment.ids[positions],
        turn=segment.turn[positions],
        token_class=segment.token_class[positions],
        trajectory_id=trajectory.id,
        task_id=trajectory.task_id,
        context=context,
    )


def run_pairs(
    model: Any,
    pairs: Sequence[PairedSegment],
    *,
    temperature: float = 1.0,
    states: Literal["none", "before", "at"] = "none",
    teacher: bool = True,
    teacher_model: Any = None,
    student_grad: bool = False,
    entropy: bool = False,
    divergence: Divergence | Literal["none"] = "none",
    extra_layers: Sequence[str] = (),
    outputs: Mapping[str, Output] = MappingProxyType({}),
    micro_batch_tokens: int | None = None,
    pad_to_teacher: bool | None = None,
    capture: CaptureStates | None = None,
    read_with: ReadContexts = read_contexts,
) -> PairedPass:
    """Reads both contexts of each pair, gathered to the response tokens before the head is applied.

    log p_t = log_softmax(logits_{t-1} / temperature)[token t]; state_t = residual stream at t-1.
    Source: PR-OPD (two forwards over identical response tokens, states before the token); SDAR (the gap's branches).
    Args: temperature, dimensionless, divides the logits of both branches; states, also the output of every block,
    before or at each token; teacher, read the teacher contexts; teacher_model, other weights for them (None:
    `model`); student_grad, keep the graph of the student branch; entropy, also the student's entropy; divergence,
    also one of the full distributions (with a teacher); extra_layers, of "embed" and "final_norm"; outputs,
    name -> function of the full distribution of each branch, see forward.Output;
    micro_batch_tokens, padded tokens of one forward (None: one forward; never changes the order of the results);
    pad_to_teacher, run the student at its teacher's padded shape (None: where a teacher is read), so that nothing
    but the context differs between the branches: in fp32 an empty skill changes nothing, bit for bit; capture, of
    another backend, which has no gradients (None: the forward hooks); read_with, what makes one forward, for
    weights that are gathered around it.
    Returns a PairedPass. Branches without a graph are read in eval mode.
    Raises ValueError on no pairs, a temperature that is not positive, or gradients asked of another backend.
    """
    if not pairs:
        raise ValueError("run_pairs got no pairs; see the counts of build_pairs for what was left out")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; read greedy replies at 1.0")
    if student_grad and capture is not None:
        raise ValueError("gradients flow through the forward hooks alone; read the student through the hf backend")
    blocks = layer_names(model)[1:-1] if states != "none" else ()
    layers, at = (*blocks, *extra_layers), states == "at"
    read = partial(read_with, temperature=temperature, layers=layers, at=at, outputs=outputs, capture=capture)
    student_contexts = [student_context(pair) for pair in pairs]
    teacher_contexts = [teacher_context(pair) for pair in pairs]
    align = teacher if pad_to_teacher is None else pad_to_teacher
    widths = [len(context.ids) for context in student_contexts]
    if align:
        widths = [max(width, len(context.ids)) for width, context in zip(widths, teacher_contexts, strict=True)]

    students: list[Reading] = []
    teachers: list[Reading] = []
    batches = _micro_batches(widths, micro_batch_tokens)
    for batch in batches:
        width = max(widths[index] for index in batch) if align else 0
        against = None
        if teacher:
            reader = model if teacher_model is None else teacher_model
            with reading_mode(reader, False):
                teachers.append(read(reader, [teacher_contexts[index] for index in batch], width))
            if divergence != "none":
                against = Against(divergence, reader, teachers[-1].final)
        with reading_mode(model, student_grad):
            contexts = [student_contexts[index] for index in batch]
            students.append(read(model, contexts, width, entropy=entropy, against=against))

    lengths = torch.tensor([len(pair.response_ids) for pair in pairs])
    read_order = torch.tensor([index for batch in batches for index in batch])
    row_as_read = torch.repeat_interleave(read_order, lengths[read_order])
    back = torch.argsort(row_as_read, stable=True)  # from the order of reading to the order of the pairs
    has_teacher = [pair.teacher_ids is not None for pair in pairs]
    passed = student_pass(row_as_read[back], has_teacher, students, blocks, back)
    return with_teacher(passed, teachers, blocks, back) if teacher else passed


def student_context(pair: PairedSegment) -> Context:
    """The student's branch of a pair, as it is read."""
    return Context(pair.student_ids, pair.student_positions, pair.response_ids)


def teacher_context(pair: PairedSegment) -> Context:
    """The teacher's branch of a pair, as it is read; the student's where there is none."""
    if pair.teacher_ids is None or pair.teacher_positions is None:  # keeps the rows aligned; has_teacher marks them
        return student_context(pair)
    return Context(pair.teacher_ids, pair.teacher_positions, pair.response_ids)


def _micro_batches(widths: Sequence[int], tokens: int | None) -> list[list[int]]:
    """Indices of the rows of each forward: like widths together, rows * widest <= tokens (at least one row)."""
    if tokens is None:
        return [list(range(len(widths)))]
    batches: list[list[int]] = []
    for index in sorted(range(len(widths)), key=lambda index: -widths[index]):  # the first row of a batch is its widest
        if batches and (len(batches[-1]) + 1) * widths[batches[-1][0]] <= tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches if len(batches) > 1 else [list(range(len(widths)))]  # one batch is read in the order it came
