"""Checkpoint + trajectories (+ skills) -> a measurements artifact."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import torch

from diagnostics.across import compare_models
from diagnostics.artifact import Artifact, save_artifact, to_table
from diagnostics.beside import run_beside
from diagnostics.capture import CaptureStates
from diagnostics.capture import backend as capture_backend
from diagnostics.capture.parity import beginnings, parity, parity_remark
from diagnostics.contexts import contexts_for
from diagnostics.forward import reading_mode
from diagnostics.measure import Subject, WeightFn, merged
from diagnostics.measures import measures as chosen_measures
from diagnostics.paired import PairedSegment, build_pairs, run_pairs
from diagnostics.progress import progress
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, Segment, Trajectory, measurement
from diagnostics.render import segment_from_turns
from diagnostics.subsets import TURN_TOKENS, cut_segment, prepared_segments, single_turns

UNCUT = 2**31 - 1
HF = "hf"  # the backend of the forward hooks, which every other one is held against


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
    backend: str = "hf",
    remarks: Sequence[str] = (),
    against: Any = None,
    weights: Mapping[str, WeightFn] = MappingProxyType({}),
    accepted: Mapping[str, Sequence[bool | None]] = MappingProxyType({}),
    **manifest: Any,
) -> Artifact:
    """Reads every trajectory in every context and writes what the measures found.

    Order of reading: where a measure asks for it, a first pass over the first 32 students in the order of the hash of
    their trajectory id; the contexts that a measure needs first, each in a pass of its own; then, batch by batch, the
    student once and the teachers of all other contexts beside it. Student and teachers are read at one padded shape.
    `floor` is the exception that measures what a shape does: the teacher is the student's own context, read alone
    instead of in its batch (exactly 0 only in exact arithmetic). Measures that run the model themselves get the first
    24 single turns of at most 256 tokens in the order of the hash of trajectory id and turn.
    Args: skills, own skill text by trajectory id; contexts, of contexts.CONTEXTS; measures, of measures.MEASURES or
    "all"; max_tokens, tokens of a segment that are read (response tokens behind it are counted as cut; None: all);
    max_teacher_tokens, longer teacher contexts are left out and counted (None: the model's positions);
    micro_batch_tokens, padded tokens of one forward (a longer row is read alone); retokenise, the ids were made by
    another tokenizer: read the texts instead, see same_tokenizer; backend, of capture.BACKENDS, reads the states for
    all streams; remarks, sentences about what is read; against, another model of this tokenizer, whose states are held
    against this one's (diagnostics/across.py); weights, token weights by method name, for measures that compare
    methods; accepted, by trajectory id and turn, whether an expert accepts the command; provenance, its seed also seeds
    the contexts; manifest, further arguments of save_artifact.
    Returns: artifact of kind `measurements`: tables measurements and those of the measures, document counts; `remarks`
    of its manifest are those given and what is to be said about the backend.
    Raises: ValueError on an unknown name, a backend that is not installed, a context in which no pair is left, or no
    turn short enough for a measure that needs one.
    """
    chosen = chosen_measures(measures)
    capture = None if backend == HF else capture_backend(backend)
    needs = merged([m.needs for m in chosen if m.start is not None])
    first = tuple(name for name in needs.first if name in contexts)
    order = tuple(dict.fromkeys([*first, *contexts]))
    passes = [*((name,) for name in first), order[len(first) :]]
    texts = contexts_for(tokenizer, trajectories, skills, order, provenance.seed)
    rows, dropped = _segments(tokenizer, trajectories, max_tokens, retokenise)
    limit = max_teacher_tokens or model.config.get_text_config().max_position_embeddings
    pairs: dict[str, list[PairedSegment]] = {}
    counts = {"all": dropped}
    for name in order:
        pairs[name], left = build_pairs(tokenizer, rows, texts[name], name, limit, keep_unpaired=True)
        counts[name] = {reason: n for reason, n in left.items() if reason != "paired"}
        if not left["paired"]:
            reasons = ", ".join(f"{reason} {n}" for reason, n in {**dropped, **counts[name]}.items())
            raise ValueError(f"context {name!r} has no pair left to read ({reasons}; teacher limit {limit} tokens)")
    turns: dict[str, list[PairedSegment]] = {}
    if any(m.direct for m in chosen):
        turns, counts["all"]["turns_too_long"] = _turns(pairs, [m.name for m in chosen if m.direct])

    read = {name: [segment for _, segment in own] for name, own in groupby(rows, lambda row: row[0].id)}
    known = (texts, read, accepted, capture)
    subject = Subject(model, tokenizer, trajectories, skills, provenance.seed, temperature, weights, *known)
    started = [(m.start(subject), m.needs) for m in chosen if m.start is not None]
    options: dict[str, Any] = {"states": "before" if needs.states else "none", "temperature": temperature}
    options |= {"extra_layers": needs.extra_layers, "outputs": needs.outputs, "capture": capture}
    prepared = [stream for stream, its in started if its.prepare]
    students, _ = build_pairs(tokenizer, prepared_segments(rows) if prepared else [], None, "none", limit)
    done, total = 0, len(students) + sum(_n_paired(of_context) for of_context in pairs.values()) * bool(started)
    compared: list[dict[str, pa.Table]] = []
    said = [*remarks]
    if capture is not None:
        compared, about = _compared(model, rows, backend, capture, provenance, [m.name for m in chosen if m.direct])
        said += about
    with progress("diagnose", total) as report, torch.no_grad():
        for batch in _batches([len(pair.student_ids) for pair in students], micro_batch_tokens):
            some = [students[index] for index in batch]
            passed = run_pairs(model, some, teacher=False, **(options | {"outputs": {}, "extra_layers": ()}))
            for stream in prepared:
                stream.prepare(some, passed)
            report(done := done + len(some))
        for names in passes if started else []:
            for beside in _beside(pairs, names, micro_batch_tokens):
                for name, passed in run_beside(model, beside, alone=("floor",), divergence=needs.divergence, **options):
                    for stream, _ in started:
                        stream.update(beside[name], passed)
                    report(done := done + len(beside[name]))
    tasks = [partial(stream.result, provenance) for stream, _ in started]
    if against is not None:
        alone = next(iter(pairs.values()))
        batches = _batches([len(pair.student_ids) for pair in alone], micro_batch_tokens)
        read_alone = [[alone[index] for index in batch] for batch in batches]
        tasks.append(partial(compare_models, model, against, read_alone, provenance))
    tasks += [partial(m.direct, subject, turns, provenance) for m in chosen if m.direct is not None]
    results = list(compared)
    with progress("measures", len(tasks)) as report:  # those that take long report their own progress inside
        for task in tasks:
            results.append(task())
            report(len(results) - len(compared))
    return _save(out, results, counts, provenance, {"backend": backend, "remarks": said}, manifest)


def _compared(
    model: Any,
    rows: Sequence[tuple[Trajectory, Segment]],
    backend: str,
    capture: CaptureStates,
    provenance: Provenance,
    direct: Sequence[str],
) -> tuple[list[dict[str, pa.Table]], list[str]]:
    """How far another backend lies from the forward hooks here, and what is to be said about it."""
    ids, mask = beginnings([segment for _, segment in prepared_segments(rows)])
    device = next(model.parameters()).device
    with reading_mode(model, False):
        table = parity(model, ids.to(device), mask.to(device), {backend: capture}, provenance)
    remarks = [parity_remark(backend, table, int(mask.sum()))]
    if direct:
        named = ", ".join(direct)
        remarks.append(f"Measures that patch or differentiate the model read it through {HF}, not {backend}: {named}.")
    return [{"measurements": table}], remarks


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
        cut = [cut_segment(segment, max_tokens) for segment in segments]
        kept = [(trajectory, segment) for segment in cut if segment.response_mask.any()]
        rows += kept
        before, after = (sum(int(s.response_mask.sum()) for s in group) for group in (segments, cut))
        dropped["cut_tokens"] += before - after
        dropped["trajectories_without_tokens"] += not kept
    return rows, dict(dropped)


def _turns(pairs: Mapping[str, Sequence[PairedSegment]], names: Sequence[str]) -> tuple[dict, int]:
    turns, too_long = single_turns(pairs)
    if not any(turns.values()):
        raise ValueError(
            f"measure {names[0]!r} reads single turns of at most {TURN_TOKENS} tokens that have a teacher in every "
            f"context, and there is none ({too_long} are longer); leave it out or read shorter episodes"
        )
    return turns, too_long


def _n_paired(pairs: Sequence[PairedSegment]) -> int:
    return sum(pair.teacher_ids is not None for pair in pairs)


def _beside(
    pairs: Mapping[str, Sequence[PairedSegment]], names: Sequence[str], tokens: int
) -> Iterator[dict[str, list[PairedSegment]]]:
    """Batches of the same segments in each of the contexts; segments that a context has no teacher for go apart."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, row in enumerate(zip(*(pairs[name] for name in names), strict=True)):
        available = tuple(name for name, pair in zip(names, row, strict=True) if pair.teacher_ids is not None)
        groups.setdefault(available, []).append(index)
    for available, members in groups.items():
        columns = {name: [pairs[name][index] for index in members] for name in available}
        widths = [max(map(_width, row)) for row in zip(*columns.values(), strict=True)]
        for batch in _batches(widths, tokens):
            yield {name: [column[place] for place in batch] for name, column in columns.items()}


def _width(pair: PairedSegment) -> int:
    return max(len(pair.student_ids), 0 if pair.teacher_ids is None else len(pair.teacher_ids))


def _batches(widths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places of like width together, widest first; rows * widest <= tokens (at least one row)."""
    batch: list[int] = []
    for place in sorted(range(len(widths)), key=lambda place: -widths[place]):
        if batch and (len(batch) + 1) * widths[batch[0]] > tokens:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _save(
    out: str | Path,
    results: Sequence[Mapping[str, pa.Table]],
    counts: Mapping[str, Mapping[str, int]],
    provenance: Provenance,
    extra: Mapping[str, Any],
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
            "extra": {"provenance": dataclasses.asdict(provenance), **extra, **manifest.get("extra", {})},
        },
    )
