"""Sampler over a Hugging Face causal language model: batched, key/value cache kept over turns, live rows only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diagnostics.render import decode_reply
from training.samplers.base import Key, Reply, Request, as_asked, check_end, draws
from training.samplers.cache import RaggedCache, causal_mask

NEAR_TIE = 1e-5  # probability; fp32 round-off of a cumulative sum stays an order of magnitude below


@dataclass(frozen=True, eq=False)
class HFSampler:
    """Samples replies with the model's weights as they are at the moment of the call.

    Source: ours (DESIGN, samplers).
    Args: temperature 0 is greedy; max_new_tokens bounds one reply; batch_size is the number of live rows at once.
    Raises: ValueError for a tokenizer without end-of-turn token, for attention other than full causal attention, and
        for a model that rescales or caps its logits.
    """

    model: Any
    tokenizer: Any
    protocol: str = "windowed"
    temperature: float = 1.0
    max_new_tokens: int = 512
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_end(self.tokenizer)
        kinds = set(getattr(self.model.config, "layer_types", None) or ["full_attention"])
        window = getattr(self.model.config, "sliding_window", None)
        if kinds != {"full_attention"} or (window and not hasattr(self.model.config, "layer_types")):
            raise ValueError(f"sampler: needs full attention in every layer, {self.model.config.model_type} has others")

        token = torch.tensor([[self.tokenizer.eos_token_id]], device=self.model.device)
        with torch.inference_mode(), evaluating(self.model):
            logits = self.model(token).logits
            if not torch.allclose(logits, _head(self.model, self.model.base_model(token).last_hidden_state)):
                raise ValueError(
                    f"sampler: {self.model.config.model_type} changes its logits after the output embedding"
                )

    def session(self, rows: int) -> HFSession:
        """A session of `rows` rows with an empty context each."""
        return HFSession(self, rows)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Key],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Reply]:
        """One reply a prompt, in the order of the prompts; prompts of like length share a batch."""
        sampler = as_asked(self, max_new_tokens, temperature)
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        replies: dict[int, Reply] = {}
        for start in range(0, len(order), self.batch_size):
            rows = order[start : start + self.batch_size]
            requests = {i: Request(keys[row], prompts[row]) for i, row in enumerate(rows)}
            answers = sampler.session(len(rows)).reply(requests)
            replies.update({row: answers[i] for i, row in enumerate(rows)})
        return [replies[index] for index in range(len(prompts))]


class HFSession:
    """Contexts of one wave. Slot s of the cache belongs to row `rows[s]`; live rows fill the first slots."""

    def __init__(self, sampler: HFSampler, rows: int) -> None:
        self.sampler = sampler
        self.cache = RaggedCache(sampler.model.config.num_hidden_layers, rows)
        self.rows = list(range(rows))
        self.length = dict.fromkeys(self.rows, 0)  # tokens of the row in the cache
        self.pending: dict[int, list[int]] = {row: [] for row in self.rows}  # sampled, not yet in the cache

    @torch.inference_mode()
    def reply(self, requests: Mapping[int, Request]) -> dict[int, Reply]:
        """One reply for each requested row; a row left out is dropped for good (base.Session)."""
        gone = set(requests) - set(self.rows)
        if gone:
            raise ValueError(f"sampler: row {min(gone)} has left the session, it was not asked for in an earlier turn")
        self._to_front(len(self.rows), set(requests))
        del self.rows[len(requests) :]
        if not requests:
            return {}
        chunks = {}
        for row, request in requests.items():
            if request.fresh:
                self.length[row], self.pending[row] = 0, []
            chunks[row] = self.pending[row] + list(request.ids)
            if not chunks[row]:
                raise ValueError(f"sampler: the request {request.key} has no tokens to continue from")
        with evaluating(self.sampler.model):
            return self._decode(requests, chunks)

    def _decode(self, requests: Mapping[int, Request], chunks: dict[int, list[int]]) -> dict[int, Reply]:
        sampler, limit = self.sampler, self.sampler.max_new_tokens
        stop = sampler.tokenizer.eos_token_id
        uniforms = {row: draws(request.key, limit) for row, request in requests.items()}
        ids: dict[int, list[int]] = {row: [] for row in requests}
        logprobs: dict[int, list[float]] = {row: [] for row in requests}
        ties = dict.fromkeys(requests, 0)
        count = len(requests)
        for step in range(limit):
            batch = self.rows[:count]
            logits = self._forward([chunks[row] for row in batch])
            uniform = torch.tensor([uniforms[row][step] for row in batch], dtype=torch.float64, device=logits.device)
            tokens, scores, near = (x.tolist() for x in sample(logits, uniform, sampler.temperature))
            ended = set()
            for row, token, score, tie in zip(batch, tokens, scores, near, strict=True):
                ids[row].append(token)
                logprobs[row].append(score)
                ties[row] += tie
                chunks[row] = self.pending[row] = [token]
                if token == stop:
                    ended.add(row)
            self._to_front(count, set(batch) - ended)
            count -= len(ended)
            if not count:
                break
        return {row: self._finish(ids[row], logprobs[row], ties[row]) for row in requests}

    def _forward(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Feed a ragged chunk to the first rows; logits [rows, V] after the last token of each."""
        model = self.sampler.model
        lengths = torch.tensor([self.length[row] for row in self.rows[: len(chunks)]])
        sizes = torch.tensor([len(chunk) for chunk in chunks])
        columns = int(sizes.max())
        # Padding goes behind a row's tokens: no query sees it, and the next chunk overwrites it.
        ids = torch.tensor([[*chunk, *[0] * (columns - len(chunk))] for chunk in chunks], device=model.device)
        positions = (lengths[:, None] + torch.arange(columns)).to(model.device)
        width = int(lengths.max()) + columns
        for row, chunk in zip(self.rows, chunks, strict=False):  # the chunks of the first rows
            self.length[row] += len(chunk)
        self.cache.place(positions, width)
        hidden = model.base_model(
            input_ids=ids,
            attention_mask=causal_mask(positions, width, model.dtype),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        rows = torch.arange(len(chunks), device=model.device)
        return _head(model, hidden[rows, (sizes - 1).to(model.device)])

    def _to_front(self, count: int, keep: set[int]) -> None:
        """Swap rows so that the rows in `keep` fill the first slots; looks at the first `count` slots only."""
        kept = sum(row in keep for row in self.rows[:count])
        out = [slot for slot in range(kept) if self.rows[slot] not in keep]
        back = [slot for slot in range(kept, count) if self.rows[slot] in keep]
        if not out:
            return
        device = self.sampler.model.device
        width = max(self.length[self.rows[slot]] for slot in out + back)
        self.cache.swap(torch.tensor(out, device=device), torch.tensor(back, device=device), width)
        for a, b in zip(out, back, strict=True):
            self.rows[a], self.rows[b] = self.rows[b], self.rows[a]

    def _finish(self, ids: list[int], logprobs: list[float], ties: int) -> Reply:
        tokenizer = self.sampler.tokenizer
        ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
        text = decode_reply(tokenizer, ids)
        return Reply(np.array(ids, np.int32), np.array(logprobs, np.float32), text, ended, ties)


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution softmax(logits / temperature).

    token = first i with sum_{j <= i} p_j > u; log-prob = log_softmax(logits / temperature)[token] (case B22).
    Source: ours.
    Args: logits [B, V]; uniform float64 [B] in [0, 1); temperature, 0 takes the largest logit.
    Returns: tokens int64 [B]; log-probs float32 [B] in nats (greedy: at temperature 1); near ties bool [B]: u lies
        within 1e-5 of an edge of the token's interval (greedy: the two largest probabilities are that close).
    """
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = logits.argmax(dim=-1)
        first, second = logprobs.topk(2, dim=-1).values.exp().unbind(-1)
        near = first - second < NEAR_TIE
    else:
        edges = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        target = (uniform * edges[:, -1])[:, None]
        index = torch.searchsorted(edges, target, right=True).clamp_(max=logits.shape[-1] - 1)
        below = torch.where(index > 0, edges.gather(1, (index - 1).clamp(min=0)), -1.0)
        above = torch.where(index < logits.shape[-1] - 1, edges.gather(1, index), 2.0)
        near = (torch.minimum(target - below, above - target) < NEAR_TIE)[:, 0]
        tokens = index[:, 0]
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], near


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode (no dropout) for a while; its mode is put back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _head(model: Any, hidden: Tensor) -> Tensor:
    """Logits of chosen states only: a whole chunk's logits would cost more than the chunk."""
    return model.get_output_embeddings()(hidden)
