"""The diagnose run end to end on a random model: exact zeros, floor, what is left out, other tokenizers."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diagnostics.artifact import Artifact, load_artifact, load_trajectories, save_trajectories
from diagnostics.change import CHANNELS, HIDDEN
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
