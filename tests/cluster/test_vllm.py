"""A real vLLM server beside transformers, on the tiny policy: the same greedy episodes, log-probs, a server killed."""

import importlib.util
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diagnostics.records import Trajectory
from training.config import RECIPES
from training.envs.folders import household_games
from training.models.load import load_policy
from training.rollout import group_starts, rollout
from training.samplers.hf import HFSampler
from training.samplers.vllm import check_logprobs
from training.session import Session

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test-cluster` runs this"
)
GAMES, TURNS = 8, 6


def wide_heads(model: Any, width: int = 64) -> Any:
    """The same function with wider attention heads, as a Llama: vLLM has no attention on CPUs for heads of 40.

    New dimensions hold zeros. Rotary pairs (i, i + half) keep their frequencies base^(-i / half) under a base of
    base^(width / old width); the scores' factor 1/sqrt(width) goes into the queries.
    """
    old, heads = model.config, model.config.num_attention_heads
    narrow = old.hidden_size // heads
    config = LlamaConfig(
        **{
            name: getattr(old, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        },
        **{name: getattr(old, name) for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps")},
        **{
            name: getattr(old, name) for name in ("tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id")
        },
        num_attention_heads=heads,
        head_dim=width,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": old.rope_parameters["rope_theta"] ** (width / narrow)},
    )
    place = torch.cat([torch.arange(narrow // 2), width // 2 + torch.arange(narrow // 2)])

    def widened(weight: torch.Tensor, count: int) -> torch.Tensor:
        out = weight.new_zeros(count, width, *weight.shape[1:])
        out[:, place] = weight.view(count, narrow, *weight.shape[1:])
        return out.flatten(0, 1)

    weights = dict(model.state_dict())
    for name, weight in model.state_dict().items():
        kind = name.split(".")[-2] if "self_attn" in name else ""
        if kind in ("q_proj", "k_proj", "v_proj"):
            factor = (width / narrow) ** 0.5 if kind == "q_proj" else 1.0
            weights[name] = widened(weight * factor, heads if kind == "q_proj" else old.num_key_value_heads)
        elif kind == "o_proj":
            weights[name] = widened(weight.T, heads).T.contiguous()
            weights[name.replace("weight", "bias")] = weight.new_zeros(old.hidden_size)
    wide = LlamaForCausalLM(config).to(model.dtype).eval()
    wide.load_state_dict(weights)
    return wide


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = household_games(
        tmp_path_factory.mktemp("games") / "household", {"train": 2, "valid_seen": GAMES, "valid_unseen": 2}, 0, 1
    )
    tiny = RECIPES["tiny-grpo"]
    config = replace(
        tiny,
        env=replace(tiny.env, data=str(folder), workers=1),
        sampler=replace(tiny.sampler, engine="vllm", batch_size=GAMES),
        eval=replace(tiny.eval, size=0),
    )
    model, tokenizer = load_policy("tiny")
    wide, ids = wide_heads(model), torch.randint(len(tokenizer), (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
    source = tmp_path_factory.mktemp("wide")
    wide.save_pretrained(source)
    tokenizer.save_pretrained(source)
    with Session(config, model, tokenizer, source=str(source)) as session:
        yield session


def play(session: Session, sampler: Any, seed: int = 0) -> list[Trajectory]:
    starts = group_starts(session.tasks("valid_seen"), 1)
    return rollout(sampler, session.pool, starts, seed=seed, max_turns=TURNS, max_context=2048, show_admissible=False)[
        0
    ]


def ids(episodes: list[Trajectory]) -> list[list[int]]:
    return [segment.ids.tolist() for episode in episodes for segment in episode.segments]


def reference(session: Session, temperature: float) -> HFSampler:
    s = session.config.sampler
    return HFSampler(session.model, session.tokenizer, s.protocol, temperature, s.max_new_tokens, s.batch_size)


def test_greedy_episodes_are_those_of_transformers(session: Session) -> None:
    ours, theirs = play(session, session.sampler(0.0)), play(session, reference(session, 0.0))
    assert ids(ours) == ids(theirs) and sum(len(episode.turns) for episode in ours) > GAMES
    assert [(t.success, t.stop_reason) for t in ours] == [(t.success, t.stop_reason) for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a.segments, b.segments, strict=True):
            np.testing.assert_allclose(x.rollout_logprobs, y.rollout_logprobs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_logprobs_are_those_at_the_sampling_temperature(session: Session, temperature: float) -> None:
    assert check_logprobs(session.sampler(temperature), session.model) < 1e-3  # cases B22, B05


def test_a_reply_is_the_same_beside_any_others(session: Session) -> None:
    together = play(session, session.sampler(1.0))
    alone = play(session, replace(session.sampler(1.0), batch_size=2))  # type: ignore[type-var]
    assert ids(together) == ids(alone) and ids(together) != ids(play(session, session.sampler(1.0), seed=1))


def test_a_server_killed_in_the_middle_costs_no_episode(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampler: Any = session.sampler(0.0)
    undisturbed = play(session, sampler)
    server, complete, seen = sampler.server, sampler.server.complete, []

    def killing(*given: Any, **named: Any) -> Any:
        seen.append(1)
        if len(seen) == 2 * GAMES:
            os.killpg(server._process.pid, signal.SIGKILL)
        return complete(*given, **named)

    monkeypatch.setattr(server, "complete", killing)
    with caplog.at_level(logging.WARNING):
        survived = play(session, sampler)
    assert server.restarts == 1 and "the vLLM server ended (-9); new start 1 of 3" in caplog.text
    assert ids(survived) == ids(undisturbed) and all(episode.error is None for episode in survived)
