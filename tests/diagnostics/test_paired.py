"""Contexts that differ in the skill alone, and what a model reads in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diagnostics import forward
from diagnostics.beside import run_beside
from diagnostics.capture.hf import decoder_blocks
from diagnostics.paired import PairedPass, PairedSegment, build_pairs, run_pairs
from diagnostics.records import Message, TokenClass
from diagnostics.render import decode, encode, prompt_ids, segment_from_turns
from tests.diagnostics.tiny import (
    CHATML,
    FORGETS_THOUGHTS,
    chat_tokenizer,
    one_turn_segment,
    random_pair,
    segment,
    tiny_model,
    trajectory,
)

KINDS = ["qwen2", "gpt2"]
PAIRS = [random_pair(0), random_pair(1, length=33, skill=2), random_pair(2, length=12, skill=15, responses=3)]


# --- contexts --------------------------------------------------------------------------------------------------------


def _pair(skill: str, tokenizer: Any = None, limit: int = 10_000) -> PairedSegment:
    tokenizer = tokenizer or chat_tokenizer()
    play = trajectory([("A desk.", "x")])
    ((pair,), _) = build_pairs(tokenizer, [(play, one_turn_segment(tokenizer))], {"t0": skill}, "own_skill", limit)
    return pair


def test_the_teacher_reads_the_same_response_behind_the_skill() -> None:
    tokenizer = chat_tokenizer()
    pair = _pair("open the drawer", tokenizer)
    assert pair.teacher_ids is not None
    without, with_skill = decode(tokenizer, pair.student_ids), decode(tokenizer, pair.teacher_ids)
    assert with_skill == without.replace("Task:", "Skill: open the drawer\nTask:")
    assert np.array_equal(pair.teacher_ids[pair.teacher_positions], pair.student_ids[pair.student_positions])
    assert (pair.trajectory_id, pair.task_id, pair.context) == ("t0", "task", "own_skill")
    assert TokenClass.NONE not in pair.token_class and (pair.turn == 0).all()


def test_an_empty_skill_gives_the_same_context() -> None:
    pair = _pair("")
    assert np.array_equal(pair.teacher_ids, pair.student_ids)
    assert np.array_equal(pair.teacher_positions, pair.student_positions)


def test_later_turns_of_a_growing_conversation_move_along() -> None:
    tokenizer = chat_tokenizer()
    play = trajectory([("A desk.", "<action>look</action>"), ("Nothing.", "<action>go</action>")])
    (grown,) = segment_from_turns(tokenizer, play, 1000)
    ((pair,), _) = build_pairs(tokenizer, [(play, grown)], {"t0": "try"}, "own_skill", 1000)
    assert pair.teacher_ids is not None and pair.teacher_positions is not None
    shift = len("Skill: try\n")  # one token a byte
    assert (pair.teacher_positions - pair.student_positions == shift).all()
    assert set(pair.turn.tolist()) == {0, 1}
    assert len(pair.teacher_ids) == len(pair.student_ids) + shift


def test_b07_sampled_ids_are_never_encoded_again() -> None:
    tokenizer = chat_tokenizer(merges=[("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")])
    he, llo = (tokenizer.convert_tokens_to_ids(piece) for piece in ("he", "llo"))
    assert encode(tokenizer, "hello") not in ([he, llo],)  # the tokenizer itself would write one token
    messages = (Message("user", "Task: greet"),)
    sampled = segment(messages, prompt_ids(tokenizer, messages), [he, llo], np.full(2, TokenClass.FORMAT))
    ((pair,), _) = build_pairs(tokenizer, [(trajectory([]), sampled)], {"t0": "be kind"}, "own_skill", 1000)
    assert pair.teacher_ids is not None
    assert pair.response_ids.tolist() == [he, llo]
    assert pair.teacher_ids[pair.teacher_positions].tolist() == [he, llo]
    model = tiny_model(vocab=len(tokenizer))
    with torch.no_grad():
        logits = model(torch.from_numpy(pair.student_ids.astype(np.int64))[None]).logits[0]
    at = len(pair.student_ids) - 2
    expected = torch.stack([logits[at - 1].log_softmax(-1)[he], logits[at].log_softmax(-1)[llo]])
    torch.testing.assert_close(run_pairs(model, [pair]).student_logprobs, expected, rtol=0, atol=1e-5)


def test_b12_the_border_token_is_the_same_in_both_contexts() -> None:
    tokenizer = chat_tokenizer(merges=[(".", "m")], template="{% for m in messages %}{{ m.content }}{% endfor %}")
    play = trajectory([("call .", "memory")])
    (retokenised,) = segment_from_turns(tokenizer, play, 1000)
    ((pair,), _) = build_pairs(tokenizer, [(play, retokenised)], {"t0": "skill ."}, "own_skill", 1000)
    assert pair.response_ids.tolist() == [*encode(tokenizer, "memory"), tokenizer.eos_token_id]
    merged = replace(retokenised, ids=np.where(retokenised.response_mask, retokenised.ids, 5).astype(np.int32))
    with pytest.raises(ValueError, match="does not render to the ids it was sampled with"):
        build_pairs(tokenizer, [(play, merged)], {"t0": "skill ."}, "own_skill", 1000)


def test_response_ids_that_differ_are_refused() -> None:
    pair = _pair("try")
    for branch, wrong in (
        ("student", {"response_ids": pair.response_ids + 1}),
        ("teacher", {"teacher_positions": pair.student_positions}),
    ):
        with pytest.raises(ValueError, match=f"'t0', context 'own_skill', {branch} branch: .* not the response ids"):
            replace(pair, **wrong)
    first = np.arange(len(pair.response_ids))
    with pytest.raises(ValueError, match="cannot hold the first token"):
        replace(pair, student_positions=first, response_ids=pair.student_ids[first])


def test_b13_the_branches_agree_on_the_bos() -> None:
    tokenizer = chat_tokenizer(template="<s>" + CHATML, bos="<s>")
    pair = _pair("try", tokenizer)
    assert pair.teacher_ids is not None
    for ids in (pair.student_ids.tolist(), pair.teacher_ids.tolist()):
        assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


def test_b32_a_teacher_context_is_whole_or_left_out_and_counted() -> None:
    tokenizer = chat_tokenizer()
    play, other = trajectory([("A desk.", "x")]), trajectory([("A desk.", "x")], id="t1")
    own = one_turn_segment(tokenizer)
    rows = [(play, own), (other, own)]
    full = len(own.ids) + len("Skill: sixsix\n")
    for limit, lengths, too_long in ((full, [full], 0), (full - 1, [], 1)):
        pairs, counts = build_pairs(tokenizer, rows, {"t0": "sixsix"}, "own_skill", limit)
        assert [len(pair.teacher_ids) for pair in pairs if pair.teacher_ids is not None] == lengths
        assert counts == {"paired": 1 - too_long, "too_long": too_long, "no_skill": 1}
    kept, counts = build_pairs(tokenizer, rows, {"t0": "sixsix"}, "own_skill", full, keep_unpaired=True)
    assert [pair.teacher_ids is not None for pair in kept] == [True, False]
    assert counts == {"paired": 1, "too_long": 0, "no_skill": 1}
    alone, counts = build_pairs(tokenizer, rows, None, "none", full)
    assert [pair.teacher_ids for pair in alone] == [None, None] and counts["paired"] == 0


def test_b53_only_generated_tokens_are_paired() -> None:
    tokenizer = chat_tokenizer()
    messages = (Message("user", "Task: find"),)
    prompt, body = prompt_ids(tokenizer, messages), encode(tokenizer, "abc" + "page" + "de")
    generated = np.array([False] * len(prompt) + [True] * 3 + [False] * 4 + [True] * 2)
    sampled = replace(segment(messages, prompt, body, np.full(9, TokenClass.FORMAT)), response_mask=generated)
    assert sampled.response_mask.sum() == 5
    ((pair,), _) = build_pairs(tokenizer, [(trajectory([]), sampled)], {"t0": "try"}, "own_skill", 1000)
    assert decode(tokenizer, pair.response_ids) == "abcde"
    assert run_pairs(tiny_model(), [pair], states="before").student_logprobs.shape == (5,)


def test_b08_segments_of_a_rewritten_history_pair_too() -> None:
    tokenizer = chat_tokenizer(template=FORGETS_THOUGHTS)
    play = trajectory([("A.", "<think>x</think><action>a</action>"), ("B.", "<think>y</think><action>b</action>")])
    rows = [(play, part) for part in segment_from_turns(tokenizer, play, 1000)]
    pairs, counts = build_pairs(tokenizer, rows, {"t0": "try"}, "own_skill", 1000)
    assert counts["paired"] == 2
    for pair in pairs:
        assert pair.teacher_ids is not None
        assert decode(tokenizer, pair.teacher_ids).count("Skill: try\nTask:") == 1


# --- forwards --------------------------------------------------------------------------------------------------------


def _oracle(model: Any, ids: np.ndarray, positions: np.ndarray, temperature: float = 1.0) -> dict[str, Tensor]:
    """The slow way: every token of one row through the whole model, then a loop over its response."""
    output = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states="before")
    logprobs, entropies = [], []
    for position in positions:
        distribution = torch.distributions.Categorical(logits=output.logits[0, position - 1] / temperature)
        logprobs.append(distribution.log_prob(torch.tensor(int(ids[position]))))
        entropies.append(distribution.entropy())
    before = torch.from_numpy(positions - 1)
    names = ["embed", *range(model.config.num_hidden_layers - 1), "final_norm"]
    states = {str(name): h[0, before] for name, h in zip(names, output.hidden_states, strict=True)}
    return {"logprobs": torch.stack(logprobs), "entropy": torch.stack(entropies), **states}


def _close(actual: Tensor | None, expected: Tensor, atol: float = 1e-4) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch_tokens", [None, 1, 60])
def test_run_pairs_against_one_row_at_a_time(kind: str, micro_batch_tokens: int | None) -> None:
    model = tiny_model(kind)
    result = run_pairs(
        model,
        PAIRS,
        temperature=0.7,
        states="before",
        entropy=True,
        extra_layers=("embed", "final_norm"),
        micro_batch_tokens=micro_batch_tokens,
    )
    assert result.row.tolist() == [0] * 5 + [1] * 5 + [2] * 3 and result.has_teacher.all()
    assert result.student_states is not None and result.student_states.shape == (3, 13, 64)
    assert result.teacher_states is not None
    for index, pair in enumerate(PAIRS):
        assert pair.teacher_ids is not None and pair.teacher_positions is not None
        here = result.row == index
        with torch.no_grad():
            student = _oracle(model, pair.student_ids, pair.student_positions, 0.7)
            teacher = _oracle(model, pair.teacher_ids, pair.teacher_positions, 0.7)
        _close(result.student_logprobs[here], student["logprobs"])
        _close(result.teacher_logprobs[here], teacher["logprobs"])  # type: ignore[index]
        _close(result.student_entropy[here], student["entropy"])  # type: ignore[index]
        for layer in (0, 1):
            _close(result.student_states[layer, here], student[str(layer)])
            _close(result.teacher_states[layer, here], teacher[str(layer)])
        for name in ("embed", "final_norm"):
            _close(result.student_extra[name][here], student[name])
            _close(result.teacher_extra[name][here], teacher[name])


def test_order_of_the_pairs_does_not_matter() -> None:
    model = tiny_model()
    forward, backward = run_pairs(model, PAIRS), run_pairs(model, PAIRS[::-1])
    for index in range(3):
        _close(backward.student_logprobs[backward.row == 2 - index], forward.student_logprobs[forward.row == index])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch_tokens", [None, 60])
def test_b05_an_empty_skill_changes_nothing_bit_for_bit(kind: str, micro_batch_tokens: int | None) -> None:
    model = tiny_model(kind)
    same = [
        replace(pair, teacher_ids=pair.student_ids, teacher_positions=pair.student_positions, context="none")
        for pair in PAIRS
    ]
    result = run_pairs(model, same, states="before", micro_batch_tokens=micro_batch_tokens)
    assert torch.equal(result.student_logprobs, result.teacher_logprobs)  # type: ignore[arg-type]
    assert torch.equal(result.student_states, result.teacher_states)  # type: ignore[arg-type]
    moved = run_pairs(model, PAIRS, states="before")  # negative control: a skill does change both
    assert (moved.student_logprobs - moved.teacher_logprobs).abs().min() > 1e-4  # type: ignore[operator]


def test_b05_both_branches_run_at_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    original = forward.capture_states

    def recorded(model: Any, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return original(model, ids, *args, **kwargs)

    monkeypatch.setattr(forward, "capture_states", recorded)
    model = tiny_model()
    run_pairs(model, PAIRS)
    assert shapes == [(3, 35), (3, 35)]
    run_pairs(model, PAIRS, teacher=False)
    assert shapes[2:] == [(3, 33)]
    run_pairs(model, PAIRS, pad_to_teacher=False)
    assert shapes[3:] == [(3, 35), (3, 33)]  # the teacher first
    shapes.clear()
    run_pairs(model, PAIRS, micro_batch_tokens=60)  # widths 26, 35, 27: the widest alone, the others together
    assert shapes == [(1, 35), (1, 35), (2, 27), (2, 27)]


@pytest.mark.parametrize("micro_batch_tokens", [None, 1])
def test_b06_what_stands_at_pads_stays_there(micro_batch_tokens: int | None) -> None:
    model = tiny_model()
    clean = run_pairs(model, PAIRS, states="before")
    widths = [len(pair.student_ids) for pair in PAIRS]

    def poison(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        poisoned = output.clone()
        for row, width in enumerate(widths[: len(output)]):
            poisoned[row, width:] = float("nan")
        return poisoned

    handle = decoder_blocks(model)[-1].register_forward_hook(poison)
    dirty = run_pairs(model, PAIRS, states="before", teacher=False)
    handle.remove()
    assert dirty.student_states is not None
    assert torch.isfinite(dirty.student_states).all() and torch.isfinite(dirty.student_logprobs).all()
    _close(dirty.student_states, clean.student_states)  # type: ignore[arg-type]
    _close(dirty.student_logprobs, clean.student_logprobs)


def _constant_logits(logits: list[float]) -> Any:
    model = tiny_model(vocab=3)
    head = nn.Linear(64, 3)
    nn.init.zeros_(head.weight)
    head.bias.data = torch.tensor(logits)
    model.set_output_embeddings(head)
    return model


@pytest.mark.parametrize(("temperature", "expected"), [(0.4, -5.0073), (1.0, -2.1698)])
def test_b22_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    pair = random_pair(0, vocab=3)
    pair = replace(pair, student_ids=np.ones_like(pair.student_ids), response_ids=np.ones_like(pair.response_ids),
                   teacher_ids=None, teacher_positions=None)  # fmt: skip
    result = run_pairs(_constant_logits([2.0, 0.0, -1.0]), [pair], temperature=temperature, entropy=True)
    _close(result.student_logprobs, torch.full((5,), expected), atol=1e-4)
    p = torch.softmax(torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64) / temperature, 0)
    _close(result.student_entropy, torch.full((5,), float(-(p * p.log()).sum())), atol=1e-6)


def _gradients(model: Any, result: PairedPass) -> list[Tensor]:
    assert result.student_states is not None and result.student_entropy is not None
    weights = torch.linspace(-1, 1, len(result.row))
    loss = (weights * result.student_logprobs).sum() + (weights * result.student_entropy).sum()
    loss = loss + (weights[None, :, None] * result.student_states[:2]).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def test_gradients_of_the_student_equal_those_of_the_slow_way() -> None:
    model = tiny_model()
    options: dict[str, Any] = {"states": "before", "entropy": True, "student_grad": True}
    result = run_pairs(model, PAIRS, **options)
    assert not result.teacher_logprobs.requires_grad and not result.teacher_states.requires_grad  # type: ignore[union-attr]
    slow = [_oracle(model, pair.student_ids, pair.student_positions) for pair in PAIRS]
    joined = PairedPass(
        row=result.row,
        has_teacher=result.has_teacher,
        student_logprobs=torch.cat([one["logprobs"] for one in slow]),
        student_entropy=torch.cat([one["entropy"] for one in slow]),
        student_states=torch.stack([torch.cat([one[layer] for one in slow]) for layer in ("0", "1")]),
    )
    expected = _gradients(model, joined)
    for fast in (result, run_pairs(model, PAIRS, micro_batch_tokens=60, **options)):
        for ours, theirs in zip(_gradients(model, fast), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert not run_pairs(model, PAIRS).student_logprobs.requires_grad


def test_the_head_applied_in_pieces_changes_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    options: dict[str, Any] = {"states": "before", "entropy": True, "student_grad": True}
    whole = run_pairs(model, PAIRS, **options)
    expected = _gradients(model, whole)
    monkeypatch.setattr(forward, "LOGIT_ELEMENTS", 4 * 300)
    pieces = run_pairs(model, PAIRS, **options)
    _close(pieces.student_logprobs, whole.student_logprobs, atol=1e-5)
    _close(pieces.student_entropy, whole.student_entropy, atol=1e-5)  # type: ignore[arg-type]
    _close(pieces.teacher_logprobs, whole.teacher_logprobs, atol=1e-5)  # type: ignore[arg-type]
    for ours, theirs in zip(_gradients(model, pieces), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_teacher_of_other_weights() -> None:
    model, frozen = tiny_model(seed=0), tiny_model(seed=1)
    result = run_pairs(model, PAIRS, teacher_model=frozen, states="before")
    own = run_pairs(frozen, PAIRS, states="before")
    assert torch.equal(result.teacher_logprobs, own.teacher_logprobs)  # type: ignore[arg-type]
    assert torch.equal(result.teacher_states, own.teacher_states)  # type: ignore[arg-type]
    assert torch.equal(result.student_logprobs, run_pairs(model, PAIRS).student_logprobs)


def test_a_pair_without_teacher_is_marked_and_reads_its_own_context() -> None:
    model = tiny_model()
    lone = replace(PAIRS[1], teacher_ids=None, teacher_positions=None)
    result = run_pairs(model, [PAIRS[0], lone, PAIRS[2]], states="before")
    assert result.has_teacher.tolist() == [True] * 5 + [False] * 5 + [True] * 3
    assert result.teacher_logprobs is not None
    without = ~result.has_teacher
    assert torch.equal(result.teacher_logprobs[without], result.student_logprobs[without])
    _close(result.teacher_logprobs[~without], run_pairs(model, [PAIRS[0], PAIRS[2]]).teacher_logprobs)  # type: ignore[arg-type]


def test_dropout_touches_the_branch_with_gradients_only() -> None:
    model = tiny_model("gpt2")
    quiet = run_pairs(model, PAIRS)
    model.train()
    decoder_blocks(model)[0].eval()
    noisy = run_pairs(model, PAIRS, student_grad=True)
    assert torch.equal(noisy.teacher_logprobs, quiet.teacher_logprobs)  # type: ignore[arg-type]
    assert not torch.allclose(noisy.student_logprobs, quiet.student_logprobs, atol=1e-3)
    assert model.training and not decoder_blocks(model)[0].training and decoder_blocks(model)[1].training


def test_a_row_without_response_tokens_is_harmless() -> None:
    empty = random_pair(3, responses=0)
    assert run_pairs(tiny_model(), [PAIRS[0], empty, PAIRS[2]], micro_batch_tokens=1).row.tolist() == [0] * 5 + [2] * 3
    alone = run_pairs(tiny_model(), [empty], states="before", entropy=True)
    assert alone.student_states is not None and alone.student_states.shape == (3, 0, 64)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        run_pairs(tiny_model(), [])
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        run_pairs(tiny_model(), PAIRS, temperature=0.0)


# --- the full distribution -------------------------------------------------------------------------------------------


OUTPUTS = {"top": lambda logprobs: logprobs.topk(3).values, "best": lambda logprobs: logprobs.argmax(-1)}


@pytest.mark.parametrize("micro_batch_tokens", [None, 60])
@pytest.mark.parametrize("piece", [None, 4])
def test_outputs_are_functions_of_the_full_distribution_of_each_branch(
    monkeypatch: pytest.MonkeyPatch, micro_batch_tokens: int | None, piece: int | None
) -> None:
    model = tiny_model()
    if piece is not None:
        monkeypatch.setattr(forward, "LOGIT_ELEMENTS", piece * 300)
    seen: list[tuple[int, ...]] = []
    outputs = {**OUTPUTS, "seen": lambda logprobs: seen.append(tuple(logprobs.shape)) or logprobs[:, 0]}
    result = run_pairs(model, PAIRS, temperature=0.7, outputs=outputs, micro_batch_tokens=micro_batch_tokens)
    for branch in ("student", "teacher"):
        read = getattr(result, f"{branch}_outputs")
        assert read["top"].shape == (13, 3) and read["best"].shape == (13,)
        for index, pair in enumerate(PAIRS):
            ids, positions = getattr(pair, f"{branch}_ids"), getattr(pair, f"{branch}_positions")
            with torch.no_grad():
                logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, positions - 1]
            expected = torch.log_softmax(logits / 0.7, -1)
            _close(read["top"][result.row == index], expected.topk(3).values)
            assert torch.equal(read["best"][result.row == index], expected.argmax(-1))
    assert max(count for count, _ in seen) <= (piece or 13) and {width for _, width in seen} == {300}
    assert run_pairs(model, PAIRS, teacher=False, outputs=OUTPUTS).teacher_outputs == {}


# --- one student beside several teachers -----------------------------------------------------------------------------


def _other(pair: PairedSegment, seed: int, skill: int, context: str) -> PairedSegment:
    """The pair with other tokens in front; without any for 0."""
    text = np.random.default_rng(seed).integers(1, 300, skill).astype(np.int32)
    ids = np.concatenate([pair.student_ids[:1], text, pair.student_ids[1:]])
    return replace(pair, teacher_ids=ids, teacher_positions=pair.student_positions + skill, context=context)


BESIDE = {
    "own_skill": PAIRS,
    "none": [_other(pair, 0, 0, "none") for pair in PAIRS],
    "other_skill": [_other(pair, k, 9, "other_skill") for k, pair in enumerate(PAIRS)],
}
EVERYTHING: dict[str, Any] = {"states": "before", "divergence": "jsd", "extra_layers": ("embed", "final_norm")}
EVERYTHING |= {"outputs": OUTPUTS, "temperature": 0.8}


def _values(passed: PairedPass) -> dict[str, Tensor]:
    """Every tensor of a pass by name."""
    flat = {name: value for name, value in vars(passed).items() if isinstance(value, Tensor)}
    groups = ("student_extra", "teacher_extra", "student_outputs", "teacher_outputs")
    return flat | {f"{group}/{key}": value for group in groups for key, value in getattr(passed, group).items()}


def test_several_teachers_beside_one_student_read_what_each_pair_reads() -> None:
    model = tiny_model()
    result = dict(run_beside(model, BESIDE, **EVERYTHING))
    assert list(result) == list(BESIDE)
    for name, passed in result.items():
        alone = _values(run_pairs(model, BESIDE[name], **EVERYTHING))
        together = _values(passed)
        assert together.keys() == alone.keys() and len(together) == 15
        for key, expected in alone.items():
            torch.testing.assert_close(together[key], expected, rtol=0, atol=1e-4)
        for key, value in together.items():
            if key.startswith("student"):
                assert value is _values(result["own_skill"])[key]


@pytest.mark.parametrize("anew", [False, True])
def test_a_student_s_distributions_are_kept_or_made_anew(monkeypatch: pytest.MonkeyPatch, anew: bool) -> None:
    model, rows = tiny_model(), []
    kept = {name: _values(passed) for name, passed in run_beside(model, BESIDE, **EVERYTHING)}
    if anew:
        monkeypatch.setattr("diagnostics.beside.KEPT_ELEMENTS", 0)
    model.lm_head.register_forward_hook(lambda module, args, logits: rows.append(len(logits)))
    for name, passed in run_beside(model, BESIDE, **EVERYTHING):
        values = _values(passed)
        assert all(torch.equal(values[key], value) for key, value in kept[name].items())
    assert len(rows) == 1 + len(BESIDE) + anew * len(BESIDE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b05_an_empty_skill_beside_longer_ones_changes_nothing_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    model = tiny_model(kind).to(dtype)
    result = dict(run_beside(model, BESIDE, **EVERYTHING))
    for name, passed in result.items():
        values = _values(passed)
        same = [
            torch.equal(values[key], values[key.replace("teacher", "student")])
            for key in values
            if key.startswith("teacher")
        ]
        assert all(same) == (name == "none")
        assert bool(passed.divergence.any()) == (name != "none")  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [1, 3])
def test_a_context_read_alone_has_another_shape_and_the_same_values(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    shapes: list[tuple[int, ...]] = []
    original = forward.capture_states

    def recorded(model: Any, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(ids.shape))
        return original(model, ids, *args, **kwargs)

    monkeypatch.setattr(forward, "capture_states", recorded)
    model = tiny_model()
    pairs = {name: BESIDE[name][:count] for name in ("own_skill", "none")} | {"floor": BESIDE["none"][:count]}
    result = dict(run_beside(model, pairs, alone=("floor",), **EVERYTHING))
    own = [len(pair.student_ids) for pair in PAIRS[:count]]
    wide = (count, max(len(pair.teacher_ids) for pair in PAIRS[:count]))  # type: ignore[arg-type]
    assert shapes == [wide, wide, wide, *([(2, *own)] if count == 1 else [(1, width) for width in own])]
    floor, none = _values(result["floor"]), _values(result["none"])
    for key, expected in none.items():
        torch.testing.assert_close(floor[key], expected, rtol=0, atol=1e-4)


def test_contexts_of_other_students_are_refused() -> None:
    for others in (BESIDE["none"][::-1], BESIDE["none"][:2]):
        with pytest.raises(ValueError, match="'none' does not pair the students of the first context"):
            next(run_beside(tiny_model(), {"own_skill": PAIRS, "none": others}))
    with pytest.raises(ValueError, match="without pairs"):
        next(run_beside(tiny_model(), {"own_skill": []}))
