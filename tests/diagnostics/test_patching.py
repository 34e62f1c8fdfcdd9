"""Patching: identities that hold in any model, and a model in which one block alone carries what the skill told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from diagnostics.capture.hf import capture_states, decoder_blocks
from diagnostics.measure import Subject
from diagnostics.paired import PairedSegment, run_pairs
from diagnostics.patching import DRAWS, MEASURE, patched_runs, position_sets, random_states
from diagnostics.records import Provenance, TokenClass
from tests.diagnostics.tiny import random_pair, tiny_model

KINDS = ["qwen2", "gpt2"]
THINK, ACTION, FORMAT = TokenClass.THINK, TokenClass.ACTION, TokenClass.FORMAT


def reply_pair(seed: int, prompt: int = 8, skill: int = 5, classes: tuple[int, ...] = (1, 1, 3, 2, 2, 3)) -> Any:
    """A prompt, and one reply of the classes given behind it."""
    pair = random_pair(seed, length=prompt + len(classes), skill=skill, responses=1)
    positions = np.arange(prompt, prompt + len(classes))
    return replace(
        pair,
        student_positions=positions,
        teacher_positions=positions + skill,
        response_ids=pair.student_ids[positions],
        turn=np.zeros(len(classes), np.int16),
        token_class=np.array(classes, np.int8),
    )


def tensors(pair: PairedSegment) -> tuple[Tensor, Tensor]:
    return torch.tensor(pair.student_ids.astype(np.int64)), torch.tensor(pair.student_positions)


def subject(model: Any, temperature: float = 1.0, weights: Any = None) -> Subject:
    return Subject(model, None, (), {}, seed=3, temperature=temperature, weights=weights or {})


def patched_run(
    model: Any, ids: Tensor, at: Tensor, states: Tensor, read: Tensor, scope: Any = "single", temperature: float = 1.0
) -> Any:
    (answer,) = patched_runs(model, ids, at, [(scope, states)], read, temperature)
    return answer


# --- the run against plain full forwards -----------------------------------------------------------------------------


def plain_run(model: Any, ids: Tensor, at: Tensor, states: Tensor, read: Tensor, layers: list[int]) -> Tensor:
    """One full forward, the state replaced behind each of the blocks named."""

    def hook(layer: int) -> Any:
        def replace_state(module: Any, args: Any, output: Any) -> Any:
            hidden = (output if isinstance(output, Tensor) else output[0]).clone()
            hidden[:, at] = states[layer]
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return replace_state

    handles = [decoder_blocks(model)[layer].register_forward_hook(hook(layer)) for layer in layers]
    logits = model(ids[None]).logits[0]
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1)[read - 1, ids[read]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["single", "up_to", "from"])
@torch.no_grad()
def test_every_row_is_the_full_forward_with_that_patch(kind: str, scope: Any) -> None:
    model, pair = tiny_model(kind, layers=4), reply_pair(0)
    ids, positions = tensors(pair)
    thought, action = positions[:3], positions[3:5]
    states = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(1))
    run = patched_run(model, ids, thought - 1, states, action, scope)
    for layer in range(4):
        blocks = {"single": [layer], "up_to": list(range(layer + 1)), "from": list(range(layer, 4))}[scope]
        full = plain_run(model, ids, thought - 1, states, action, blocks)
        assert torch.allclose(run.logprob[layer], full, atol=2e-5)
    different = {tuple(row.tolist()) for row in run.logprob}  # nobody reads the thought behind the last block
    assert len(different) == (3 if scope == "up_to" else 4)
    assert not any(block._forward_hooks for block in decoder_blocks(model))


@torch.no_grad()
def test_a_patch_that_reaches_back_to_the_first_token_needs_no_prefix() -> None:
    model, pair = tiny_model(), reply_pair(0, prompt=1)
    ids, positions = tensors(pair)
    states = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(1))
    run = patched_run(model, ids, positions - 1, states, positions)
    assert torch.allclose(run.logprob[1], plain_run(model, ids, positions - 1, states, positions, [1]), atol=2e-5)


@torch.no_grad()
def test_runs_do_not_depend_on_their_neighbours() -> None:
    model, pair = tiny_model(), reply_pair(1)
    ids, positions = tensors(pair)
    states = torch.randn(2, 3, 6, 64, generator=torch.Generator().manual_seed(1))
    asked = [("single", states[0]), ("from", states[1]), ("single", states[0])]
    first, second, third = patched_runs(model, ids, positions - 1, asked, positions)
    assert torch.equal(first.logprob, third.logprob)
    assert torch.equal(second.logprob, patched_run(model, ids, positions - 1, states[1], positions, "from").logprob)


@torch.no_grad()
def test_rank_greedy_and_temperature() -> None:
    model, pair = tiny_model(), reply_pair(2)
    ids, positions = tensors(pair)
    nothing = torch.zeros(3, 0, 64)
    run = patched_run(model, ids, positions[:0], nothing, positions, temperature=0.5)
    logits = model(ids[None]).logits[0, positions - 1]
    own = logits.gather(-1, ids[positions][:, None])
    for layer in range(3):
        expected = (logits / 0.5).log_softmax(-1).gather(-1, ids[positions][:, None])[:, 0]
        assert torch.allclose(run.logprob[layer], expected, atol=2e-5)
        assert torch.equal(run.greedy[layer], logits.argmax(-1))
        assert torch.equal(run.rank[layer], 1 + (logits > own).sum(-1))


# --- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["single", "up_to", "from"])
@torch.no_grad()
def test_the_students_own_state_changes_nothing_bit_for_bit(kind: str, scope: Any) -> None:
    model, pair = tiny_model(kind), reply_pair(3)
    ids, positions = tensors(pair)
    before, nothing = positions - 1, torch.zeros(3, 0, 64)
    own: list[Tensor] = []

    def record(module: Any, args: Any, output: Any) -> None:
        own.append((output if isinstance(output, Tensor) else output[0])[0])

    handles = [block.register_forward_hook(record) for block in decoder_blocks(model)]
    plain = patched_run(model, ids, before[:0], nothing, positions, scope)
    for handle in handles:
        handle.remove()
    states = torch.stack(own[-3:])  # the first three are those of the prompt; places count from its end on
    patched = patched_run(model, ids, before, states[:, : len(before)], positions, scope)
    assert torch.equal(patched.logprob, plain.logprob) and torch.equal(patched.greedy, plain.greedy)
    moved = patched_run(model, ids, before, states[:, : len(before)] + 0.1, positions, scope)
    assert not torch.equal(moved.logprob, plain.logprob)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_last_block_at_every_response_position_gives_the_teacher(kind: str) -> None:
    model, pair = tiny_model(kind, layers=4), reply_pair(4)
    passed = run_pairs(model, [pair], states="before")
    ids, positions = tensors(pair)
    runs = {
        scope: patched_run(model, ids, positions - 1, passed.teacher_states, positions, scope).logprob
        for scope in ("single", "up_to", "from")
    }
    teacher, student = passed.teacher_logprobs, passed.student_logprobs
    assert torch.allclose(runs["single"][-1], teacher, atol=1e-5)
    assert (teacher - student).abs().min() > 1e-3
    # with every position between patched, a range below says what its last block says, and one to the top the teacher
    assert torch.allclose(runs["up_to"], runs["single"], atol=1e-5)
    assert torch.allclose(runs["from"], teacher.expand(4, -1), atol=1e-5)
    assert (runs["single"][0] - teacher).abs().max() > 1e-3


def test_random_states_lie_as_far_as_the_teachers_in_a_direction_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 40, 300, generator=generator)
    moved = random_states(student, teacher, torch.Generator().manual_seed(1))
    assert torch.allclose((moved - student).norm(dim=-1), (teacher - student).norm(dim=-1), rtol=1e-4)
    cosine = torch.nn.functional.cosine_similarity(moved - student, teacher - student, dim=-1)
    assert abs(cosine.mean()) < 4 / np.sqrt(200 * 300) and cosine.std() == pytest.approx(300**-0.5, rel=0.2)
    assert torch.equal(moved, random_states(student, teacher, torch.Generator().manual_seed(1)))
    assert torch.equal(random_states(student, student, generator), student)  # nothing to move by


def test_position_sets() -> None:
    sets = position_sets(np.array([FORMAT, THINK, FORMAT, FORMAT, ACTION, ACTION, FORMAT, FORMAT], np.int8))
    assert {name: indices.tolist() for name, indices in sets.items()} == {
        "action": [4, 5],
        "all": [0, 1, 2, 3, 4, 5],
        "thought": [0, 1, 2, 3],
    }
    assert not any(len(indices) for indices in position_sets(np.array([FORMAT, THINK], np.int8)).values())
    assert len(position_sets(np.array([ACTION], np.int8))["thought"]) == 0


# --- a planted carrier -----------------------------------------------------------------------------------------------

SKILL, FILLER, LEFT, RIGHT = 1, 2, 3, 4
WRITES = 2  # of the blocks 0 .. 5


def planted_model() -> LlamaForCausalLM:
    """Six blocks; block 2 spreads over the whole sequence whether the skill was in it, block 3 reads that and says
    LEFT instead of RIGHT. Every other block adds nothing."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=128, intermediate_size=4, num_hidden_layers=6, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            if parameter.ndim == 2:
                parameter.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 10.0  # large in every token: the norms hardly depend on the others
        model.model.embed_tokens.weight[SKILL, 1] = 1.0  # "the skill is here"
        for block, source, target in ((WRITES, 1, 2), (WRITES + 1, 2, 3)):
            attention = model.model.layers[block].self_attn  # queries and keys of 0: the mean over what came before
            attention.v_proj.weight[0, source] = 1.0
            attention.o_proj.weight[target, 0] = 2.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[RIGHT, 0], model.lm_head.weight[LEFT, 3] = 0.25, 3.0
    return model


def planted_pair(name: str) -> PairedSegment:
    """The student reads filler, the teacher the skill in front of it; the action is one token, LEFT."""
    student = np.array([FILLER] * 6 + [FILLER] * 6 + [LEFT, FILLER], np.int32)
    teacher = np.concatenate([np.array([SKILL] * 8, np.int32), student])
    positions = np.arange(6, 14)
    classes = np.array([THINK] * 5 + [FORMAT, ACTION, FORMAT], np.int8)
    turn = np.zeros(8, np.int16)
    return PairedSegment(
        student, teacher, positions, positions + 8, student[positions], turn, classes, name, f"task {name}", "own_skill"
    )


@pytest.fixture(scope="module")
def planted() -> dict[str, list[dict[str, Any]]]:
    pairs = {"own_skill": [planted_pair(name) for name in "abcdefgh"], "unrelated": []}
    tables = MEASURE.direct(subject(planted_model()), pairs, Provenance())
    return {name: table.to_pylist() for name, table in tables.items()}


def change(rows: list[dict[str, Any]], **wanted: Any) -> list[float]:
    """Mean change of the action's log-prob by block, as a share of the gap between the branches."""
    chosen = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    shares: dict[int, list[float]] = {}
    for row in chosen:
        gap = row["teacher_logprob"] - row["student_logprob"]
        shares.setdefault(int(row["layer"]), []).append((row["patched_logprob"] - row["student_logprob"]) / gap)
    return [float(np.mean(shares[layer])) for layer in sorted(shares)]


def test_the_planted_model_needs_the_skill(planted: Any) -> None:
    for row in planted["patching"]:
        assert row["teacher_logprob"] > -0.1 and row["student_logprob"] < -3
        assert row["tokens"] == row["differ"] == 1


def test_the_block_that_carries_the_skill_is_found(planted: Any) -> None:
    """The thought's state matters behind block 2 alone: before it knows nothing, and nobody reads it behind block 3."""
    rows = planted["patching"]
    thought = change(rows, positions="thought", scope="single", source="teacher")
    assert thought[WRITES] > 0.9 and np.abs(np.delete(thought, WRITES)).max() < 1e-3
    assert np.abs(change(rows, positions="thought", scope="single", source="random")).max() < 0.05
    # ranges: one that reaches block 2 from below, one that starts at or below it
    full = thought[WRITES]
    up_to, above = (change(rows, positions="thought", scope=scope, source="teacher") for scope in ("up_to", "from"))
    assert up_to == pytest.approx([0, 0, full, full, full, full], abs=1e-3)
    assert above == pytest.approx([full, full, full, 0, 0, 0], abs=1e-3)


def test_at_the_action_itself_the_effect_stays_from_that_block_on(planted: Any) -> None:
    rows = planted["patching"]
    for positions in ("action", "all"):
        effect = change(rows, positions=positions, source="teacher")
        assert np.abs(effect[:WRITES]).max() < 1e-3
        assert effect[-1] == pytest.approx(1, abs=1e-4) and min(effect[WRITES + 1 :]) > 0.99
        turned = {
            int(r["layer"]): r["turned"] for r in rows if r["positions"] == positions and r["source"] == "teacher"
        }
        assert [turned[layer] for layer in (0, 1, 4, 5)] == [0, 0, 1, 1]
        random = change(rows, positions=positions, source="random")  # as long, and it leads nowhere
        assert np.abs(random).max() < 0.25 and abs(float(np.mean(random))) < 0.1
    assert change(rows, positions="all", source="teacher")[WRITES] > 0.9
    assert 0.1 < change(rows, positions="action", source="teacher")[WRITES] < 0.3  # block 3 also reads the thought
    assert not any(row["lost"] for row in rows)


# --- the measure -----------------------------------------------------------------------------------------------------


def test_one_row_for_each_block_and_run() -> None:
    pairs = {"unrelated": [reply_pair(5)], "own_skill": [reply_pair(6), reply_pair(7, classes=(1, 3))]}
    model = tiny_model().train()
    tables = MEASURE.direct(subject(model), pairs, Provenance(run="r"))
    rows = tables["patching"].to_pylist()
    assert {row["context"] for row in rows} == {"own_skill"} and {row["segment"] for row in rows} == {0}
    runs = {(r["positions"], r["scope"], r["source"], r["draw"]) for r in rows}
    assert len(runs) == 5 + 3 * DRAWS and len(rows) == 3 * len(runs)
    (left_out,) = tables["measurements"].to_pylist()
    assert (left_out["run"], left_out["metric"], left_out["value"]) == ("r", "patching/left_out/no_action", 1)
    assert model.training and not any(parameter.grad is not None for parameter in model.parameters())
    # the log-probs of the branches are those of the pair, summed over the action
    passed = run_pairs(model.eval(), [pairs["own_skill"][0]])
    assert rows[0]["teacher_logprob"] == pytest.approx(passed.teacher_logprobs[3:5].sum().item(), abs=1e-5)
    # another context where own_skill was not asked for; the same numbers again
    other = MEASURE.direct(subject(model), {"unrelated": pairs["unrelated"]}, Provenance())
    assert set(other["patching"].column("context").to_pylist()) == {"unrelated"}
    assert MEASURE.direct(subject(model), pairs, Provenance(run="r"))["patching"].equals(tables["patching"])


def test_a_teacher_that_reads_the_same_changes_nothing() -> None:
    """Negative control: no skill, no gap, no effect; the random control moves by nothing."""
    pair = reply_pair(8, skill=0)
    rows = MEASURE.direct(subject(tiny_model()), {"own_skill": [pair]}, Provenance())["patching"].to_pylist()
    for row in rows:
        assert row["patched_logprob"] == pytest.approx(row["student_logprob"], abs=1e-4)
        assert row["differ"] == row["turned"] == row["lost"] == 0


def test_turned_and_lost_count_greedy_tokens() -> None:
    model, pair = tiny_model(), reply_pair(9, classes=(1, 2, 2, 2, 2, 2, 2, 2, 3))
    rows = MEASURE.direct(subject(model), {"own_skill": [pair]}, Provenance())["patching"].to_pylist()
    with torch.no_grad():
        passed = run_pairs(model, [pair], states="before", outputs={"greedy": lambda x: x.argmax(-1)})
        ids, positions = tensors(pair)
        run = patched_run(model, ids, positions[1:8] - 1, passed.teacher_states[:, 1:8], positions[1:8])
    student, teacher = (x["greedy"][1:8] for x in (passed.student_outputs, passed.teacher_outputs))
    chosen = [row for row in rows if row["positions"] == "action" and row["source"] == "teacher"]
    for row, greedy in zip(chosen, run.greedy, strict=True):
        assert row["differ"] == (student != teacher).sum()
        agree = row["tokens"] - row["differ"] + row["turned"] - row["lost"]
        assert agree == (greedy == teacher).sum()
    assert chosen[-1]["turned"] == chosen[-1]["differ"] > 0 and chosen[-1]["lost"] == 0


def test_states_of_the_teacher_are_those_before_the_token() -> None:
    pair = reply_pair(1)
    passed = run_pairs(tiny_model(), [pair], states="before")
    capture = capture_states(tiny_model(), torch.tensor(pair.teacher_ids)[None].long(), torch.ones(1, 19).long())
    assert torch.allclose(passed.teacher_states[2], capture.states["2"][0, pair.teacher_positions - 1], atol=1e-5)
