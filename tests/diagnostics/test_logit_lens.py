"""The logit lens against the models' own logits, and a state whose words are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from diagnostics import logit_lens as module
from diagnostics.capture.hf import capture_states
from diagnostics.logit_lens import final_norm, logit_lens, said
from diagnostics.measure import Subject
from diagnostics.paired import run_pairs
from diagnostics.patching import MEASURE
from diagnostics.records import Provenance
from tests.diagnostics.test_patching import planted_model, planted_pair, reply_pair
from tests.diagnostics.tiny import tiny_model


def model_of(kind: str) -> Any:
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3}
    configs = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    if kind not in configs:
        return tiny_model(kind)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(configs[kind](**shape)).eval()


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "llama", "qwen3"])
@torch.no_grad()
def test_the_last_block_says_what_the_model_says(kind: str) -> None:
    model = model_of(kind)
    ids = torch.randint(1, 300, (1, 9), generator=torch.Generator().manual_seed(1))
    states = capture_states(model, ids, torch.ones_like(ids)).states
    stack = torch.stack([states[str(layer)][0, :-1] for layer in range(3)])
    seen = logit_lens(model, stack, ids[0, 1:], temperature=0.7)
    logits = model(ids).logits[0, :-1]
    own = logits.gather(-1, ids[0, 1:, None])
    assert torch.allclose(
        seen.logprob[-1], (logits / 0.7).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0], atol=1e-5
    )
    assert torch.equal(seen.greedy[-1], logits.argmax(-1))
    assert torch.equal(seen.rank[-1], 1 + (logits > own).sum(-1))
    assert (seen.logprob[0] - seen.logprob[-1]).abs().max() > 0.1


def test_what_is_said_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, final = tiny_model(), torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        whole = said(model, final, tokens)
        monkeypatch.setattr(module, "LOGIT_ELEMENTS", 3 * 300)
        for a, b in zip(whole, said(model, final, tokens), strict=True):
            assert a.shape == (2, 5) and torch.allclose(a, b, atol=1e-6)
    assert ((whole.rank == 1) == (whole.greedy == tokens)).all()


def test_a_model_with_other_norms_is_refused() -> None:
    model = tiny_model()
    model.model.second = torch.nn.LayerNorm(64)
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has 2 norms beside its blocks"):
        final_norm(model)
    shape = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    capped = AutoModelForCausalLM.from_config(Gemma2Config(num_attention_heads=2, num_key_value_heads=1, **shape))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        logit_lens(capped, torch.zeros(2, 1, 16), torch.zeros(1, dtype=torch.long))


def lens_rows(model: Any, pair: Any) -> list[dict[str, Any]]:
    subject = Subject(model, None, (), {}, seed=0, temperature=1.0, weights={})
    return MEASURE.direct(subject, {"own_skill": [pair]}, Provenance())["logit_lens"].to_pylist()


def test_the_lens_finds_where_the_planted_action_appears() -> None:
    """Behind block 3 in the teacher's run, nowhere in the student's."""
    rows = lens_rows(planted_model(), planted_pair("a"))
    rank = {branch: [row["rank"] for row in rows if row["branch"] == branch] for branch in ("student", "teacher")}
    assert min(rank["student"]) > 1 and rank["teacher"] == [*rank["student"][:3], 1, 1, 1]
    assert [row["layer"] for row in rows] == 2 * [str(layer) for layer in range(6)]


def test_rows_are_of_the_teachers_greedy_tokens_in_both_runs() -> None:
    model, pair = tiny_model(), reply_pair(3)
    rows = lens_rows(model, pair)
    assert len(rows) == 2 * 3 * 2  # branches, blocks, action tokens
    with torch.no_grad():
        passed = run_pairs(model, [pair], outputs={"logprobs": lambda logprobs: logprobs})
    full = {"student": passed.student_outputs["logprobs"], "teacher": passed.teacher_outputs["logprobs"]}
    for row in rows:
        if row["layer"] == "2":
            place = 3 + row["token"]
            wanted = full["teacher"][place].argmax()
            assert row["logprob"] == pytest.approx(full[row["branch"]][place, wanted].item(), abs=1e-5)
            assert row["rank"] == 1 or row["branch"] == "student"
