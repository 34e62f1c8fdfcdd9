"""Change rates: how much a privileged context changes what the policy says and what it thinks, token by token.

Quantities of one token: the change of the sampled token's probability (and log-probability), how far the full output
distributions lie apart, whether the most likely token changes, and the change of the hidden state at the position
before it (direction and length), per block. `Change` counts them in a stream; nothing it stores grows with the number
of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from diagnostics.artifact import to_table
from diagnostics.measure import Measure, Needs
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.passes import finite_rows
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, TokenClass, measurement

HIDDEN = ("hidden_change", "hidden_change_centred", "hidden_norm_change")
UNITS = {
    "output_change": "probability",
    "output_logprob_change": "nats",
    "output_jsd": "nats",
    "hidden_change": "1 - cosine",
    "hidden_change_centred": "1 - cosine",
    "hidden_norm_change": "relative",
}
CHANNELS = tuple(UNITS)
CLASSES = {TokenClass.THINK: "think", TokenClass.ACTION: "action", TokenClass.FORMAT: "format"}
NULL_CONTEXT = "unrelated"
NULL_QUANTILE = 0.99
# 25 thresholds a decade, 2e-7 .. 1.8e1: rounding of fp32 probabilities .. largest log-prob change of interest
THRESHOLDS = 2e-7 * 10 ** (np.arange(200) / 25)
# edges of the null histogram, 400 a decade: a quantile is found to 0.6 %, from above
EDGES = 10 ** np.linspace(-9, 2, 4401)


def output_change(student_logprobs: Float[Tensor, "M"], teacher_logprobs: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
    """Change of the sampled token's probability: |p_T - p_S|.

    Source: PR-OPD Fig. 1a, b (its threshold is not published, see `Change`).
    Args: log-probabilities [M], nats. Returns: [M] in [0, 1], float64.
    """
    return (teacher_logprobs.double().exp() - student_logprobs.double().exp()).abs()


def output_logprob_change(
    student_logprobs: Float[Tensor, "M"], teacher_logprobs: Float[Tensor, "M"]
) -> Float[Tensor, "M"]:
    """Change of the sampled token's log-probability: |log p_T - log p_S|. Source: ours. Returns: [M], nats, float64."""
    return (teacher_logprobs.double() - student_logprobs.double()).abs()


def hidden_change(
    student_states: Float[Tensor, "L M D"],
    teacher_states: Float[Tensor, "L M D"],
    centre: Float[Tensor, "L D"] | None = None,
) -> Float[Tensor, "L M"]:
    """Change of direction of the hidden state: 1 - cos(h_T - c, h_S - c) = |u_T - u_S|^2 / 2 of the unit vectors u.

    The right-hand form is computed: it is exactly 0 for equal states and keeps its digits for small angles.
    Source: PR-OPD Fig. 1a, b; the centring is ours (coordinates that are large in every state pin the raw cosine at 1).
    Args: states [L, M, D]; centre [L, D], each layer's mean student state, or None for the raw cosine.
    Returns: [L, M] in [0, 2], float64; a zero vector has no direction and counts as 0.5 from any other, 0 from itself.
    """
    layers = []
    for layer, (student, teacher) in enumerate(zip(student_states, teacher_states, strict=True)):
        shift = 0.0 if centre is None else centre[layer].to(student.device, torch.float64)
        units = [torch.nn.functional.normalize(h.double() - shift, dim=-1, eps=1e-30) for h in (student, teacher)]
        layers.append((units[0] - units[1]).square().sum(-1) / 2)  # eps: only an exactly zero vector is below it
    return torch.stack(layers)


def norm_change(student_states: Float[Tensor, "L M D"], teacher_states: Float[Tensor, "L M D"]) -> Float[Tensor, "L M"]:
    """Relative change of the length of the hidden state: | |h_T| - |h_S| | / |h_S|.

    Source: ours (what the cosine does not see).
    Args: states [L, M, D]. Returns: [L, M], >= 0, float64; where the student's state is zero 0 or
    infinite.
    """
    student, teacher = (
        torch.stack([layer.double().norm(dim=-1) for layer in states]) for states in (student_states, teacher_states)
    )
    apart = (teacher - student).abs()
    return torch.where(apart == 0, 0.0, apart / student)


def top_token(logprobs: Float[Tensor, "m V"]) -> Int[Tensor, "m"]:
    """The most likely token of each distribution; of equals the first. Returns: ids [m]."""
    return logprobs.argmax(-1)


@dataclass
class _Counts:
    """Sums over the tokens of one (context, trajectory), by token class C, quantity Q, and summary quantity S."""

    task: str
    total: np.ndarray  # int64 [C]
    sum: np.ndarray  # float64 [C, Q]
    above_null: np.ndarray  # int64 [C, Q]
    curve: np.ndarray  # int64 [C, S, 201]; tokens that pass exactly k thresholds
    flips: np.ndarray  # int64 [C]; tokens at which the most likely token changes
    not_finite: int = 0


@dataclass
class Change:
    """Streaming change rates of all contexts. Source: PR-OPD Fig. 1a, b; curves, null and centring ours.

    A first pass over the students alone (`prepare`) gives the mean student state of each layer, which is then
    frozen: every context, the first one included, is centred by the same vector, whatever the order of the stream.
    The headline is the share of tokens that change more than 99 % of all response tokens do under `unrelated`, per
    quantity. That threshold is known once `unrelated` has streamed by, so it goes first; it is a histogram edge, at
    most 0.6 % above the true quantile and never below 1e-9. A token with a value that is not finite is left out of
    every count and counted apart. The Jensen-Shannon divergence and the flips of the most likely token are counted
    where the passes hold them (`MEASURE` asks for both); flips are a rate and have no threshold.
    """

    state_sum: Tensor | None = None  # float64 [L, D]
    state_count: int = 0
    counts: dict[tuple[str, str], _Counts] = field(default_factory=dict)
    null_histogram: np.ndarray | None = None  # int64 [Q, bins]
    null_fine: dict[str, np.ndarray] = field(default_factory=dict)  # trajectory -> int32 [C, S, bins]
    null_threshold: np.ndarray | None = None  # float64 [Q]
    n_layers: int = 0
    channels: tuple[str, ...] = CHANNELS  # S, those that the passes hold
    has_flips: bool = False

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds a batch of student states to the mean that centres all contexts."""
        assert passed.student_states is not None, "change needs states"
        states = passed.student_states.detach()
        states = states[:, finite_rows(states)]
        total = torch.stack([layer.double().sum(0) for layer in states])
        self.state_sum = total if self.state_sum is None else self.state_sum + total
        self.state_count += states.shape[1]

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds a batch of pairs, each to its own context. Raises ValueError on a pair without a teacher context."""
        if not bool(passed.has_teacher.all()):
            raise ValueError(
                "change rates got a pair without a teacher context; leave out what build_pairs could not pair"
            )
        values = self._quantities(passed)
        if not pairs or not values.shape[1]:
            return
        flips = _flips(passed)
        self.has_flips = flips is not None
        row = passed.row.cpu().numpy()
        classes = np.concatenate([pair.token_class for pair in pairs])
        finite = np.isfinite(values).all(0)
        for key in dict.fromkeys((pair.context, pair.trajectory_id) for pair in pairs):
            mine = [i for i, pair in enumerate(pairs) if (pair.context, pair.trajectory_id) == key]
            token = np.isin(row, mine)
            kept = token & finite
            counts = self._add(key, pairs[mine[0]].task_id, values[:, kept], classes[kept])
            counts.not_finite += int((token & ~finite).sum())
            if flips is not None:
                counts.flips += [(flips[kept] & (classes[kept] == c)).sum() for c in CLASSES]

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """Tables `measurements` (means, shares above the null, token counts) and `thresholds` (counts by threshold)."""
        if self.null_histogram is not None and self.null_threshold is None:
            self.null_threshold = null_quantile(self.null_histogram)
        source = asdict(provenance)
        rows = [measurement(**source, **row) for row in self._rows()]
        return {"measurements": to_table(rows, MEASUREMENT_COLUMNS), "thresholds": self._threshold_table()}

    def _quantities(self, passed: PairedPass) -> np.ndarray:
        """All quantities [Q, M]: the channels (hidden ones as the mean over layers), then both hidden ones by layer."""
        assert passed.teacher_logprobs is not None, "change needs teacher log-probs"
        assert passed.student_states is not None and passed.teacher_states is not None, "change needs states"
        centre = None if self.state_sum is None else self.state_sum / max(self.state_count, 1)
        states = passed.student_states, passed.teacher_states
        layered = [hidden_change(*states), hidden_change(*states, centre), norm_change(*states)]
        self.n_layers = len(layered[0])
        logprobs = passed.student_logprobs.detach(), passed.teacher_logprobs
        summary = {"output_change": output_change(*logprobs), "output_logprob_change": output_logprob_change(*logprobs)}
        if passed.divergence is not None:
            summary["output_jsd"] = passed.divergence.double().clamp(min=0)  # rounding alone is below
        summary |= {name: values.mean(0) for name, values in zip(HIDDEN, layered, strict=True)}
        self.channels = tuple(summary)
        return torch.cat([torch.stack(list(summary.values())), *layered]).detach().cpu().numpy()

    def _add(self, key: tuple[str, str], task: str, values: np.ndarray, classes: np.ndarray) -> _Counts:
        context, trajectory = key
        n_classes, n_values, n_channels = len(CLASSES), len(values), len(self.channels)
        if key not in self.counts:
            self.counts[key] = _Counts(
                task,
                total=np.zeros(n_classes, np.int64),
                sum=np.zeros((n_classes, n_values)),
                above_null=np.zeros((n_classes, n_values), np.int64),
                curve=np.zeros((n_classes, n_channels, len(THRESHOLDS) + 1), np.int64),
                flips=np.zeros(n_classes, np.int64),
            )
        counts = self.counts[key]
        if context == NULL_CONTEXT:
            self._add_null(trajectory, values, classes)
        elif self.null_threshold is None and self.null_histogram is not None:
            self.null_threshold = null_quantile(self.null_histogram)
        for c, token_class in enumerate(CLASSES):
            chosen = values[:, classes == token_class]
            counts.total[c] += chosen.shape[1]
            counts.sum[c] += chosen.sum(1)
            if self.null_threshold is not None:
                counts.above_null[c] += (chosen > self.null_threshold[:, None]).sum(1)
            counts.curve[c] += _histograms(chosen[:n_channels], THRESHOLDS)
        return counts

    def _add_null(self, trajectory: str, values: np.ndarray, classes: np.ndarray) -> None:
        if any(context != NULL_CONTEXT for context, _ in self.counts):
            raise ValueError(f"context {NULL_CONTEXT!r} must be measured before the contexts that are held against it")
        total = _histograms(values, EDGES)
        self.null_histogram = total if self.null_histogram is None else self.null_histogram + total
        channels = values[: len(self.channels)]
        fine = np.stack([_histograms(channels[:, classes == c], EDGES) for c in CLASSES]).astype(np.int32)
        self.null_fine[trajectory] = self.null_fine.get(trajectory, 0) + fine

    def _above_null(self, context: str, trajectory: str) -> np.ndarray | None:
        """Tokens above the null threshold [C, Q]; under `unrelated` itself only the summary quantities [C, S]."""
        if self.null_threshold is None:
            return None
        if context != NULL_CONTEXT:
            return self.counts[context, trajectory].above_null
        fine = self.null_fine[trajectory]
        first = np.searchsorted(EDGES, self.null_threshold[: len(self.channels)], side="right")
        return np.stack([fine[:, s, first[s] :].sum(-1) for s in range(len(self.channels))], axis=1)

    def _rows(self) -> list[dict[str, Any]]:
        layers = [str(layer) for layer in range(self.n_layers)]
        names = [(channel, "mean" if channel in HIDDEN else "") for channel in self.channels]
        names += [(channel, layer) for channel in HIDDEN for layer in layers]
        rows: list[dict[str, Any]] = []
        for (context, trajectory), counts in self.counts.items():
            place = {"context": context, "trajectory": trajectory, "task": counts.task}
            above = self._above_null(context, trajectory)
            if counts.not_finite:
                rows.append({**place, "token_class": "all", "metric": "tokens_not_finite", "value": counts.not_finite})
            for label, chosen in [*((name, [c]) for c, name in enumerate(CLASSES.values())), ("all", [0, 1, 2])]:
                total = int(counts.total[chosen].sum())
                cell = {**place, "token_class": label}
                rows.append({**cell, "metric": "tokens", "value": total, "unit": "tokens"})
                if not total:
                    continue
                if self.has_flips:
                    rate = counts.flips[chosen].sum() / total
                    rows.append({**cell, "metric": "top1_flip/rate", "value": rate, "unit": "share"})
                for q, (channel, layer) in enumerate(names):
                    mean = counts.sum[chosen, q].sum() / total
                    entry = {**cell, "layer": layer}
                    rows.append({**entry, "metric": f"{channel}/mean", "value": mean, "unit": UNITS[channel]})
                    if above is not None and q < above.shape[1]:
                        share = above[chosen, q].sum() / total
                        rows.append({**entry, "metric": f"{channel}/share_above_null", "value": share, "unit": "share"})
        if self.null_threshold is not None:
            for (channel, layer), value in zip(names, self.null_threshold, strict=True):
                metric = {"metric": f"{channel}/null_threshold", "value": value, "unit": UNITS[channel]}
                rows.append({"context": NULL_CONTEXT, "token_class": "all", "layer": layer, **metric})
        return rows

    def _threshold_table(self) -> pa.Table:
        tables = [_curve_table(*key, self.channels, counts) for key, counts in self.counts.items()]
        return pa.concat_tables(tables) if tables else pa.table({})


def null_quantile(histogram: np.ndarray, quantile: float = NULL_QUANTILE) -> np.ndarray:
    """The smallest edge that at most a share 1 - quantile of the tokens lies above, per quantity.

    Args: histogram [Q, len(EDGES) + 1]; bin k holds the values above exactly k edges. Returns: [Q], float64.
    """
    at_most = histogram.cumsum(-1)[:, :-1]  # [Q, edges]; values at or below each edge
    enough = at_most >= np.ceil(quantile * histogram.sum(-1, keepdims=True))
    return EDGES[np.where(enough.any(-1), enough.argmax(-1), len(EDGES) - 1)]


def _histograms(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Per row, how many values lie above exactly k edges, k = 0 .. len(edges). [N, M] -> int64 [N, len(edges) + 1]."""
    bins = np.searchsorted(edges, values, side="left")
    return np.stack([np.bincount(row, minlength=len(edges) + 1) for row in bins])


def _flips(passed: PairedPass) -> np.ndarray | None:
    """Where the most likely token differs between the branches, bool [M]; None where it was not read."""
    if "top1" not in passed.student_outputs:
        return None
    return (passed.student_outputs["top1"] != passed.teacher_outputs["top1"]).cpu().numpy()


def _curve_table(context: str, trajectory: str, channels: Sequence[str], counts: _Counts) -> pa.Table:
    labels = [*CLASSES.values(), "all"]
    curve = np.concatenate([counts.curve, counts.curve.sum(0, keepdims=True)])  # [4, S, 201]
    total = np.append(counts.total, counts.total.sum())
    above = curve[..., ::-1].cumsum(-1)[..., ::-1][..., 1:]  # tokens above threshold k passed at least k + 1
    n_classes, n_channels, n_thresholds = above.shape

    def repeat(values: Sequence[str], each: int) -> pa.Array:
        return pa.array(values, pa.string()).take(pa.array(np.arange(above.size) // each % len(values)))

    layers = ["mean" if channel in HIDDEN else "" for channel in channels]
    return pa.table(
        {
            "trajectory": repeat([trajectory], 1),
            "token_class": repeat(labels, n_channels * n_thresholds),
            "channel": repeat(channels, n_thresholds),
            "layer": repeat(layers, n_thresholds),
            "context": repeat([context], 1),
            "threshold": np.tile(THRESHOLDS, n_classes * n_channels),
            "count": above.reshape(-1),
            "total": np.repeat(total, n_channels * n_thresholds),
        }
    )


MEASURE = Measure(
    "change",
    Needs(states=True, prepare=True, first=(NULL_CONTEXT,), outputs={"top1": top_token}, divergence="jsd"),
    start=lambda subject: Change(),
)
