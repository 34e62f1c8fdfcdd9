"""A real vLLM server beside transformers, on the shipped policy of Search-QA: greedy episodes, log-probs, a killed
server, and who can reach it."""

import importlib.util
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from diagnostics.records import Trajectory
from training.config import RECIPES
from training.models.load import load_policy
from training.rollout import group_starts, rollout
from training.samplers.hf import HFSampler
from training.samplers.vllm import check_logprobs
from training.session import Session

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test-cluster` runs this"
)
TASKS = 16


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    tiny = RECIPES["tiny-search-grpo"]
    config = replace(
        tiny,
        env=replace(tiny.env, workers=1),
        sampler=replace(tiny.sampler, engine="vllm", batch_size=TASKS),
        eval=replace(tiny.eval, size=TASKS),
    )
    model, tokenizer = load_policy("tiny-search")
    with Session(config, model, tokenizer, source="tiny-search") as session:
        yield session


def play(session: Session, sampler: Any, seed: int = 0) -> list[Trajectory]:
    config, starts = session.config, group_starts(session.panel_tasks, 1)
    limits = {"max_turns": config.env.max_turns, "max_context": config.sampler.max_context, "show_admissible": False}
    return rollout(sampler, session.pool, starts, seed=seed, **limits)[0]


def ids(episodes: list[Trajectory]) -> list[list[int]]:
    return [segment.ids.tolist() for episode in episodes for segment in episode.segments]


def off(session: Session, episodes: list[Trajectory], temperature: float) -> float:
    """The largest difference of a sampler's log-prob from that of one reading of the whole segment, in nats."""
    largest = 0.0
    for segment in (segment for episode in episodes for segment in episode.segments):
        read = torch.from_numpy(segment.ids.astype("int64"))[None]
        with torch.inference_mode():
            logprobs = (session.model(read).logits[0, :-1] / temperature).log_softmax(-1)
        own = logprobs.gather(1, read[0, 1:, None])[:, 0].numpy()
        sampled = segment.response_mask[1:]
        largest = max(largest, float(np.abs(own - segment.rollout_logprobs[1:])[sampled].max()))
    return largest


def test_greedy_episodes_are_those_of_transformers(session: Session) -> None:
    s = session.config.sampler
    reference = HFSampler(session.model, session.tokenizer, s.protocol, 0.0, s.max_new_tokens, s.batch_size)
    ours, theirs = play(session, session.sampler(0.0)), play(session, reference)
    assert ids(ours) == ids(theirs) and len(ours) == TASKS < sum(len(episode.turns) for episode in ours)
    assert [(t.success, t.stop_reason) for t in ours] == [(t.success, t.stop_reason) for t in theirs]
    assert off(session, ours, 1.0) < 1e-3 and off(session, theirs, 1.0) < 1e-3


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_logprobs_are_those_at_the_sampling_temperature(session: Session, temperature: float) -> None:
    sampler: Any = session.sampler(temperature)
    assert check_logprobs(sampler, session.model) < 1e-3  # cases B22, B05
    episodes = play(session, sampler)
    assert off(session, episodes, temperature) < 1e-3 < off(session, episodes, 0.7)


def test_a_reply_is_the_same_beside_any_others(session: Session) -> None:
    together = play(session, session.sampler(1.0))
    alone = play(session, replace(session.sampler(1.0), batch_size=4))  # type: ignore[type-var]
    assert ids(together) == ids(alone) and ids(together) != ids(play(session, session.sampler(1.0), seed=1))


def test_nobody_else_can_reach_the_server(session: Session) -> None:
    server = session.sampler(0.0).server  # type: ignore[attr-defined]
    family = psutil.Process(server._process.pid)
    places = [place for one in (family, *family.children(recursive=True)) for place in one.net_connections("inet")]
    assert {place.laddr.ip for place in places} <= {"127.0.0.1"}  # the worker's own
    assert server._socket.is_socket() and server._socket.parent.stat().st_mode & 0o077 == 0


def test_a_server_killed_in_the_middle_costs_no_episode(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampler: Any = session.sampler(0.0)
    undisturbed = play(session, sampler)
    server, complete, seen = sampler.server, sampler.server.complete, []

    def killing(*given: Any, **named: Any) -> Any:
        seen.append(1)
        if len(seen) == 2 * TASKS:
            os.killpg(server._process.pid, signal.SIGKILL)
        return complete(*given, **named)

    monkeypatch.setattr(server, "complete", killing)
    with caplog.at_level(logging.WARNING):
        survived = play(session, sampler)
    assert server.restarts == 1 and "the vLLM server ended (-9); new start 1 of 3" in caplog.text
    assert ids(survived) == ids(undisturbed) and all(episode.error is None for episode in survived)
