"""What a diagnosis holds does not grow with the number of tokens it has read."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from diagnostics.beside import run_beside
from diagnostics.measure import Measure, Needs, Subject
from diagnostics.measures import measure
from diagnostics.paired import run_pairs
from diagnostics.records import Provenance
from diagnostics.run import diagnose
from tests.diagnostics.test_run import PROVENANCE, SKILLS, make_trajectories, tokenizer
from tests.diagnostics.tiny import random_pair, tiny_model, trajectory

CONTEXTS = ("unrelated", "own_skill", "other_skill", "none")
FLAT = ("change", "cka", "probe", "gaps")


def stored(value: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors, arrays and numbers that hang on an object."""
    seen = set() if seen is None else seen
    if isinstance(value, int | float):
        return 8
    if id(value) in seen or isinstance(value, torch.nn.Module):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.untyped_storage().nbytes()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(stored(each, seen) for each in value.values())
    if isinstance(value, list | tuple | set):
        return sum(stored(each, seen) for each in value)
    return stored(vars(value), seen) if hasattr(value, "__dict__") else 0


@pytest.mark.parametrize("name", FLAT)
def test_a_stream_holds_no_more_after_four_times_the_tokens(name: str) -> None:
    model = tiny_model(layers=2)
    chosen = measure(name)
    assert chosen.start is not None
    plays = [dataclasses.replace(trajectory([("A desk.", "x")], id=f"t{i}"), task_id=f"task {i}") for i in range(2)]
    subject = Subject(model, tokenizer(), plays, {t.id: "Look." for t in plays}, 0, 1.0, {})
    stream = chosen.start(subject)
    needs = chosen.needs
    states = {"states": "before" if needs.states else "none", "extra_layers": needs.extra_layers}
    options: dict[str, Any] = {**states, "outputs": needs.outputs}

    def pairs(seed: int, context: str) -> list[Any]:
        made = [random_pair(seed + i, length=70, responses=60) for i in range(2)]
        named = [{"trajectory_id": t.id, "task_id": t.task_id, "context": context} for t in plays]
        return [dataclasses.replace(pair, **names) for pair, names in zip(made, named, strict=True)]

    def read(context: str, count: int) -> None:
        for seed in range(count):
            some = pairs(2 * seed, context)
            for _, passed in run_beside(model, {context: some}, divergence=needs.divergence, **options):
                stream.update(some, passed)

    if needs.prepare:
        stream.prepare(pairs(0, "none"), run_pairs(model, pairs(0, "none"), teacher=False, **options))
    for context in CONTEXTS:
        read(context, 1)
    before = stored(stream)
    read("own_skill", 3)
    assert stored(stream) == before > 100


class Keeper:
    """Notes which passes are still alive; holds on to them where it is told to."""

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.alive: list[int] = []
        self.refs: list[Any] = []
        self.kept: list[Any] = []

    def prepare(self, pairs: Any, passed: Any) -> None:
        pass

    def update(self, pairs: Any, passed: Any) -> None:
        gc.collect()
        self.alive.append(sum(ref() is not None for ref in self.refs))
        self.refs.append(weakref.ref(passed.teacher_states))
        if self.keep:
            self.kept.append(passed)

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        return {}


@pytest.mark.parametrize("keep", [False, True])
def test_states_live_no_longer_than_their_batch_and_are_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keep: bool
) -> None:
    """With a stream that keeps them as negative control."""
    keeper = Keeper(keep)
    only = [Measure("keeper", Needs(states=True), lambda subject: keeper)]
    monkeypatch.setattr("diagnostics.run.chosen_measures", lambda names: only)
    given = {"skills": SKILLS, "contexts": ["own_skill", "none"], "measures": ["keeper"], "provenance": PROVENANCE}
    model = tiny_model(layers=2)
    plays = make_trajectories()
    done = diagnose(model, tokenizer(), plays, out=tmp_path / "m", micro_batch_tokens=1, **given)
    assert len(keeper.alive) == 8
    assert max(keeper.alive) == 7 if keep else max(keeper.alive) <= 1
    assert not any(name.endswith(".safetensors") for name in done.names)
