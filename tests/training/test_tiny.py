"""The tiny policy: its tokenizer, what it is scored on, how it is fitted, and what is written."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from diagnostics import render
from diagnostics.records import Message, TokenClass
from training.envs.rooms import rooms
from training.models.corpus import Example, texts
from training.models.tiny import (
    CONTROL,
    NUMBERS,
    TAGS,
    Recipe,
    batches,
    encode_example,
    imitate,
    make_model,
    make_tokenizer,
    save,
)

SMALL = Recipe(batch_tokens=400, max_tokens=300, d_model=32, layers=1, heads=2, kv_heads=1, d_mlp=48, threads=1)


def chat(thing: str, place: str, own: bool = True) -> Example:
    """A short game with three replies, the second of which may be put in."""
    first = f"-= Welcome =-\n\nYou see a {place} 1, and a fridge 1.\n\nYour task is to: put a {thing} in fridge."
    messages = [
        *render.task_messages(f"put a {thing} in fridge.", first, None),
        Message("assistant", f"<think>find {thing}</think><action>go to {place} 1</action>"),
        render.observation_message(f"You arrive at {place} 1. On the {place} 1, you see a {thing} 12.", None),
        Message("assistant", f"<think>take {thing} 12</think><action>take {thing} 12 from {place} 1</action>"),
        render.observation_message(f"You pick up the {thing} 12 from the {place} 1.", None),
        Message("assistant", f"<think>put {thing} 12 in fridge</think><action>go to fridge 1</action>"),
    ]
    return Example("act", tuple(messages), (True, own, True))


WRITE = Example(
    "write", (Message("user", "Task: x\nWrite a skill."), Message("assistant", "<skill>Look.</skill>")), (True,)
)
EXAMPLES = [chat("mug", "shelf"), chat("cd", "desk", own=False), chat("pen", "drawer"), WRITE]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(list(texts(EXAMPLES)), Recipe().vocabulary)


def expected_weights(tokenizer: Any, example: Example, recipe: Recipe) -> list[float]:
    """Message by message, from the template's own parts."""
    weights: list[float] = []
    flags = iter(example.scored)
    for message in example.messages:
        header = render.encode(tokenizer, f"<|im_start|>{message.role}\n")
        said = render.encode(tokenizer, f"{message.content}<|im_end|>")
        weight = float(next(flags)) if message.role == "assistant" else recipe.observation_weight
        weights += [recipe.observation_weight] * len(header) + [weight] * len(said) + [recipe.observation_weight]
    return weights


# Tokenizer


def test_words_and_numbers_of_the_games_are_one_token(tokenizer: Any) -> None:
    table = rooms()
    words = {name.lower() for names in (table["places"], table["holds"]) for name in names}
    numbered = {f" {number}" for number in range(1, NUMBERS + 1)}  # numbers follow a name, never begin a text
    pieces = [*words, *(f" {word}" for word in words), *numbered]
    assert [piece for piece in pieces if len(tokenizer.tokenize(piece)) != 1] == []
    assert len(render.encode(tokenizer, "cabinet 14, shelf 2.")) == 6
    assert len(tokenizer.tokenize(f" {NUMBERS + 1}")) > 1  # the test can tell
    assert len(render.encode(tokenizer, "<|im_start|>assistant\n")) == 3


def test_tags_and_control_tokens_are_one_token_wherever_they_stand(tokenizer: Any) -> None:
    for tag in (*TAGS, *CONTROL):
        for text in (tag, f"mug{tag}mug", f" {tag} "):
            assert tokenizer.tokenize(text).count(tag) == 1
    assert all(tokenizer.decode(tokenizer.convert_tokens_to_ids([tag])) == tag for tag in TAGS)
    ids = render.encode(tokenizer, "<think>a mug</think><action>go to shelf 1</action>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a mug</think><action>go to shelf 1</action>"


def test_ids_fit_the_vocabulary(tokenizer: Any) -> None:
    assert len(tokenizer) <= Recipe().vocabulary
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert tokenizer.bos_token_id is None
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("e\u0301 \u00e9 \u1112\u1161\u11ab \U0001f9a6 \x00\t\r\n")
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    """Up to Unicode's composed form, into which Qwen2's tokenizer brings what it reads."""
    assert render.decode(tokenizer, render.encode(tokenizer, text)) == unicodedata.normalize("NFC", text)


def test_the_tokenizer_is_decided_by_its_corpus(tokenizer: Any) -> None:
    again = make_tokenizer(list(texts(EXAMPLES)), Recipe().vocabulary)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


@pytest.mark.parametrize("example", EXAMPLES)
def test_training_reads_what_the_policy_meets(tokenizer: Any, example: Example) -> None:
    ids, _ = encode_example(tokenizer, example.messages, example.scored, Recipe())
    turns = [{"role": m.role, "content": m.content} for m in example.messages]
    assert ids.tolist() == render.encode(tokenizer, tokenizer.apply_chat_template(turns, tokenize=False))
    for k, message in enumerate(example.messages):
        if message.role == "assistant":
            prompt = render.prompt_ids(tokenizer, example.messages[:k])
            reply = [*render.encode(tokenizer, message.content), tokenizer.eos_token_id]
            assert ids[: len(prompt) + len(reply)].tolist() == prompt + reply
    if len(example.messages) > 2:
        joined = render.continuation_ids(
            tokenizer, example.messages[:1], example.messages[1].content, example.messages[2]
        )
        start = len(render.prompt_ids(tokenizer, example.messages[:1])) + len(
            render.encode(tokenizer, example.messages[1].content)
        )
        assert joined is not None
        assert ids[start + 1 : start + 1 + len(joined)].tolist() == joined


def test_replies_have_classes(tokenizer: Any) -> None:
    ids = [*render.encode(tokenizer, "<think>a mug</think><action>go to shelf 1</action>"), tokenizer.eos_token_id]
    think, action, form = TokenClass.THINK, TokenClass.ACTION, TokenClass.FORMAT
    assert render.token_classes(tokenizer, ids).tolist() == [form, think, think, form, form, *[action] * 4, form, form]


# What is scored


@pytest.mark.parametrize("example", EXAMPLES)
def test_loss_weights_stand_exactly_on_the_scored_replies(tokenizer: Any, example: Example) -> None:
    recipe = replace(Recipe(), observation_weight=0.25)
    ids, weight = encode_example(tokenizer, example.messages, example.scored, recipe)
    assert len(ids) == len(weight)
    assert weight.tolist() == expected_weights(tokenizer, example, recipe)


def test_cut_examples_are_a_beginning_of_the_whole(tokenizer: Any) -> None:
    example = chat("cd", "desk", own=False)
    ids, weight = encode_example(tokenizer, example.messages, example.scored, Recipe())
    for length in range(1, len(ids), 7):
        cut_ids, cut_weight = encode_example(tokenizer, example.messages, example.scored, Recipe(max_tokens=length))
        np.testing.assert_array_equal(cut_ids, ids[:length])
        np.testing.assert_array_equal(cut_weight, weight[:length])


# Batches


def drawn(tokenizer: Any, examples: Sequence[Example], recipe: Recipe, count: int = 12) -> list[Any]:
    return list(islice(batches(examples, tokenizer, recipe), count))


def test_batches_are_decided_by_the_seed(tokenizer: Any) -> None:
    first, again = drawn(tokenizer, EXAMPLES * 3, SMALL), drawn(tokenizer, EXAMPLES * 3, SMALL)
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    other = drawn(tokenizer, EXAMPLES * 3, replace(SMALL, seed=1))
    assert any(a.shape != b.shape or not torch.equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


def test_batches_keep_to_the_token_budget_and_pad_without_weight(tokenizer: Any) -> None:
    for ids, weight in drawn(tokenizer, EXAMPLES * 3, SMALL):
        assert ids.shape == weight.shape
        assert ids.numel() <= SMALL.batch_tokens
        padding = ids == tokenizer.pad_token_id
        assert (weight[padding] == 0).all()
        assert torch.equal(padding, padding.cummax(dim=1).values)  # right-padded
        assert not padding.all(dim=1).any()


def test_an_epoch_holds_every_example_once(tokenizer: Any) -> None:
    recipe = replace(SMALL, renamed=0.0, replaced=0.0)
    expected = sorted(
        encode_example(tokenizer, e.messages, e.scored, recipe)[0].tolist() for e in EXAMPLES for _ in range(3)
    )
    rows: list[list[int]] = []
    for ids, _ in batches(EXAMPLES * 3, tokenizer, recipe):
        rows += [[i for i in row if i != tokenizer.pad_token_id] for row in ids.tolist()]
        if len(rows) >= len(expected):
            break
    assert sorted(rows) == expected


def test_renamed_is_a_share_of_the_examples(tokenizer: Any) -> None:
    plain = encode_example(tokenizer, EXAMPLES[0].messages, EXAMPLES[0].scored, SMALL)[0].tolist()

    def unchanged(share: float) -> float:
        rows = [row for ids, _ in drawn(tokenizer, EXAMPLES[:1] * 40, replace(SMALL, renamed=share), 13) for row in ids]
        return float(np.mean([row.tolist() == plain for row in rows]))

    assert unchanged(0.0) == 1.0
    assert 0.2 < unchanged(0.5) < 0.8
    assert unchanged(1.0) < 0.2  # a permutation keeps some names


# Fitting


@pytest.fixture(scope="module")
def fitted(tokenizer: Any) -> tuple[Any, float, list[tuple[int, float]]]:
    recipe = replace(SMALL, tokens=12_000, lr=2e-2)
    model, seen = make_model(recipe, tokenizer), []
    loss = imitate(model, tokenizer, EXAMPLES, recipe, lambda done, running: seen.append((done, running)))
    return model, loss, seen


def test_imitation_lowers_the_loss(tokenizer: Any, fitted: tuple[Any, float, list[tuple[int, float]]]) -> None:
    model, loss, seen = fitted
    assert seen[0][1] == pytest.approx(np.log(len(tokenizer)), rel=0.1)  # random weights know nothing
    assert loss == seen[-1][1] < 0.9 * seen[0][1]
    assert seen[-2][0] < 12_000 <= seen[-1][0]  # stops with the update that reaches the budget
    assert not model.training
    ids, weight = encode_example(tokenizer, EXAMPLES[0].messages, EXAMPLES[0].scored, SMALL)

    def reply_loss(model: Any) -> float:
        with torch.no_grad():
            logprobs = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
        nats = -logprobs.gather(1, torch.from_numpy(ids)[1:, None])[:, 0]
        return float(nats[torch.from_numpy(weight)[1:] == 1].mean())

    assert reply_loss(model) < 0.6 * reply_loss(make_model(SMALL, tokenizer))


def test_imitation_is_byte_equal_when_repeated(tokenizer: Any) -> None:
    recipe, states = replace(SMALL, tokens=2_000), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + 5)  # the global generator decides nothing
        model = make_model(replace(recipe, seed=seed), tokenizer)
        imitate(model, tokenizer, EXAMPLES, replace(recipe, seed=seed))
        states.append({name: value.numpy().tobytes() for name, value in model.state_dict().items()})
    assert states[0] == states[1]
    assert states[0] != states[2]


# What is written


def test_save_writes_weights_and_a_build_record(tmp_path: Path, tokenizer: Any, fitted: tuple[Any, float, Any]) -> None:
    model, loss, _ = fitted
    out = save(tmp_path / "tiny", make_model(SMALL, tokenizer), tokenizer, SMALL, {"loss": loss, "examples": 4})
    record = json.loads((out / "build.json").read_text())
    assert record["sha256"] == hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert record["recipe"] == asdict(SMALL)
    assert Recipe(**record["recipe"]) == SMALL
    assert (record["loss"], record["examples"]) == (loss, 4)
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert all(value.dtype == torch.bfloat16 for value in load_file(out / "model.safetensors").values())
    again = AutoTokenizer.from_pretrained(out, local_files_only=True)
    text = "<|im_start|>user\nput a mug 12 in shelf.<|im_end|>\n<think> x</think>"
    assert render.encode(again, text) == render.encode(tokenizer, text)
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    twin = save(tmp_path / "twin", make_model(SMALL, tokenizer), tokenizer, SMALL, {"loss": loss, "examples": 4})
    for name in ("model.safetensors", "build.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (twin / name).read_bytes()


def test_a_policy_is_written_whole_and_never_over_something_else(tmp_path):
    tokenizer = make_tokenizer(["go to fridge 1"], SMALL.vocabulary)
    model = make_model(SMALL, tokenizer)
    out = save(tmp_path / "tiny", model, tokenizer, SMALL, {})
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ValueError, match="is there already; remove it or choose another --out"):
        save(out, model, tokenizer, SMALL, {})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
