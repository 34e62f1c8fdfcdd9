"""Sampler over a vLLM server, for weights that stay as they are: evaluation, collecting episodes, writing hindsight.

A reply depends on its key: the request carries a seed made of it, and vLLM draws each request from a generator of its
own. The draws are not those of the other sampler; greedy replies are the same, up to near ties.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
import torch

from diagnostics.render import decode_reply, prompt_ids, task_messages
from training.samplers.base import Key, Reply, Request, as_asked, check_end
from training.samplers.hf import NEAR_TIE, evaluating
from training.samplers.server import Completion, VLLMServer

# nats between the two engines: the largest difference in float32; in bfloat16, where single tokens differ a lot (case
# B05), the mean. Both are far below what another temperature or other weights make of it.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
SIGHTS = ("You are in the middle of a room.", "You open the drawer 1. In it, you see a key 1.", "Nothing happens.")
CHECKED = 24  # tokens of each reply of the check


@dataclass(frozen=True, eq=False)
class VLLMSampler:
    """Samples replies with the weights that the server has loaded.

    Args: temperature 0 is greedy; max_new_tokens bounds one reply; batch_size is the number of requests at once.
    Raises: ValueError for a tokenizer without end-of-turn token.
    """

    server: VLLMServer
    tokenizer: Any
    protocol: str = "windowed"
    temperature: float = 1.0
    max_new_tokens: int = 512
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_end(self.tokenizer)

    def session(self, rows: int) -> VLLMSession:
        """A session of `rows` rows with an empty context each."""
        return VLLMSession(self, rows)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Key],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Reply]:
        """One reply a prompt, in the order of the prompts."""
        sampler = as_asked(self, max_new_tokens, temperature)
        return sampler.replies(keys, prompts)

    def replies(self, keys: Sequence[Key], contexts: Sequence[Sequence[int]]) -> list[Reply]:
        """One reply a context. A request that a dead server took with it is asked again; the others are kept."""
        with ThreadPoolExecutor(max_workers=max(1, min(self.batch_size, len(keys)))) as pool:
            try:
                return list(pool.map(self._reply, keys, contexts))
            except KeyboardInterrupt:
                self.server.end()  # the threads would wait for its answers, or for its start
                raise

    def _reply(self, key: Key, context: Sequence[int]) -> Reply:
        greedy = self.temperature == 0
        found = self.server.complete(
            context,
            seed=seed_of(key),
            max_tokens=self.max_new_tokens,
            temperature=self.temperature,
            stop=self.tokenizer.eos_token_id,
            runner_up=greedy,
        )
        return Reply(
            ids=np.array(found.ids, np.int32),
            logprobs=np.array(found.logprobs, np.float32),
            text=decode_reply(self.tokenizer, found.ids),
            ended=bool(found.ids) and found.ids[-1] == self.tokenizer.eos_token_id,
            near_ties=_near_ties(found),
        )


class VLLMSession:
    """Contexts of one wave. The server keeps nothing of a row but its prefix cache: the whole context is sent."""

    def __init__(self, sampler: VLLMSampler, rows: int) -> None:
        self.sampler = sampler
        self.contexts: dict[int, list[int]] = {row: [] for row in range(rows)}

    def reply(self, requests: Mapping[int, Request]) -> dict[int, Reply]:
        """One reply for each requested row; a row left out is dropped for good (base.Session)."""
        gone = set(requests) - set(self.contexts)
        if gone:
            raise ValueError(f"sampler: row {min(gone)} has left the session, it was not asked for in an earlier turn")
        self.contexts = {row: [] if requests[row].fresh else self.contexts[row] for row in requests}
        for row, request in requests.items():
            self.contexts[row] += list(request.ids)
            if not self.contexts[row]:
                raise ValueError(f"sampler: the request {request.key} has no tokens to continue from")
        keys = [request.key for request in requests.values()]
        replies = self.sampler.replies(keys, [self.contexts[row] for row in requests])
        for row, reply in zip(requests, replies, strict=True):
            self.contexts[row] += reply.ids.tolist()
        return dict(zip(requests, replies, strict=True))


def seed_of(key: Key) -> int:
    """The seed of one reply, a function of its key alone; 63 bits."""
    return int.from_bytes(hashlib.sha256(json.dumps(list(key)).encode()).digest()[:8], "little") >> 1


def check_logprobs(sampler: VLLMSampler, model: Any) -> float:
    """Whether the server says what the model says: log-probs of its own replies, at the sampling temperature.

    Source: ours (cases B22, B05). Args: model, the same weights in transformers.
    Returns: nats, what TOLERANCE bounds. Raises: ValueError in one sentence when it is more.
    """
    prompts = [prompt_ids(sampler.tokenizer, task_messages("look around.", sight, None)) for sight in SIGHTS]
    keys: list[Key] = [("check", number) for number in range(len(prompts))]
    replies = sampler.generate(prompts, keys, max_new_tokens=CHECKED)
    differences = np.concatenate(
        [
            np.abs(reply.logprobs - _read(sampler, model, prompt, reply))
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
    )
    dtype = str(model.dtype).removeprefix("torch.")
    off = float(differences.max() if dtype == "float32" else differences.mean())
    if not off <= TOLERANCE.get(dtype, 0.0):
        raise ValueError(
            f"vLLM's log-probs at temperature {sampler.temperature} are {off:.4f} nats off those of the model "
            f"(tolerance {TOLERANCE.get(dtype, 0.0)} in {dtype}): it reads other weights, another precision or another "
            "temperature, so play with --sampler.engine hf"
        )
    return off


def _read(sampler: VLLMSampler, model: Any, prompt: Sequence[int], reply: Reply) -> np.ndarray:
    ids = torch.tensor([[*prompt, *reply.ids.tolist()]], device=model.device)
    with torch.inference_mode(), evaluating(model):
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (sampler.temperature or 1.0), dim=-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()


def _near_ties(found: Completion) -> int:
    """Greedy choices that round-off could turn; a sampled reply shows none."""
    return sum(
        exp(first) - exp(second) < NEAR_TIE for first, second in zip(found.logprobs, found.runners_up, strict=False)
    )
