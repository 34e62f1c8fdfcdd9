"""Gradient audit of the distillation channels: which way each pushes, how noisily, and on which tokens.

A channel that samples weighs the token it happened to draw; what it does on average follows from all tokens it could
have drawn. That expectation is taken exactly over the vocabulary, and held against the gradient of the full reverse KL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from diagnostics.artifact import to_table
from diagnostics.capture.hf import decoder_blocks, output_head
from diagnostics.change import CLASSES, hidden_change
from diagnostics.forward import reading_mode
from diagnostics.measure import Measure, Needs, Subject, WeightFn
from diagnostics.paired import PairedSegment, run_pairs
from diagnostics.progress import progress
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, measurement

CONTEXT = "own_skill"
REFERENCE = "reverse_kl"
ALIGNMENT = "hidden_alignment"
# Two sampled channels whose answer is known: a constant weight expects no gradient, the gap expects the reverse KL's
KNOWN: dict[str, WeightFn] = {
    "unit_weight": lambda gap, turn, row: torch.ones_like(gap),
    "gap_weight": lambda gap, turn, row: gap,
}
ZERO = 1e-7  # of the size of one sample: weights and log-probs carry fp32's digits, an expectation below is rounding
NODES = 256  # gaps at which a weight that reads its neighbours is evaluated: likely tokens, and as many even steps
AUDIT_COLUMNS = {
    "context": "string",
    "trajectory": "string",
    "task": "string",
    "segment": "int64",
    "channel": "string",
    "space": "string",  # "logits": per-token gradients on the logits; "states": on the states of all blocks
    "token_class": "string",  # "think", "action", "format", "all"
    "tokens": "int64",
    "expected_norm": "float64",  # sum over tokens of |E g|
    "expected_sq": "float64",  # sum of |E g|^2
    "norm": "float64",  # sum of the root mean square of |g| over the token drawn
    "norm_sq": "float64",  # sum of E |g|^2
    "reference_sq": "float64",  # sum of |g_KL|^2, on the logits
    "dot": "float64",  # sum of E g . g_KL; null outside the logits
    "parameter_cosine": "float64",  # over the parameters of all blocks; null where undefined, and by token class
    "undefined": "string",  # why the cosines are undefined; "" where they are defined
}


class Gradient(NamedTuple):
    """Gradient of a channel's loss on one token's logits, over what the student could have drawn there."""

    expected: Float[Tensor, "M V"]  # per nat of loss
    second_moment: Float[Tensor, "M"]  # E |g|^2; |E g|^2 for a channel that draws nothing


def reverse_kl_gradient(
    student: Float[Tensor, "M V"], teacher: Float[Tensor, "M V"], temperature: float = 1.0
) -> Gradient:
    """Gradient of KL(student || teacher) on the student's logits: p (d - sum p d) / temperature, d = s - q.

    Args: log-probabilities over the vocabulary, at the temperature. Returns: nothing is drawn, so no variance.
    """
    probability, gap = student.exp(), student - teacher
    expected = probability * (gap - (probability * gap).sum(-1, keepdim=True)) / temperature
    return Gradient(expected, expected.square().sum(-1))


def sampled_gradient(
    student: Float[Tensor, "M V"], weights: Float[Tensor, "M V"], temperature: float = 1.0
) -> Gradient:
    """What the loss w (sg q - s) of one drawn token does to its logits, on average over the student's own draws.

    g_v = -w_v (e_v - p) / temperature;  E g = sum_v p_v g_v = -p (w - sum p w) / temperature;
    E |g|^2 = sum_v p_v w_v^2 (1 - 2 p_v + |p|^2) / temperature^2
    Source: ours; a constant w has E g = 0 (score-function identity, case B25), w = q - s has that of the reverse KL.
    Args: student, log-probabilities; weights, of each token had it been drawn; detached, whatever they depend on.
    """
    probability = student.exp()
    mean = (probability * weights).sum(-1, keepdim=True)
    spread = 1 - 2 * probability + probability.square().sum(-1, keepdim=True)
    second = (probability * weights.square() * spread).sum(-1) / temperature**2
    second = second.clamp(min=0)  # a token of probability 1: zero but for rounding
    return Gradient(-probability * (weights - mean) / temperature, second)


def alternative_weights(
    weight: WeightFn,
    student: Float[Tensor, "M V"],
    teacher: Float[Tensor, "M V"],
    drawn: Int[Tensor, "M"],
    turn: Int[Tensor, "M"],
) -> Float[Tensor, "M V"]:
    """The weight each token of a response would get, had any other token of the vocabulary been drawn in its place.

    Args: student, teacher, log-probabilities over the vocabulary at each token; drawn, the tokens of the response.
    Returns: [M, V]; exact for a weight that reads its own gap.
    Departures: where the weight of a token reads other tokens' gaps (windows, normalisation), those stay as drawn: what
    would have followed another token was never read. Such a weight is evaluated at the gaps of the `NODES` likeliest
    tokens and at as many values from the smallest gap to the largest, and linear in between.
    """
    gaps = teacher - student
    count, vocabulary = gaps.shape
    if not reads_other_tokens(weight):
        alone = torch.arange(gaps.numel(), device=gaps.device)
        return weight(gaps.flatten(), turn.repeat_interleave(vocabulary), alone).to(gaps).view_as(gaps)
    own = gaps.gather(-1, drawn[:, None])[:, 0]
    weights = torch.empty_like(gaps)
    for index in range(count):
        nodes = _nodes(gaps[index], student[index])
        copies = own.repeat(len(nodes), 1)
        copies[:, index] = nodes
        rows = torch.arange(len(nodes), device=gaps.device).repeat_interleave(count)
        values = weight(copies.flatten(), turn.repeat(len(nodes)), rows).to(gaps).view_as(copies)[:, index]
        weights[index] = _interpolated(nodes, values, gaps[index])
    return weights


def reads_other_tokens(weight: WeightFn) -> bool:
    """Whether a token's weight depends on the gaps of others; found out on gaps of a few nats, the same every time."""
    gap = 3 * torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turn, together, alone = torch.zeros(64).long(), torch.zeros(64).long(), torch.arange(64)
    return not torch.equal(weight(gap, turn, together), weight(gap, turn, alone))


def _nodes(gaps: Tensor, student: Tensor) -> Tensor:
    likely = gaps[student.topk(min(NODES, len(gaps))).indices]
    low, high = gaps.aminmax()
    steps = torch.linspace(0, 1, NODES, dtype=gaps.dtype, device=gaps.device)
    return torch.cat([likely, low + (high - low) * steps]).unique()


def _interpolated(nodes: Tensor, values: Tensor, at: Tensor) -> Tensor:
    if len(nodes) == 1:
        return values.expand_as(at)
    right = torch.searchsorted(nodes, at).clamp(1, len(nodes) - 1)
    low, high = nodes[right - 1], nodes[right]
    return torch.lerp(values[right - 1], values[right], (at - low) / (high - low))


def alignment_norms(
    student_states: Float[Tensor, "L M D"], teacher_states: Float[Tensor, "L M D"]
) -> Float[Tensor, "M"]:
    """Size of the alignment loss's gradient on the states paired with one token, over all blocks together.

    | d/dh of (1/L) sum_l 2 (1 - cos(h_l, h_T,l)) |, every state taken as free.
    """
    free = student_states.detach().double().requires_grad_()
    with torch.enable_grad():
        loss = 2 * hidden_change(free, teacher_states).mean(0).sum()
    (gradient,) = torch.autograd.grad(loss, free)
    return gradient.square().sum((0, 2)).sqrt()


def direct(subject: Subject, pairs: Mapping[str, list[PairedSegment]], provenance: Provenance) -> dict[str, pa.Table]:
    """Audits every channel on every segment of one context (own_skill, or the first given where it is not among them).

    Channels: the full-vocabulary reverse KL (the reference), sampled losses w (sg q - s) with each of the subject's
    weights and with the two `KNOWN` ones, and the alignment of the hidden states (mean of 2 - 2 cos over all blocks).
    Returns: table `audit`, one row for each segment, channel and token class: sums over tokens, from which shares,
    cosine, variance (norm_sq - expected_sq) and the effective number of tokens (norm^2 / norm_sq, of the per-token
    gradient norms) follow; and `measurements`, how often a cosine of the parameters is undefined.
    Cost: two forwards a segment, and one backward for each channel whose expected gradient is not zero.
    Departures: per token the gradient is taken on the logits (for the alignment on the states), because a gradient on
    the parameters for every token is too dear; on the parameters it is taken once a segment and channel, of the sum
    over its tokens, and of the blocks alone: the alignment has no gradient on a head. The alignment has no projector.
    """
    context = CONTEXT if CONTEXT in pairs else next(iter(pairs))
    rows: list[dict[str, Any]] = []
    with progress("audit", len(pairs[context])) as report, reading_mode(subject.model, False), torch.enable_grad():
        for index, pair in enumerate(pairs[context]):
            place = {"context": context, "trajectory": pair.trajectory_id, "task": pair.task_id, "segment": index}
            rows += [{**place, **row} for row in _segment_rows(subject, pair)]
            report(index + 1)
    source = asdict(provenance)
    undefined = Counter(
        (row["channel"], row["undefined"]) for row in rows if row["undefined"] and row["token_class"] == "all"
    )
    counts = [
        measurement(**source, context=context, metric=f"audit/{channel}/undefined/{why}", value=count, unit="turns")
        for (channel, why), count in undefined.items()
    ]
    return {"audit": to_table(rows, AUDIT_COLUMNS), "measurements": to_table(counts, MEASUREMENT_COLUMNS)}


def _segment_rows(subject: Subject, pair: PairedSegment) -> Iterator[dict[str, Any]]:
    model, temperature = subject.model, subject.temperature
    passed = run_pairs(
        model,
        [pair],
        temperature=temperature,
        states="before",
        student_grad=True,
        extra_layers=("final_norm",),
        outputs={"logprobs": _whole},
    )
    assert passed.student_states is not None and passed.teacher_states is not None
    # normalised again: fp32's rounding of the sum would be all that is left of an expectation of zero
    student, teacher = (
        outputs["logprobs"].detach().double().log_softmax(-1)
        for outputs in (passed.student_outputs, passed.teacher_outputs)
    )
    drawn, turn = (torch.from_numpy(x.astype(np.int64)).to(student.device) for x in (pair.response_ids, pair.turn))
    parameters = list(decoder_blocks(model).parameters())
    logits = output_head(model)(passed.student_extra["final_norm"])
    aligned = 2 * hidden_change(passed.student_states, passed.teacher_states).mean(0).sum()

    def backward(output: Tensor, gradient: Tensor | None = None) -> list[Tensor | None]:
        gradient = None if gradient is None else gradient.to(output)
        return list(torch.autograd.grad(output, parameters, gradient, retain_graph=True, allow_unused=True))

    reference = reverse_kl_gradient(student, teacher, temperature)
    wanted = backward(logits, reference.expected)
    for channel, weight in {REFERENCE: None, **KNOWN, **subject.weights}.items():
        gradient = reference
        if weight is not None:
            weights = alternative_weights(weight, student, teacher, drawn, turn)
            gradient = sampled_gradient(student, weights, temperature)
        dot = (gradient.expected * reference.expected).sum(-1)
        sums = _class_sums(pair.token_class, gradient.expected.square().sum(-1), gradient.second_moment, reference, dot)
        cosine = None
        if not sums["all"]["undefined"]:
            cosine = _cosine(wanted if weight is None else backward(logits, gradient.expected), wanted)
        yield from _rows(channel, "logits", sums, cosine)
    squares = alignment_norms(passed.student_states, passed.teacher_states).square()
    sums = _class_sums(pair.token_class, squares, squares, reference)
    cosine = None if sums["all"]["undefined"] else _cosine(backward(aligned), wanted)
    yield from _rows(ALIGNMENT, "states", sums, cosine)


def _whole(logprobs: Tensor) -> Tensor:
    return logprobs


def _class_sums(
    token_class: np.ndarray, expected_sq: Tensor, second_moment: Tensor, reference: Gradient, dot: Tensor | None = None
) -> dict[str, dict[str, Any]]:
    """What AUDIT_COLUMNS sums over tokens, for each class that has one and for all; and what is undefined there."""
    columns = {
        "expected_norm": expected_sq.sqrt(),
        "expected_sq": expected_sq,
        "norm": second_moment.sqrt(),
        "norm_sq": second_moment,
        "reference_sq": reference.second_moment,
    }
    columns |= {} if dot is None else {"dot": dot}
    sums: dict[str, dict[str, Any]] = {}
    for label, kinds in [*((name, [kind]) for kind, name in CLASSES.items()), ("all", list(CLASSES))]:
        chosen = np.isin(token_class, kinds)
        if chosen.any():
            mask = torch.from_numpy(chosen).to(expected_sq.device)
            row: dict[str, Any] = {name: float(values[mask].sum()) for name, values in columns.items()}
            sums[label] = {"tokens": int(chosen.sum()), **row, "undefined": _undefined(row, int(chosen.sum()))}
    return sums


def _undefined(row: Mapping[str, float], tokens: int) -> str:
    if row["expected_sq"] <= ZERO**2 * row["norm_sq"]:
        return "expected gradient is zero"
    return "reverse-KL gradient is zero" if row["reference_sq"] <= ZERO**2 * tokens else ""


def _rows(
    channel: str, space: str, sums: Mapping[str, Mapping[str, Any]], cosine: float | None
) -> Iterator[dict[str, Any]]:
    for label, row in sums.items():
        place = {"channel": channel, "space": space, "token_class": label}
        yield {**place, **row, "parameter_cosine": cosine if label == "all" else None}


def _cosine(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    def dot(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
        both = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
        return sum(float((x.float() * y.float()).sum(dtype=torch.float64)) for x, y in both)

    return dot(first, second) / (dot(first, first) * dot(second, second)) ** 0.5


MEASURE = Measure("audit", Needs(), direct=direct)
