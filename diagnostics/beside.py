"""One student read once beside the teachers of several contexts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from diagnostics.capture import CaptureStates, layer_names
from diagnostics.forward import Against, Context, Divergence, Output, read_contexts, reading_mode
from diagnostics.paired import PairedSegment, student_context, teacher_context
from diagnostics.passes import PairedPass, student_pass, with_teacher

KEPT_ELEMENTS = 2**26  # of a student's distributions kept beside its teachers, 256 MB in fp32; more are made anew


def run_beside(
    model: Any,
    pairs: Mapping[str, Sequence[PairedSegment]],
    *,
    alone: Collection[str] = (),
    temperature: float = 1.0,
    states: Literal["none", "before", "at"] = "none",
    divergence: Divergence | Literal["none"] = "none",
    extra_layers: Sequence[str] = (),
    outputs: Mapping[str, Output] = MappingProxyType({}),
    capture: CaptureStates | None = None,
) -> Iterator[tuple[str, PairedPass]]:
    """Reads some students once, in one forward, and behind them the teachers of each context, one forward a context.

    All forwards have one shape, the widest context of all, so that nothing but the context differs between them: in
    fp32 an empty skill changes nothing, bit for bit. Without gradients, in eval mode.
    Source: ours.
    Args: pairs, context -> its pairs, those of the same students in the same order; alone, contexts whose rows are
    read one by one at their own width instead, which shows what a shape does; the others as in run_pairs.
    Yields context and PairedPass, whose student tensors are the same objects in each.
    Raises ValueError on no pairs, or a context of other students than the first one's.
    """
    if not pairs or not all(pairs.values()):
        raise ValueError("run_beside got a context without pairs; leave out the contexts that pair nothing")
    first = next(iter(pairs.values()))
    for name, others in pairs.items():
        if len(others) != len(first) or not all(map(_same_student, others, first)):
            raise ValueError(f"context {name!r} does not pair the students of the first context; read it apart")
    blocks = layer_names(model)[1:-1] if states != "none" else ()
    layers = (*blocks, *extra_layers)
    at = states == "at"
    read = partial(
        read_contexts, model, temperature=temperature, layers=layers, at=at, outputs=outputs, capture=capture
    )
    students = [student_context(pair) for pair in first]
    teachers = {name: [teacher_context(pair) for pair in others] for name, others in pairs.items()}
    batched = [context for name, contexts in teachers.items() if name not in alone for context in contexts]
    width = max(len(context.ids) for context in [*students, *batched])
    lengths = [len(pair.response_ids) for pair in first]
    row = torch.repeat_interleave(torch.arange(len(first)), torch.tensor(lengths))
    order = torch.arange(len(row))
    device, vocabulary = next(model.parameters()).device, model.get_output_embeddings().weight.shape[0]
    kept = None
    if divergence != "none" and len(row) * vocabulary <= KEPT_ELEMENTS:
        kept = torch.empty(len(row), vocabulary, device=device)
    with reading_mode(model, False):
        student = read(students, width, keep=kept)
    base, final = student_pass(row, [True] * len(first), [student], blocks, order), student.final
    del student  # its states live on in the pass

    def against(tokens: slice) -> Against | None:
        distributions = None if kept is None else kept[tokens]
        return None if divergence == "none" else Against(divergence, model, final[tokens], "student", distributions)

    for name, contexts in teachers.items():
        with reading_mode(model, False):
            if name in alone:
                ends = np.cumsum(lengths).tolist()
                tokens = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
                readings = [
                    read(_alone(c, len(first)), against=against(t)) for c, t in zip(contexts, tokens, strict=True)
                ]
            else:
                readings = [read(contexts, width, against=against(slice(None)))]
        passed = with_teacher(base, readings, blocks, order)
        del readings
        yield name, passed


def _same_student(one: PairedSegment, other: PairedSegment) -> bool:
    arrays = ("student_ids", "student_positions")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


def _alone(context: Context, rows: int) -> list[Context]:
    """The context as the only row; where it was read as the only row already, beside a second one that is not kept."""
    unkept = context._replace(positions=context.positions[:0], response_ids=context.response_ids[:0])
    return [context] if rows > 1 else [context, unkept]
