"""The diagnose run end to end on a random model: exact zeros, floor, what is left out, other tokenizers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from diagnostics import forward
from diagnostics.artifact import Artifact, load_artifact, load_trajectories, save_trajectories
from diagnostics.change import CHANNELS, HIDDEN
from diagnostics.measure import Measure, Needs, Subject
from diagnostics.measures import MEASURES
from diagnostics.measures import measures as chosen_measures
from diagnostics.paired import PairedSegment
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, Trajectory
from diagnostics.render import decode, encode, place_skill, prompt_ids, segment_from_turns
from diagnostics.run import diagnose, same_tokenizer, tokenizer_digest
from tests.diagnostics.tiny import chat_tokenizer, segment, tiny_model, trajectory

PROVENANCE = Provenance(run="r", method="grpo", env="household", model="tiny", seed=5, step=7)
REPLIES = ("<think>see</think><action>look</action>", "<think>so</think><action>go to desk 1</action>")


class Unread(torch.nn.Module):
    """A model that must not be run: errors are due before any work."""

    config = tiny_model(layers=1).config

    def forward(self, *_: Any, **__: Any) -> None:
        raise AssertionError("the model was run")


@functools.cache
def tokenizer() -> Any:
    return chat_tokenizer(tags=True)


def make_trajectories(count: int = 4, other: Any = None) -> list[Trajectory]:
    """Episodes of one to three turns on different tasks."""
    made = []
    for i in range(count):
        turns = [(f"A desk {i}." + " A lamp." * i, REPLIES[k % 2]) for k in range(1 + i % 3)]
        play = dataclasses.replace(trajectory(turns, id=f"t{i}"), task_id=f"task{i}")
        segments = segment_from_turns(other or tokenizer(), play, 10_000)
        made.append(dataclasses.replace(play, segments=tuple(segments)))
    return made


SKILLS = {f"t{i}": f"Look in drawer {i} first, then take it." for i in range(4)}


def run(out: Path, contexts: list[str], model: Any = None, **options: Any) -> Artifact:
    options = {"trajectories": make_trajectories(), "skills": SKILLS, "tokenizer": tokenizer(), **options}
    model = tiny_model(layers=2) if model is None else model
    return diagnose(model, contexts=contexts, measures=["change"], provenance=PROVENANCE, out=out, **options)


def values(artifact: Artifact, metric: str, **wanted: str) -> dict[str, float]:
    """value by trajectory."""
    wanted = {"token_class": "all", **wanted, "metric": metric}
    rows = artifact.table("measurements").to_pylist()
    return {row["trajectory"]: row["value"] for row in rows if all(row[k] == v for k, v in wanted.items())}


def means(artifact: Artifact, context: str) -> np.ndarray:
    """Means of all quantities, layers and token classes of a context."""
    rows = artifact.table("measurements").to_pylist()
    rows = [row for row in rows if row["context"] == context]
    found = [row["value"] for row in rows if row["metric"].endswith(("/mean", "/rate"))]
    assert len(found) == 4 * 4 * (len(CHANNELS) + 1 + len(HIDDEN) * 2)  # trajectories, classes, quantities
    return np.array(found)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 700])
def test_no_skill_changes_nothing_at_equal_shapes(tmp_path: Path, kind: str, dtype: torch.dtype, tokens: int) -> None:
    """Case B05: exactly 0 in every quantity, layer, class and count."""
    model = tiny_model(kind, layers=2).to(dtype)
    plays = [dataclasses.replace(t, segments=(_short(t),)) for t in make_trajectories()]
    done = run(tmp_path / "m", ["none"], model, trajectories=plays, micro_batch_tokens=tokens)
    assert not means(done, "none").any()
    assert not any(done.table("thresholds").column("count").to_pylist())
    assert sum(values(done, "tokens").values()) == sum(t.n_tokens for t in plays) > 0


def _short(play: Trajectory) -> Any:
    """The first turn alone: GPT-2's positions end at 256."""
    (first,) = segment_from_turns(tokenizer(), dataclasses.replace(play, turns=play.turns[:1]), 256)
    return first


@pytest.mark.parametrize("tokens", [1, 700, 100_000])
def test_the_floor_of_fp32_is_rounding_and_a_skill_lies_far_above(tmp_path: Path, tokens: int) -> None:
    """Case B05."""
    done = run(tmp_path / "m", ["floor", "own_skill"], micro_batch_tokens=tokens)
    assert means(done, "floor").min() >= 0 and means(done, "floor").max() < 1e-4
    assert min(values(done, "hidden_change/mean", context="own_skill", layer="mean").values()) > 1e-3


def test_the_floor_sees_what_a_batch_shape_does_and_equal_shapes_do_not(tmp_path: Path) -> None:
    """Case B05, made large: a model whose states depend on the number of rows in their batch."""
    model = tiny_model(layers=2)
    model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: out + 0.1 * len(out) * torch.linspace(-1, 1, out.shape[-1])
    )
    for tokens in (1, 100_000):
        done = run(tmp_path / f"{tokens}", ["none", "floor"], model, micro_batch_tokens=tokens)
        assert not means(done, "none").any()
        assert means(done, "floor").min() > 0


def test_output_and_hidden_change_equal_two_plain_forwards(tmp_path: Path) -> None:
    model, plays = tiny_model(layers=2), make_trajectories()
    done = run(tmp_path / "m", ["own_skill"], model)
    for play in plays:
        (part,) = play.segments
        skilled = prompt_ids(tokenizer(), place_skill(part.messages, SKILLS[play.id]))
        reads = []
        for ids in (part.ids, np.concatenate([skilled, part.ids[part.prompt_length :]])):
            shift = len(ids) - len(part.ids)
            at = torch.from_numpy(np.flatnonzero(part.response_mask) + shift)
            ids = torch.from_numpy(ids.astype(np.int64))
            output = model(ids[None], output_hidden_states=True)
            logprobs = output.logits[0].log_softmax(-1)[at - 1, ids[at]].double()
            reads.append((logprobs.exp(), output.hidden_states[1][0, at - 1].double()))  # output of block 0
        (p_student, h_student), (p_teacher, h_teacher) = reads
        found = values(done, "output_change/mean", context="own_skill")[play.id]
        assert found == pytest.approx((p_teacher - p_student).abs().mean().item(), abs=1e-6)
        cosine = torch.nn.functional.cosine_similarity(h_student, h_teacher, dim=-1)
        found = values(done, "hidden_change/mean", context="own_skill", layer="0")[play.id]
        assert found == pytest.approx((1 - cosine).mean().item(), abs=1e-6)


def test_batches_do_not_change_the_result(tmp_path: Path) -> None:
    one = run(tmp_path / "one", ["own_skill"], micro_batch_tokens=1)
    many = run(tmp_path / "many", ["own_skill"], micro_batch_tokens=100_000)
    keys = ("trajectory", "token_class", "layer", "metric")
    first, second = (
        {tuple(row[k] for k in keys): row["value"] for row in a.table("measurements").to_pylist()} for a in (one, many)
    )
    assert first.keys() == second.keys()
    assert all(first[k] == pytest.approx(second[k], abs=1e-4) for k in first)


def test_all_contexts_make_one_complete_artifact(tmp_path: Path) -> None:
    contexts = ["own_skill", "other_skill", "shuffled", "none", "floor", "unrelated"]
    source = save_trajectories(tmp_path / "t", make_trajectories())
    done = run(tmp_path / "m", contexts, inputs=[source], config={"a": 1}, extra={"note": "x"})
    loaded = load_artifact(tmp_path / "m", "measurements")
    assert loaded.manifest == done.manifest
    assert loaded.manifest["inputs"][0]["digest"] == source.digest and loaded.manifest["config"] == {"a": 1}
    assert loaded.manifest["provenance"]["method"] == "grpo" and loaded.manifest["note"] == "x"
    table = loaded.table("measurements")
    assert table.column_names == list(MEASUREMENT_COLUMNS)
    for name in ("run", "method", "env", "model", "seed", "step"):
        assert set(table.column(name).to_pylist()) == {getattr(PROVENANCE, name)}
    assert np.isfinite(table.column("value").to_numpy()).all()
    assert set(loaded.table("thresholds").column("context").to_pylist()) == set(contexts)
    for context in contexts:
        shares = values(loaded, "output_change/share_above_null", context=context)
        assert shares.keys() == SKILLS.keys() and all(0 <= share <= 1 for share in shares.values())
    assert values(loaded, "output_change/null_threshold")[""] > 0
    assert not any(values(loaded, "output_change/share_above_null", context="none").values())
    assert all(value == 0 for part in loaded.document("counts").values() for value in part.values())


def test_b53_only_generated_tokens_are_measured(tmp_path: Path) -> None:
    """Case B53: 3 generated ids, 4 retrieved ids, 2 generated."""
    messages = make_trajectories(1)[0].segments[0].messages
    prompt = prompt_ids(tokenizer(), messages)
    part = segment(messages, prompt, encode(tokenizer(), "abcdefghi"), np.ones(9))
    mask = np.array([False] * len(prompt) + [True] * 3 + [False] * 4 + [True] * 2)
    turn = np.where(mask, 0, -1).astype(np.int16)
    part = dataclasses.replace(part, response_mask=mask, turn=turn, token_class=mask.astype(np.int8))
    play = dataclasses.replace(make_trajectories(1)[0], segments=(part,))
    done = run(tmp_path / "m", ["own_skill"], trajectories=[play])
    assert values(done, "tokens") == {"t0": 5}
    assert values(done, "tokens", token_class="think") == {"t0": 5}
    assert set(done.table("thresholds").column("total").to_pylist()) == {0, 5}


def test_b32_long_teacher_contexts_are_left_out_and_counted(tmp_path: Path) -> None:
    plays = make_trajectories()
    longest = max(len(t.segments[0].ids) for t in plays)
    skills = {**SKILLS, "t1": "word " * 500}
    del skills["t3"]
    done = run(tmp_path / "m", ["own_skill", "none"], skills=skills, max_teacher_tokens=longest + 100)
    assert done.document("counts")["own_skill"] == {"too_long": 1, "no_skill": 1}
    assert values(done, "left_out/too_long", context="own_skill", token_class="") == {"": 1}
    assert values(done, "tokens", context="own_skill").keys() == {"t0", "t2"}
    assert values(done, "tokens", context="none").keys() == {"t0", "t1", "t2", "t3"}
    with pytest.raises(ValueError, match=r"'own_skill' has no pair left .*too_long 3, no_skill 1; teacher limit 9"):
        run(tmp_path / "n", ["own_skill"], Unread(), skills=skills, max_teacher_tokens=9)
    assert not (tmp_path / "n").exists()


def test_errors_come_before_any_work(tmp_path: Path) -> None:
    """Case B34's kind, and typing errors."""
    with pytest.raises(ValueError, match="'own_skill' is made from skills, and 0 of 4"):
        run(tmp_path / "m", ["none", "own_skill"], Unread(), skills={})
    with pytest.raises(ValueError, match="did you mean 'shuffled'"):
        run(tmp_path / "m", ["shuffle"], Unread())
    with pytest.raises(ValueError, match="unknown measure 'chance'; did you mean 'change'"):
        diagnose(Unread(), tokenizer(), [], {}, ["none"], ["chance"], PROVENANCE, tmp_path / "m")
    with pytest.raises(ValueError, match="no pair left"):
        run(tmp_path / "m", ["none"], Unread(), trajectories=[])
    assert list(tmp_path.iterdir()) == []


def test_episodes_without_tokens_are_counted(tmp_path: Path) -> None:
    """Case B21 and crashed episodes: nothing to measure is a count, not a row."""
    crashed = dataclasses.replace(trajectory([], id="crashed"), error="timeout", stop_reason="error")
    silent = make_trajectories()[3]
    (part,) = silent.segments
    part = dataclasses.replace(part, response_mask=np.zeros(len(part.ids), bool))
    silent = dataclasses.replace(silent, segments=(part,))
    plays = [*make_trajectories(2), crashed, silent]
    for retokenise, kept in ((False, {"t0", "t1"}), (True, {"t0", "t1", "t3"})):
        done = run(tmp_path / f"{retokenise}", ["none"], trajectories=plays, retokenise=retokenise)
        assert values(done, "tokens").keys() == kept
        assert done.document("counts")["all"] == {"cut_tokens": 0, "trajectories_without_tokens": 4 - len(kept)}


def test_another_tokenizer_reads_the_texts(tmp_path: Path) -> None:
    other = chat_tokenizer(merges=[("l", "o"), ("lo", "o"), ("loo", "k"), ("a", "s")], tags=True)
    own, plays = make_trajectories(other=other), make_trajectories()
    saved = save_trajectories(tmp_path / "t", plays, extra={"tokenizer": tokenizer_digest(tokenizer())})
    assert same_tokenizer(tokenizer(), saved) and not same_tokenizer(other, saved)
    plays = load_trajectories(tmp_path / "t")
    with pytest.raises(ValueError, match="segment_from_turns"):
        run(tmp_path / "m", ["own_skill"], Unread(), trajectories=plays, tokenizer=other)
    done = run(
        tmp_path / "m", ["own_skill"], tiny_model(layers=2), trajectories=plays, tokenizer=other, retokenise=True
    )
    same = run(tmp_path / "n", ["own_skill"], tiny_model(layers=2), trajectories=own, tokenizer=other)
    assert values(done, "tokens") == {t.id: t.n_tokens for t in own} != {t.id: t.n_tokens for t in plays}
    assert done.table("measurements").equals(same.table("measurements"))


@pytest.mark.parametrize("retokenise", [False, True])
def test_a_cut_is_whole_tokens_and_counted(tmp_path: Path, retokenise: bool) -> None:
    plays = make_trajectories()
    limit = plays[2].segments[0].prompt_length + 4
    done = run(tmp_path / "m", ["own_skill"], trajectories=plays, max_tokens=limit, retokenise=retokenise)
    kept = {t.id: int(t.segments[0].response_mask[:limit].sum()) for t in plays}
    assert values(done, "tokens") == {id: n for id, n in kept.items() if n}
    lost = sum(t.n_tokens for t in plays) - sum(kept.values())
    assert lost > 0 and done.document("counts")["all"]["cut_tokens"] == lost
    assert decode(tokenizer(), plays[2].segments[0].ids[:limit]).endswith("<think>see")


# --- order of reading ------------------------------------------------------------------------------------------------


class Spy:
    """Notes what a measure is given."""

    def __init__(self) -> None:
        self.prepared: list[str] = []
        self.updates: list[tuple[str, tuple[str, ...], Any]] = []

    def prepare(self, pairs: Any, passed: Any) -> None:
        assert passed.teacher_logprobs is None and not self.updates
        self.prepared += [pair.trajectory_id for pair in pairs]

    def update(self, pairs: Any, passed: Any) -> None:
        ((context,),) = ({pair.context for pair in pairs},)
        assert passed.has_teacher.all() and len(passed.row) == sum(len(pair.response_ids) for pair in pairs)
        self.updates.append((context, tuple(pair.trajectory_id for pair in pairs), passed))

    def result(self, provenance: Provenance) -> dict[str, Any]:
        return {}


def spied(monkeypatch: pytest.MonkeyPatch, *needs: Needs, **measure: Any) -> list[Spy]:
    """One measure of each of these needs is all there is."""
    spies = [Spy() for _ in needs]
    every = [Measure(f"spy {i}", its, lambda _, i=i: spies[i]) for i, its in enumerate(needs)]
    every += [Measure("direct", Needs(), **measure)] if measure else []
    monkeypatch.setattr("diagnostics.run.chosen_measures", lambda names: every)
    return spies


def test_the_student_is_read_once_beside_all_contexts_behind_those_that_go_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shapes: list[tuple[int, ...]] = []
    original = forward.capture_states

    def recorded(model: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return original(model, ids, *args, **kwargs)

    monkeypatch.setattr(forward, "capture_states", recorded)
    spy, other = spied(monkeypatch, Needs(prepare=True, first=("unrelated",)), Needs(states=True))
    run(tmp_path / "m", ["own_skill", "shuffled", "unrelated", "none"], micro_batch_tokens=100_000)
    assert sorted(spy.prepared) == sorted(SKILLS) and not other.prepared
    assert [context for context, _, _ in spy.updates] == ["unrelated", "own_skill", "shuffled", "none"]
    assert all(sorted(ids) == sorted(SKILLS) for _, ids, _ in spy.updates)
    assert [passed for *_, passed in other.updates] == [passed for *_, passed in spy.updates]  # what one needs all see
    _, *beside = (passed for *_, passed in spy.updates)
    for name in ("student_logprobs", "student_states"):
        assert len({id(getattr(passed, name)) for passed in beside}) == 1
    assert len(shapes) == 1 + 2 + 4  # first pass; student and unrelated; student and three teachers
    assert len(set(shapes[1:3])) == len(set(shapes[3:])) == 1


@pytest.mark.parametrize("tokens", [1, 900])
def test_segments_that_a_context_leaves_out_are_read_in_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokens: int
) -> None:
    (spy,) = spied(monkeypatch, Needs())
    skills = {"t0": SKILLS["t0"], "t2": SKILLS["t2"]}
    run(tmp_path / "m", ["own_skill", "none"], skills=skills, micro_batch_tokens=tokens)
    seen = {name: sorted(id for c, ids, _ in spy.updates if c == name for id in ids) for name in ("own_skill", "none")}
    assert seen == {"own_skill": ["t0", "t2"], "none": ["t0", "t1", "t2", "t3"]}


def test_the_first_pass_sees_a_fixed_subset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("diagnostics.subsets.PREPARED", 3)
    chosen = []
    for plays in (make_trajectories(), make_trajectories()[::-1]):
        (spy,) = spied(monkeypatch, Needs(prepare=True))
        run(tmp_path / "m", ["none"], trajectories=plays)
        chosen.append(sorted(spy.prepared))
    by_hash = sorted(SKILLS, key=lambda id: hashlib.sha256(id.encode()).digest())
    assert chosen == [sorted(by_hash[:3])] * 2


def test_what_measures_need_is_read_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def top(logprobs: Any) -> Any:
        return logprobs.topk(2).values

    first = Needs(outputs={"top": top}, extra_layers=("embed",), divergence="jsd")
    (spy, _) = spied(monkeypatch, first, Needs(outputs={"top": top}, extra_layers=("final_norm",)))
    run(tmp_path / "m", ["own_skill", "floor"])
    for _, _, passed in spy.updates:
        assert passed.student_outputs["top"].shape == passed.teacher_outputs["top"].shape == (len(passed.row), 2)
        assert passed.student_extra.keys() == passed.teacher_extra.keys() == {"embed", "final_norm"}
        assert passed.divergence is not None and passed.student_states is None
    clash = Needs(outputs={"top": lambda logprobs: logprobs[:, 0]})
    for other, message in ((clash, "'top'; rename"), (Needs(divergence="forward_kl"), "forward_kl, jsd")):
        spied(monkeypatch, first, other)
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "n", ["own_skill"], Unread())


# --- single turns ----------------------------------------------------------------------------------------------------


def test_measures_that_run_the_model_get_the_same_short_single_turns_in_each_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: dict[str, Any] = {}

    def direct(subject: Subject, pairs: dict[str, list[PairedSegment]], provenance: Provenance) -> dict[str, Any]:
        given.update(subject=subject, pairs=pairs, provenance=provenance)
        return {"own": pa.table({"a": [1]})}

    plays = make_trajectories()
    every = {(t.id, k): end for t in plays for k, end in _ends(t).items()}
    limit = sorted(every.values())[4]
    monkeypatch.setattr("diagnostics.subsets.TURN_TOKENS", limit)
    monkeypatch.setattr("diagnostics.subsets.TURNS", 3)
    spied(monkeypatch, direct=direct)
    weights = {"m": lambda gap, turn, row: gap}
    contexts = ["own_skill", "none"]
    done = run(tmp_path / "m", contexts, Unread(), trajectories=plays, weights=weights, temperature=0.5)
    assert done.table("own").to_pylist() == [{"a": 1}]
    fit = [key for key, end in every.items() if end <= limit]
    assert 3 < len(fit) < len(every)
    assert done.document("counts")["all"]["turns_too_long"] == len(every) - len(fit)
    wanted = sorted(fit, key=lambda key: hashlib.sha256(f"{key[0]} {key[1]}".encode()).digest())[:3]
    assert list(given["pairs"]) == contexts
    for name, pairs in given["pairs"].items():
        assert [(pair.trajectory_id, int(pair.turn[0])) for pair in pairs] == wanted
        for pair in pairs:
            play = next(t for t in plays if t.id == pair.trajectory_id)
            assert set(pair.turn) == {pair.turn[0]} and pair.context == name and len(pair.student_ids) <= limit
            reply = play.turns[pair.turn[0]].response
            assert decode(tokenizer(), pair.response_ids) == reply + tokenizer().eos_token
            assert decode(tokenizer(), pair.teacher_ids).endswith(reply + tokenizer().eos_token)
            assert ("Skill:" in decode(tokenizer(), pair.teacher_ids)) == (name == "own_skill")
            before = play.segments[0].ids[: len(pair.student_ids)]
            assert np.array_equal(pair.student_ids, before)
    subject = given["subject"]
    assert subject.weights is weights and subject.temperature == 0.5 and subject.seed == PROVENANCE.seed
    assert subject.skills == SKILLS and given["provenance"] == PROVENANCE


def _ends(play: Trajectory) -> dict[int, int]:
    """The token behind the last one of each turn."""
    (part,) = play.segments
    return {k: int(np.flatnonzero(part.turn == k)[-1]) + 1 for k in range(len(play.turns))}


def test_no_turn_that_is_short_enough_is_an_error_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("diagnostics.subsets.TURN_TOKENS", 9)
    spied(monkeypatch, Needs(), direct=lambda *_: {})
    with pytest.raises(ValueError, match=r"measure 'direct' reads single turns of at most .* there is none \(7 are"):
        run(tmp_path / "m", ["own_skill"], Unread())


def test_all_measures_are_asked_for_by_one_word() -> None:
    assert [m.name for m in chosen_measures(["all"])] == list(MEASURES)
    assert [m.name for m in chosen_measures(["change", "all", "change"])] == list(MEASURES)
    assert all(m.start or m.direct for m in chosen_measures(["all"]))
    with pytest.raises(ValueError, match="unknown measure 'zzz'; measures are change, .*or all"):
        chosen_measures(["zzz"])


def test_every_measure_of_the_table_writes_its_part_of_one_artifact(tmp_path: Path) -> None:
    plays = [dataclasses.replace(t, segments=(_short(t),)) for t in make_trajectories()]
    options = {
        "trajectories": plays,
        "skills": SKILLS,
        "contexts": ["own_skill", "unrelated"],
        "provenance": PROVENANCE,
    }
    done = diagnose(tiny_model(layers=2), tokenizer(), measures=["all"], out=tmp_path / "m", **options)
    assert done.table("measurements").column_names == list(MEASUREMENT_COLUMNS)
    assert {"counts.json", "measurements.parquet", "thresholds.parquet"} <= set(done.names)
    assert np.isfinite(done.table("measurements").column("value").to_numpy()).all()
