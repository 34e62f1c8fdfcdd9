"""Checkpoint + trajectories (+ skills) -> a measurements artifact."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import torch

from diagnostics.artifact import Artifact, save_artifact, to_table
from diagnostics.contexts import contexts_for
from diagnostics.measure import Stream, Subject, WeightFn
from diagnostics.measures import measures as chosen_measures
from diagnostics.paired import PairedPass, PairedSegment, build_pairs, run_pairs
from diagnostics.progress import progress
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, Segment, Trajectory, measurement
from diagnostics.render import segment_from_turns

UNCUT = 2**31 - 1


def diagnose(
    model: Any,
    tokenizer: Any,
    trajectories: Sequence[Trajectory],
    skills: Mapping[str, str],
    contexts: Sequence[str],
    measures: Sequence[str],
    provenance: Provenance,
    out: str | Path,
    *,
    max_tokens: int | None = None,
    max_teacher_tokens: int | None = None,
    micro_batch_tokens: int = 4096,
    temperature: float = 1.0,
    retokenise: bool = False,
    weights: Mapping[str, WeightFn] = MappingProxyType({}),
    **manifest: Any,
) -> Artifact:
    """Reads every trajectory in every context and writes what the measures counted.

    Both branches of a pair are read at one padded shape. `floor` is the exception that measures what a shape does:
    the teacher is the student's own context, read alone instead of in its batch (exactly 0 only in exact arithmetic).
    Args: skills, own skill text by trajectory id; contexts, of contexts.CONTEXTS; measures, of measures.MEASURES or
    "all"; max_tokens, tokens of a segment that are read (response tokens behind it are counted as cut; None: all);
    max_teacher_tokens, longer teacher contexts are left out and counted (None: the model's positions);
    micro_batch_tokens, padded tokens of one forward (a longer row is read alone); retokenise, the ids were made by
    another tokenizer: read the texts instead, see same_tokenizer; weights, token weights by
    method name, for measures that compare methods; provenance, its seed also seeds the contexts;
    manifest, further arguments of save_artifact.
    Returns: artifact of kind `measurements`: tables measurements and those of the measures, document counts.
    Raises: ValueError on an unknown name, or a context in which no pair is left.
    """
    chosen = chosen_measures(measures)
    first = [name for m in chosen for name in m.needs.first if name in contexts]
    order = list(dict.fromkeys([*first, *contexts]))
    texts = contexts_for(tokenizer, trajectories, skills, order, provenance.seed)
    rows, dropped = _segments(tokenizer, trajectories, max_tokens, retokenise)
    limit = max_teacher_tokens or model.config.get_text_config().max_position_embeddings
    students, _ = build_pairs(tokenizer, rows, None, "floor", limit)
    pairs, counts = {}, {"all": dropped}
    for name in order:
        pairs[name], left = build_pairs(tokenizer, rows, texts[name], name, limit)
        counts[name] = {reason: n for reason, n in left.items() if reason != "paired"}
        if not pairs[name]:
            reasons = ", ".join(f"{reason} {n}" for reason, n in {**dropped, **counts[name]}.items())
            raise ValueError(f"context {name!r} has no pair left to read ({reasons}; teacher limit {limit} tokens)")

    subject = Subject(model, tokenizer, trajectories, skills, provenance.seed, temperature, weights)
    started = [(m.start(subject), m.needs) for m in chosen if m.start is not None]
    streams: list[Stream] = [stream for stream, _ in started]
    prepared = [stream for stream, needs in started if needs.prepare]
    read = partial(
        run_pairs,
        model,
        states="before" if any(needs.states for _, needs in started) else "none",
        outputs={name: output for _, needs in started for name, output in needs.outputs.items()},
        temperature=temperature,
    )
    done, total = 0, len(students) * bool(prepared) + sum(map(len, pairs.values()))
    with progress("diagnose", total) as report, torch.no_grad():
        for batch in _batches(students if prepared else [], micro_batch_tokens):
            passed = read(batch, teacher=False)
            for stream in prepared:
                stream.prepare(batch, passed)
            report(done := done + len(batch))
        for name in order:
            for batch in _batches(pairs[name], micro_batch_tokens):
                passed = _floor(read, batch) if name == "floor" else read(batch)
                for stream in streams:
                    stream.update(batch, passed)
                report(done := done + len(batch))
    return _save(out, [stream.result(provenance) for stream in streams], counts, provenance, manifest)


def same_tokenizer(tokenizer: Any, trajectories: Artifact) -> bool:
    """Whether this tokenizer made the ids of a trajectories artifact (its manifest's `tokenizer`; absent: yes)."""
    return trajectories.manifest.get("tokenizer", tokenizer_digest(tokenizer)) == tokenizer_digest(tokenizer)


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over vocabulary and chat template; stored by who writes trajectories as extra={"tokenizer": ...}."""
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _segments(
    tokenizer: Any, trajectories: Sequence[Trajectory], max_tokens: int | None, retokenise: bool
) -> tuple[list[tuple[Trajectory, Segment]], dict[str, int]]:
    """Segments to read, cut after max_tokens, and counts of what was left out: response tokens, trajectories."""
    rows: list[tuple[Trajectory, Segment]] = []
    dropped: Counter[str] = Counter(cut_tokens=0, trajectories_without_tokens=0)
    for trajectory in trajectories:
        segments: Sequence[Segment] = trajectory.segments
        if retokenise:
            segments = segment_from_turns(tokenizer, trajectory, UNCUT) if trajectory.turns else []
        cut = [_cut(segment, max_tokens) for segment in segments]
        kept = [(trajectory, segment) for segment in cut if segment.response_mask.any()]
        rows += kept
        before, after = (sum(int(s.response_mask.sum()) for s in group) for group in (segments, cut))
        dropped["cut_tokens"] += before - after
        dropped["trajectories_without_tokens"] += not kept
    return rows, dict(dropped)


def _cut(segment: Segment, max_tokens: int | None) -> Segment:
    arrays = ("ids", "response_mask", "turn", "token_class", "rollout_logprobs")
    return dataclasses.replace(segment, **{name: getattr(segment, name)[:max_tokens] for name in arrays})


def _batches(pairs: Sequence[PairedSegment], tokens: int) -> Iterator[list[PairedSegment]]:
    """Pairs of like length together, widest first; rows * widest <= tokens (at least one row)."""

    def width(pair: PairedSegment) -> int:
        return max(len(pair.student_ids), 0 if pair.teacher_ids is None else len(pair.teacher_ids))

    batch: list[PairedSegment] = []
    for pair in sorted(pairs, key=width, reverse=True):
        if batch and (len(batch) + 1) * width(batch[0]) > tokens:
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


def _floor(read: Callable[..., PairedPass], batch: Sequence[PairedSegment]) -> PairedPass:
    """The student's context read in its batch (student tensors) and row by row (teacher tensors)."""
    together = read(batch if len(batch) > 1 else [*batch, *batch], teacher=False)
    alone = read(batch, teacher=False, micro_batch_tokens=1)
    n = len(alone.row)
    return PairedPass(
        row=alone.row,
        has_teacher=torch.ones_like(alone.has_teacher),
        student_logprobs=together.student_logprobs[:n],
        teacher_logprobs=alone.student_logprobs,
        student_states=None if together.student_states is None else together.student_states[:, :n],
        teacher_states=alone.student_states,
    )


def _save(
    out: str | Path,
    results: Sequence[Mapping[str, pa.Table]],
    counts: Mapping[str, Mapping[str, int]],
    provenance: Provenance,
    manifest: dict[str, Any],
) -> Artifact:
    source = dataclasses.asdict(provenance)
    left_out = [
        measurement(**source, context="" if name == "all" else name, metric=f"left_out/{reason}", value=n)
        for name, reasons in counts.items()
        for reason, n in reasons.items()
    ]
    tables: dict[str, list[pa.Table]] = {"measurements": [to_table(left_out, MEASUREMENT_COLUMNS)]}
    for result in results:
        for name, table in result.items():
            tables.setdefault(name, []).append(table)
    return save_artifact(
        out,
        "measurements",
        tables={name: pa.concat_tables(parts) for name, parts in tables.items()},
        documents={"counts": counts},
        **{
            "seeds": [provenance.seed],
            **manifest,
            "extra": {"provenance": dataclasses.asdict(provenance), **manifest.get("extra", {})},
        },
    )
