"""How far the backends lie apart on one batch: the number that stands in a report beside what they measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diagnostics.artifact import to_table
from diagnostics.capture.hf import Capture, capture_states, layer_names, output_head
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, Segment, measurement

BEGINNINGS = (128, 64)  # tokens; of unequal length, so that one is padded


@torch.no_grad()
def parity(
    model: Any,
    ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"],
    captures: Mapping[str, Any],
    provenance: Provenance,
) -> pa.Table:
    """Every layer, and the log-probs read from the last one, of other backends against the forward hooks.

    deviation = max over real tokens of |state - reference| / |reference|, in 2-norms; of log-probs, the largest
    absolute difference over real tokens and the whole vocabulary (raw logits may differ by a constant and mean the
    same).
    Source: ours. Args: a few rows are enough; captures, name -> capture_states of that backend.
    Returns measurement rows `parity/NAME/states` by layer (relative, dimensionless) and `parity/NAME/logprobs`
    (nats), >= 0. No backend may differ by more than 1e-4 in fp32.
    """
    layers = layer_names(model)
    row, position = attention_mask.nonzero(as_tuple=True)  # what stands at a pad means nothing, and may be NaN
    select = (row, position)
    own = capture_states(model, ids, attention_mask, layers, select)
    source = dataclasses.asdict(provenance)
    rows = []
    for name, capture in captures.items():
        other: Capture = capture(model, ids, attention_mask, layers, select)
        for layer in layers:
            value = relative_deviation(other.states[layer].to(own.final), own.states[layer])
            metric = f"parity/{name}/states"
            rows.append(measurement(**source, layer=layer, metric=metric, value=value, unit="relative"))
        theirs, ours = (_logprobs(model, final.to(own.final)) for final in (other.final, own.final))
        apart = torch.where(theirs == ours, 0.0, (theirs - ours).abs())  # two ids that a head masks differ by nothing
        metric, value = f"parity/{name}/logprobs", float(apart.max())
        rows.append(measurement(**source, metric=metric, value=value, unit="nats"))
    return to_table(rows, MEASUREMENT_COLUMNS)


def beginnings(segments: Sequence[Segment]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Ids and mask of the first 128 tokens of the first segment and the first 64 of the second, padded on the right."""
    rows = [torch.from_numpy(s.ids[:count].astype("int64")) for s, count in zip(segments, BEGINNINGS, strict=False)]
    ids, mask = (pad_sequence(each, batch_first=True) for each in (rows, [torch.ones_like(row) for row in rows]))
    return ids, mask


def parity_remark(name: str, rows: pa.Table, tokens: int) -> str:
    """What the rows of `parity` say about one backend, in a sentence."""
    found: dict[str, float] = {}
    for row in rows.to_pylist():
        found[row["metric"]] = max(found.get(row["metric"], 0.0), row["value"])
    states, logprobs = (found[f"parity/{name}/{what}"] for what in ("states", "logprobs"))
    return (
        f"Backend {name} against the forward hooks on {tokens} tokens: largest relative deviation of a state "
        f"{states:.1e}, of a log-prob {logprobs:.1e} nats."
    )


def relative_deviation(states: Float[Tensor, "M D"], reference: Float[Tensor, "M D"]) -> float:
    """max over tokens of |states - reference| / |reference|, in 2-norms; dimensionless, >= 0."""
    apart = (states.double() - reference.double()).norm(dim=-1)
    return float((apart / reference.double().norm(dim=-1)).max())


def _logprobs(model: Any, final: Tensor) -> Tensor:
    return output_head(model)(final).float().log_softmax(-1)
