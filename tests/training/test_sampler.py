from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.diagnostics.tiny import chat_tokenizer, tiny_model
from tests.training.clockwork import babbler
from training.samplers.base import Reply, Request, draws
from training.samplers.hf import HFSampler, sample

TOKENIZER = chat_tokenizer()


def uniform(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def reread(model: torch.nn.Module, context: list[int], reply: Reply) -> np.ndarray:
    """Log-probs of a reply by one plain forward pass without a cache."""
    ids = torch.tensor([[*context, *reply.ids.tolist()]])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    at = torch.arange(len(context) - 1, ids.shape[1] - 1)
    return logprobs[at, torch.tensor(reply.ids).long()].numpy()


class TestSample:
    def test_log_probs_are_those_of_the_sampling_temperature(self) -> None:  # case B22
        logits = torch.tensor([[2.0, 0.0, -1.0]])
        p = torch.softmax(logits.double() / 0.4, -1)[0]
        for temperature, u, right in ((0.4, float(p[0] + p[1] / 2), -5.0073), (1.0, 0.9, -2.1698)):
            token, logprob, _ = sample(logits, uniform(u), temperature)
            assert token.tolist() == [1]
            assert logprob.item() == pytest.approx(right, abs=5e-5)

    def test_an_even_grid_of_draws_gives_the_softmax(self) -> None:
        n = 20_000
        logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
        tokens, logprobs, _ = sample(logits.expand(n, -1), (torch.arange(n).double() + 0.5) / n, 0.7)
        p = torch.distributions.Categorical(logits=logits[0].double() / 0.7).probs
        assert (torch.bincount(tokens, minlength=12) / n - p).abs().max() <= 1 / n
        assert torch.allclose(logprobs.double().exp(), p[tokens], atol=1e-6)

    def test_impossible_tokens_are_never_drawn(self) -> None:
        logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
        tokens, logprobs, _ = sample(logits.expand(3, -1), uniform(0.0, 0.5, 1 - 2**-53), 1.0)
        assert tokens.tolist() == [1, 3, 3]
        assert torch.allclose(logprobs, torch.tensor(0.5).log())

    def test_near_ties_are_flagged_and_others_are_not(self) -> None:
        logits = torch.zeros(4, 2)
        near = sample(logits, uniform(0.5 + 5e-6, 0.5 - 5e-6, 0.6, 0.0), 1.0)[2]
        assert near.tolist() == [True, True, False, False]  # 0 is no edge between two tokens
        assert sample(torch.tensor([[1.0, 1.0], [1.0, 2.0]]), uniform(0.0, 0.0), 0.0)[2].tolist() == [True, False]

    def test_temperature_zero_takes_the_largest(self) -> None:
        token, logprob, _ = sample(torch.tensor([[0.0, 3.0, 1.0]]), uniform(0.01), 0.0)
        assert token.item() == 1
        assert logprob.item() == pytest.approx(torch.tensor([0.0, 3.0, 1.0]).log_softmax(0)[1].item())


def test_draws_depend_on_every_part_of_the_key_and_on_nothing_else() -> None:
    key = (0, "task", 1, 2)
    assert np.array_equal(draws(key, 5), draws(key, 50)[:5])
    others = [(1, "task", 1, 2), (0, "tusk", 1, 2), (0, "task", 2, 2), (0, "task", 1, 3)]
    assert len({draws(k, 1)[0] for k in [key, *others]}) == 5
    assert 0.45 < np.mean([draws((0, "t", i, 0), 4) for i in range(500)]) < 0.55


def converse(sampler: HFSampler, rows: int, turns: int) -> dict[tuple[int, int], tuple[list[int], Reply]]:
    """Ragged turns of `rows` rows; each row leaves at its own turn. (row, turn) -> its whole context and the reply."""
    chance = random.Random(0)
    said = {
        (r, k): [chance.randrange(4, 250) for _ in range(chance.choice((1, 2, 3, 30)))]
        for r in range(rows)
        for k in range(turns)
    }
    session, contexts, out = sampler.session(rows), {row: [] for row in range(rows)}, {}
    for k in range(turns):
        live = [row for row in range(rows) if k < turns - row % 3]
        replies = session.reply({row: Request((0, f"row {row}", 0, k), said[row, k]) for row in live})
        for row in live:
            contexts[row] += said[row, k]
            out[row, k] = (list(contexts[row]), replies[row])
            contexts[row] += replies[row].ids.tolist()
    return out


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])  # gpt2: absolute positions, where padding would show (case B04)
def test_cached_log_probs_equal_a_full_reread(kind: str) -> None:
    model = babbler(kind)
    out = converse(HFSampler(model, TOKENIZER, max_new_tokens=8), rows=7, turns=5)
    lengths = {len(reply.ids) for _, reply in out.values()}
    assert len(lengths) > 3, "the rows must end at different steps for this test to mean something"
    for context, reply in out.values():
        assert np.allclose(reread(model, context, reply), reply.logprobs, atol=1e-4)
    longest, reply = max(out.values(), key=lambda pair: len(pair[0]))
    other = [longest[0] + 1, *longest[1:]]  # control: one early token differs
    assert np.abs(reread(model, other, reply) - reply.logprobs).max() > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replies_do_not_depend_on_the_batch(temperature: float) -> None:
    model = babbler()
    prompts = [list(range(4, 6 + 3 * i)) for i in (5, 1, 9, 3, 3, 0, 7)]
    keys = [(1, f"prompt {i}", 0, 0) for i in range(7)]
    runs = [
        HFSampler(model, TOKENIZER, temperature=temperature, max_new_tokens=8, batch_size=size).generate(prompts, keys)
        for size in (1, 3, 7)
    ]
    for alone, *others in zip(*runs, strict=True):
        assert alone.near_ties == 0
        for other in others:
            assert np.array_equal(alone.ids, other.ids) and alone.text == other.text
            assert np.allclose(alone.logprobs, other.logprobs, atol=1e-5)
    same = HFSampler(model, TOKENIZER, max_new_tokens=8).generate(prompts[3:5], [keys[3], keys[3]])
    assert np.array_equal(same[0].ids, same[1].ids)  # prompts 3 and 4 are equal: only the key tells them apart


def test_a_fresh_row_forgets_its_context() -> None:
    sampler = HFSampler(babbler(), TOKENIZER, max_new_tokens=6)
    session = sampler.session(2)
    session.reply({0: Request((0, "a"), [5, 6, 7]), 1: Request((0, "b"), [8, 9])})
    again = session.reply({0: Request((1, "a"), [10, 11], fresh=True), 1: Request((1, "b"), [12])})
    alone = sampler.generate([[10, 11]], [(1, "a")])[0]
    assert np.array_equal(again[0].ids, alone.ids) and np.allclose(again[0].logprobs, alone.logprobs, atol=1e-5)


def test_only_rows_that_still_talk_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:  # case R3
    model, fed = babbler(), []
    forward = model.base_model.forward

    def counted(*args, **kwargs):
        fed.append(kwargs["input_ids"].shape[0] if "input_ids" in kwargs else args[0].shape[0])
        return forward(*args, **kwargs)

    sampler = HFSampler(model, TOKENIZER, max_new_tokens=8)
    monkeypatch.setattr(model.base_model, "forward", counted)
    replies = sampler.session(7).reply({i: Request((0, i), [10 + i, 20]) for i in range(7)})
    assert sum(fed) == sum(len(reply.ids) for reply in replies.values())
    assert sum(fed) < 7 * max(len(reply.ids) for reply in replies.values())


def test_a_long_row_that_fell_silent_early_keeps_its_whole_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = babbler(), {0: [5, 6], 1: list(range(10, 60)), 2: [7, 8]}
    session = HFSampler(model, TOKENIZER, max_new_tokens=6).session(3)

    def hush(logits: torch.Tensor, *args: object) -> tuple[torch.Tensor, ...]:
        """Row 1 ends at once, the others talk to the limit."""
        token = torch.tensor([TOKENIZER.eos_token_id if row == 1 else 9 for row in session.rows[: len(logits)]])
        return token, torch.zeros(len(token)), torch.zeros(len(token), dtype=torch.bool)

    with monkeypatch.context() as patched:
        patched.setattr("training.samplers.hf.sample", hush)
        first = session.reply({row: Request((0, row), ids) for row, ids in said.items()})
    assert [len(first[row].ids) for row in range(3)] == [6, 1, 6]
    second = session.reply({row: Request((1, row), [20]) for row in (1, 2)})  # row 1 moves to the place of row 0
    for row, reply in second.items():
        assert np.allclose(reread(model, [*said[row], *first[row].ids.tolist(), 20], reply), reply.logprobs, atol=1e-4)


def test_the_cache_is_not_copied_for_every_token() -> None:
    model = tiny_model(layers=1)
    model.get_output_embeddings().weight.data[TOKENIZER.eos_token_id] = 0
    session = HFSampler(model, TOKENIZER, temperature=0.0, max_new_tokens=200).session(1)
    places = set()
    layer = session.cache.ragged[0]
    update = layer.update

    def watched(*args):
        out = update(*args)
        places.add(layer.keys.data_ptr())
        return out

    layer.update = watched
    reply = session.reply({0: Request((0,), [5])})[0]
    assert len(reply.ids) == 200 and not reply.ended  # cut at the limit and kept
    assert len(places) < 20


def test_dropout_is_off_and_the_mode_is_put_back() -> None:
    config = Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attention_dropout=0.9,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).train()
    sampler = HFSampler(model, TOKENIZER, max_new_tokens=5)
    first, second = (sampler.generate([[5, 6, 7]], [(0, "x")])[0] for _ in range(2))
    assert np.array_equal(first.logprobs, second.logprobs)
    assert model.training


class TestRefusals:
    def test_a_tokenizer_without_end_of_turn(self) -> None:
        with pytest.raises(ValueError, match="no eos_token"):
            HFSampler(tiny_model(), SimpleNamespace(eos_token_id=None))

    def test_sliding_attention(self) -> None:
        model = tiny_model()
        model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
        with pytest.raises(ValueError, match="full attention in every layer, qwen2"):
            HFSampler(model, TOKENIZER)

    def test_logits_that_are_changed_after_the_head(self) -> None:
        model = tiny_model()
        model.lm_head.register_forward_hook(lambda module, args, out: out)
        HFSampler(model, TOKENIZER)  # a hook that changes nothing is fine
        forward = model.forward
        model.forward = lambda *args, **kwargs: SimpleNamespace(logits=forward(*args, **kwargs).logits / 8)
        with pytest.raises(ValueError, match="changes its logits"):
            HFSampler(model, TOKENIZER)

    def test_a_row_that_left_and_a_request_without_tokens(self) -> None:
        session = HFSampler(babbler(), TOKENIZER, max_new_tokens=2).session(2)
        with pytest.raises(ValueError, match="no tokens"):
            session.reply({0: Request((0, "a"), [])})
        with pytest.raises(ValueError, match="row 1 has left"):
            session.reply({1: Request((0, "b"), [4])})
        assert session.reply({}) == {}
