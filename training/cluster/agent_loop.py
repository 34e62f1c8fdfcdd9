"""Our episodes as an agent loop of verl: the rollout's own Episode asks, verl's servers answer, our environments step.

Token in, token out: what a server sampled is stored and trained on, and every context is made of stored ids. verl's own
tokenisation of messages is not used. The episode travels back whole, in a field of the loop's output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from diagnostics.records import Skill, Trajectory
from diagnostics.render import decode_reply, prompt_ids
from training.cluster.async_pool import AsyncPool
from training.config import Config
from training.envs.kinds import KINDS
from training.envs.pool import EnvPool
from training.method import load_method
from training.rollout import Episode, RolloutStats, Start
from training.samplers.base import Key, Reply
from training.settings import read_config
from training.skills.hindsight import hindsight_messages, parse_skill

SKILL_TOKENS = 96  # of a written skill, as in skills/hindsight.py


@dataclass(frozen=True)
class Job:
    """One episode to play."""

    config: str  # path of the run's config.json, which every node sees
    start: Start
    seed: int
    step: int
    temperature: float
    skill: str | None  # in the player's own prompt
    write: bool  # also write a hindsight skill when it is over


@dataclass(frozen=True)
class Ask:
    """One reply to write, without an environment."""

    prompt: Sequence[int]
    key: Key
    limit: int  # tokens
    temperature: float


@dataclass(frozen=True)
class Played:
    """What came of a job."""

    trajectory: Trajectory
    skill: Skill | None = None


@dataclass(frozen=True)
class Lost:
    """A job that something which is no environment has broken: a server, a worker."""

    reason: str


class Parcel:
    """What verl passes on unopened: it would turn a dataclass in its fields into a dict."""

    def __init__(self, content: Played | Reply | Lost) -> None:
        self.content = content


@dataclass(frozen=True)
class _Voice:
    """What an Episode asks of a sampler."""

    tokenizer: Any
    protocol: str
    max_new_tokens: int


@cache
def settings(path: str) -> Config:
    """The run's configuration, read once a process."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    load_method(document["method"])  # the command line named it
    return read_config(path, Config())


@cache
def _pool(path: str, tokenizer: str) -> AsyncPool:
    """The environments of this process."""
    from transformers import AutoTokenizer

    env = settings(path).env

    def make() -> EnvPool:
        make_env = KINDS[env.kind].make_env(env, AutoTokenizer.from_pretrained(tokenizer))
        return EnvPool(make_env, env.workers, env.timeout)

    return AsyncPool(make)


class UndertowLoop(AgentLoopBase):
    """One episode, and where asked one skill written from it by the same weights; or a single reply."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        job: Job | Ask = row["job"]
        try:
            if isinstance(job, Ask):
                answer: Played | Reply = await self._reply(job.key, job.prompt, job.limit, job.temperature)
            else:
                answer = await self._play(job)
            return _output(answer, self.tokenizer.eos_token_id)
        except Exception as error:  # the trainer says it in one sentence
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            return _output(Lost(reason), self.tokenizer.eos_token_id)

    async def _play(self, job: Job) -> Played:
        config = settings(job.config)
        pool = _pool(job.config, self.config.actor_rollout_ref.model.path)
        sampler, env, stats = config.sampler, config.env, RolloutStats()
        voice: Any = _Voice(self.tokenizer, sampler.protocol, sampler.max_new_tokens)
        episode = Episode(job.start, job.seed, voice, env.history, env.show_admissible, job.skill)
        slot, answer = await pool.reset(job.start.task)
        try:
            episode.observe(answer, env.max_turns)
            while episode.stop is None:
                request = episode.request(sampler.max_context, stats)
                if request is None:
                    break
                context = episode.drafts[-1].ids
                reply = await self._reply(request.key, context, sampler.max_new_tokens, job.temperature)
                action = episode.take(reply, stats)
                episode.observe(await pool.step(slot, action), env.max_turns)
        finally:
            pool.leave(slot)
        trajectory = episode.trajectory(job.step)
        skill = await self._write(trajectory, job) if job.write else None
        return Played(trajectory, skill)

    async def _write(self, trajectory: Trajectory, job: Job) -> Skill | None:
        """One hindsight skill; None from a crashed episode or a reply that is no skill."""
        if trajectory.error is not None or not trajectory.turns:
            return None
        terse = "<skill>" in self.tokenizer.get_vocab()
        prompt = prompt_ids(self.tokenizer, hindsight_messages(trajectory, terse))
        key = (settings(job.config).seed, trajectory.task_id, trajectory.attempt, "skill", job.step)
        text = parse_skill((await self._reply(key, prompt, SKILL_TOKENS, job.temperature)).text)
        if not text:
            return None
        return Skill(text, "hindsight", trajectory.task_id, trajectory.id, trajectory.success)

    async def _reply(self, key: Key, context: Sequence[int], limit: int, temperature: float) -> Reply:
        """Sampled by a server of verl, from a seed that depends on the key alone."""
        digest = hashlib.sha256(json.dumps(list(key)).encode()).digest()
        answer = await self.server_manager.generate(
            request_id=json.dumps(list(key[:3])),  # one episode stays with one server, which knows its prefix
            prompt_ids=list(context),
            sampling_params={
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": -1,
                "max_tokens": limit,
                "logprobs": True,
                "seed": int.from_bytes(digest[:7], "little"),
                "extra_args": {"key": list(key)},  # vLLM leaves it alone; the replica on CPUs draws as our sampler does
                "stop_token_ids": [self.tokenizer.eos_token_id],
            },
        )
        ids = [int(token) for token in answer.token_ids]
        if not ids or answer.log_probs is None or len(answer.log_probs) != len(ids):
            raise RuntimeError("a rollout server answered without tokens or without their log-probs")
        logprobs = np.array(answer.log_probs, np.float32)
        ended = ids[-1] == self.tokenizer.eos_token_id
        return Reply(np.array(ids, np.int32), logprobs, decode_reply(self.tokenizer, ids), ended, 0)


def _output(found: Played | Reply | Lost, filler: int) -> AgentLoopOutput:
    """verl sees an episode's last segment, else a prompt of one token and an unmasked one behind it."""
    prompt, response, mask, logprobs, reward, turns = [filler], [filler], [0], [0.0], 0.0, 0
    if isinstance(found, Played):
        reward, turns = found.trajectory.reward, len(found.trajectory.turns)
        for last in found.trajectory.segments[-1:]:
            cut = last.prompt_length
            prompt, response = last.ids[:cut].tolist(), last.ids[cut:].tolist()
            mask = last.response_mask[cut:].astype(int).tolist()
            logprobs = last.rollout_logprobs[cut:].tolist()
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=logprobs,
        reward_score=reward,
        num_turns=turns,
        metrics=AgentLoopMetrics(),
        extra_fields={"parcel": Parcel(found), "reward_extra_info": {}, "min_global_steps": 0, "max_global_steps": 0},
    )
