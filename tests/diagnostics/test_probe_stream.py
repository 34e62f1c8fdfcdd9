"""The stream of the probes: means of turns, what is kept of the output, the tables, the built-in control."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pytest
import torch

from diagnostics import probe as protocol
from diagnostics.contexts import contexts_for
from diagnostics.measure import Subject
from diagnostics.paired import PairedPass, PairedSegment, build_pairs, run_pairs
from diagnostics.probe_stream import FLOOR, MEASURE, SKETCH, ProbeStream, projection, sketch, top_logprobs
from diagnostics.records import Provenance, Trajectory
from diagnostics.render import segment_from_turns
from tests.diagnostics.tiny import chat_tokenizer, tiny_model, trajectory

LAYERS, WIDTH = 2, 3
TOKENIZER = chat_tokenizer(tags=True)
REPLIES = ("<action>look</action>", "<think>so</think><action>go</action>")


@pytest.fixture(autouse=True)
def few_permutations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(protocol, "PERMUTATIONS", 9)
    monkeypatch.setattr(protocol, "CONTROLS", 1)
    yield


def make_pair(id: str, context: str, turns: Sequence[int]) -> PairedSegment:
    n = len(turns)
    ids, positions = np.arange(n + 1, dtype=np.int32), np.arange(1, n + 1)
    kinds = np.array(turns, np.int16), np.ones(n, np.int8)
    return PairedSegment(ids, ids, positions, positions, ids[1:], *kinds, id, f"task of {id}", context)


def make_pass(pairs: Sequence[PairedSegment], seed: int) -> PairedPass:
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(pair.response_ids) for pair in pairs]
    m = sum(lengths)

    def branch(name: str) -> dict:
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        return {
            f"{name}_logprobs": draw(m),
            f"{name}_states": draw(LAYERS, m, WIDTH),
            f"{name}_extra": {"embed": draw(m, WIDTH), "final_norm": draw(m, WIDTH)},
            f"{name}_outputs": {"probe/top64": draw(m, 4), "probe/sketch": draw(m, 5)},
        }

    row = torch.repeat_interleave(torch.arange(len(pairs)), torch.tensor(lengths))
    return PairedPass(row=row, has_teacher=torch.ones(m, dtype=torch.bool), **branch("student"), **branch("teacher"))


def plays(count: int) -> list[Trajectory]:
    """Episodes of three turns on tasks of their own, every second one won."""
    made = []
    for i in range(count):
        turns = [(f"Desk {i}." + " A lamp." * (i % 3), REPLIES[(i + k) % 2]) for k in range(3)]
        one = dataclasses.replace(trajectory(turns, id=f"t{i:02}"), task_id=f"task{i:02}", success=i % 2 == 0)
        made.append(dataclasses.replace(one, segments=tuple(segment_from_turns(TOKENIZER, one, 10_000))))
    return made


def subject(trajectories: Sequence[Trajectory] = (), model: torch.nn.Module | None = None) -> Subject:
    skills = {t.id: f"Look in drawer {t.id} first, then take it." for t in trajectories}
    return Subject(model or torch.nn.Linear(1, 1), TOKENIZER, trajectories, skills, 0, 1.0, {})


def rows(tables: dict[str, pa.Table], name: str = "probe", **wanted: str) -> list[dict]:
    return [row for row in tables[name].to_pylist() if all(row[key] == value for key, value in wanted.items())]


# --- the stream ------------------------------------------------------------------------------------------------------


def test_a_turn_is_the_mean_over_its_tokens() -> None:
    pairs = [make_pair("a", "own_skill", [0] * 4 + [1] * 3), make_pair("b", "own_skill", [2])]
    passed = make_pass(pairs, 0)
    stream = ProbeStream(subject())
    stream.update(pairs, passed)
    assert list(stream.own) == [("a", 0), ("a", 1), ("b", 2)] and not stream.other
    for branch, found in (("teacher", stream.own), ("student", stream.student)):
        states, extra = getattr(passed, f"{branch}_states"), getattr(passed, f"{branch}_extra")
        for key, tokens in (("a", 0), slice(0, 4)), (("a", 1), slice(4, 7)), (("b", 2), slice(7, 8)):
            layers = [extra["embed"], *states, extra["final_norm"]]
            expected = np.stack([layer[tokens].double().mean(0).numpy() for layer in layers])
            assert found[key]["hidden"] == pytest.approx(expected, rel=1e-6)
            mean = getattr(passed, f"{branch}_logprobs")[tokens].double().mean().item()
            assert found[key]["sampled_logprob"] == pytest.approx(mean, rel=1e-6)
            for name in ("top64", "sketch"):
                output = getattr(passed, f"{branch}_outputs")[f"probe/{name}"][tokens].double().mean(0).numpy()
                assert found[key][name] == pytest.approx(output, rel=1e-6)


def test_only_own_and_other_skills_and_the_first_student_are_kept() -> None:
    stream = ProbeStream(subject())
    first = [make_pair("a", "unrelated", [0, 0, 1])]
    stream.update(first, make_pass(first, 1))
    kept = {key: dict(turn) for key, turn in stream.student.items()}
    assert not stream.own and not stream.other and list(kept) == [("a", 0), ("a", 1)]
    other = [make_pair("b", "other_skill", [0]), make_pair("a", "other_skill", [0, 0, 1])]
    stream.update(other, make_pass(other, 2))
    assert stream.other.keys() == stream.student.keys() == {("a", 0), ("a", 1), ("b", 0)}
    assert all((stream.student[key]["hidden"] == turn["hidden"]).all() for key, turn in kept.items())


def test_memory_grows_with_turns_and_not_with_tokens() -> None:
    sizes = []
    for length in (10, 1000):
        stream = ProbeStream(subject())
        pairs = [make_pair("a", "own_skill", [0] * length)]
        stream.update(pairs, make_pass(pairs, 0))
        sizes.append(sum(array.nbytes for turn in stream.own.values() for array in turn.values()))
    assert sizes[0] == sizes[1] == 4 * ((LAYERS + 2) * WIDTH + 1 + 4 + 5)


# --- what is kept of the output --------------------------------------------------------------------------------------


def test_top_logprobs_fall() -> None:
    logprobs = torch.log_softmax(torch.randn(3, 100, generator=torch.Generator().manual_seed(0)), -1)
    assert torch.equal(top_logprobs(logprobs), logprobs.sort(-1, descending=True).values[:, :64])
    assert top_logprobs(logprobs[:, :5]).shape == (3, 5)


def test_a_small_vocabulary_is_kept_whole_and_a_large_one_keeps_inner_products() -> None:
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(4, SKETCH, generator=generator)
    assert torch.equal(sketch(small), small)
    x, y = torch.randn(2, 200, 3 * SKETCH + 5, generator=generator)
    kept = sketch(x), sketch(y)
    assert kept[0].shape == (200, SKETCH)
    error = ((kept[0] * kept[1]).sum(-1) - (x * y).sum(-1)) / (x.norm(dim=-1) * y.norm(dim=-1))
    assert abs(error.mean()) < 0.004 and 0.005 < error.std() < 1 / 64
    assert torch.allclose(
        sketch(x + y), kept[0] + kept[1], atol=1e-4
    )  # linear: the mean of a turn is that of its tokens


def test_masked_ids_leave_a_turn_finite() -> None:
    logprobs = torch.full((1, 10), -np.inf)
    logprobs[0, 3] = 0.0
    assert sketch(logprobs)[0].tolist() == [FLOOR] * 3 + [0.0] + [FLOOR] * 6
    assert top_logprobs(logprobs)[0, :2].tolist() == [0.0, FLOOR]


def test_projections_keep_inner_products_and_are_the_same_each_time() -> None:
    x = np.random.default_rng(0).standard_normal((30, 3000))
    found = projection(x)
    assert found.shape == (30, 256) and (found == projection(x)).all()
    norms = np.square(found).sum(1) / np.square(x).sum(1)
    assert abs(norms.mean() - 1) < 0.1 and norms.std() < 0.2


# --- tables ----------------------------------------------------------------------------------------------------------


def diagnosed(trajectories: list[Trajectory], contexts: Sequence[str], batch: int) -> dict[str, pa.Table]:
    model = tiny_model(layers=2)
    asked = subject(trajectories, model)
    stream = ProbeStream(asked)
    segments = [(t, s) for t in trajectories for s in t.segments]
    texts = contexts_for(TOKENIZER, trajectories, asked.skills, contexts, 0)
    for context in contexts:
        pairs, _ = build_pairs(TOKENIZER, segments, texts[context], context, 10_000)
        for start in range(0, len(pairs), batch):
            some = pairs[start : start + batch]
            needs = {"extra_layers": MEASURE.needs.extra_layers, "outputs": MEASURE.needs.outputs}
            stream.update(some, run_pairs(model, some, states="before", **needs))
    return stream.result(Provenance())


def test_end_to_end_embed_is_exactly_chance_and_all_readers_have_their_row() -> None:
    tables = diagnosed(plays(14), ["own_skill", "other_skill"], batch=5)
    own = rows(tables, labels="own_skill")
    outputs = ["sampled_logprob", "top64", "projection256", "pca", "mlp", "turn_index"]
    expected = [("hidden", layer) for layer in ("embed", "0", "1", "final_norm")] + [(name, "") for name in outputs]
    assert [(row["features"], row["layer"]) for row in own] == expected
    for row in own:
        assert row["n_samples"] == 2 * 14 * 3 and row["n_trajectories"] == row["n_tasks"] == 14
        assert row["n_groups"] == 6 and row["majority"] == 0.5 and row["branch"] == "teacher" and row["n_left_out"] == 0
        assert row["not_estimable"] == "" and 0 <= row["accuracy"] <= 1
        if row["layer"] == "embed" or row["features"] == "turn_index":
            assert row["accuracy"] == row["control_accuracy"] == row["null_low"] == row["null_high"] == 0.5
            assert row["p"] == row["p_max"] == 1
    assert any(row["accuracy"] != 0.5 for row in own)
    for row in rows(tables, labels="success") + rows(tables, labels="turn_third"):
        assert row["branch"] == "student" and row["n_samples"] == 42 and row["n_groups"] == 14
    third = rows(tables, labels="turn_third", features="turn_index")
    assert third[0]["accuracy"] == 1.0 and third[0]["p"] == 0.1
    (kind,) = rows(tables, labels="task_type")
    assert kind["not_estimable"] == "every sample is 'pick'" and kind["accuracy"] is None
    counts = rows(tables, "probe_trajectories", labels="own_skill", layer="0")
    assert len(counts) == 14 and all(row["n"] == 6 for row in counts)
    assert sum(row["correct"] for row in counts) / 84 == pytest.approx(own[1]["accuracy"])
    classes = {row["class"]: row["n_samples"] for row in rows(tables, "probe_classes", labels="success")}
    assert classes == {"failure": 21, "success": 21}


def test_without_the_other_skill_only_the_student_is_probed() -> None:
    tables = diagnosed(plays(6), ["own_skill"], batch=6)
    (own,) = rows(tables, labels="own_skill")
    assert own["not_estimable"] == "no turn was read in the contexts it needs"
    assert len(rows(tables, labels="turn_third")) == 10


def test_a_turn_that_is_not_finite_is_left_out_and_counted() -> None:
    trajectories = plays(12)
    stream = ProbeStream(subject(trajectories))
    for context in ("own_skill", "other_skill"):
        pairs = [make_pair(t.id, context, [0, 0, 1, 2]) for t in trajectories]
        passed = make_pass(pairs, 0)
        passed.teacher_states[0, 0 if context == "own_skill" else 2] = torch.nan  # type: ignore[index]
        stream.update(pairs, passed)
    row = rows(stream.result(Provenance()), labels="own_skill")[0]
    assert row["n_left_out"] == 2 and row["n_samples"] == 2 * (12 * 3 - 2)
