"""What a sampler is, and the random draws that make a reply depend on its key alone. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

Sampled = TypeVar("Sampled", bound=Any)
Key = tuple[int | str, ...]  # (seed, task id, attempt, turn): names one reply and decides its random draws


@dataclass(frozen=True)
class Request:
    """One reply that is asked for: the tokens of the context that the session has not seen yet."""

    key: Key
    ids: Sequence[int]
    fresh: bool = False  # forget what the row has seen, `ids` is the whole context


@dataclass(frozen=True, eq=False)
class Reply:
    """Sampled tokens as they are trained on; end-of-turn included when it was sampled."""

    ids: np.ndarray  # int32 [M]
    logprobs: np.ndarray  # float32 [M]; nats at the sampling temperature (greedy: at temperature 1)
    text: str  # decoded without the end-of-turn token
    ended: bool  # False: cut at max_new_tokens
    near_ties: int  # draws so close to a decision edge that round-off could turn them


@runtime_checkable
class Session(Protocol):
    """Rows that talk side by side; each keeps its context from one reply to the next."""

    def reply(self, requests: Mapping[int, Request]) -> dict[int, Reply]:
        """One reply for each requested row. A row that is left out has finished and cannot come back."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Makes sessions. `protocol` says how the rollout builds contexts: "append" or "windowed"."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def protocol(self) -> str: ...

    @property
    def temperature(self) -> float: ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    def session(self, rows: int) -> Session: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[Key],
        max_new_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[Reply]: ...


def check_end(tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer without end-of-turn token."""
    if tokenizer.eos_token_id is None:
        raise ValueError("sampler: the tokenizer has no eos_token; set it to the token that ends a turn")


def as_asked(sampler: Sampled, max_new_tokens: int | None, temperature: float | None) -> Sampled:
    """A sampler (a frozen dataclass) with another length or temperature of its replies; None: its own."""
    asked = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    return replace(sampler, **{name: value for name, value in asked.items() if value is not None})


def draws(key: Key, count: int) -> np.ndarray:
    """Uniform numbers of one reply, a function of its key alone (Philox keyed by the key's sha256).

    Source: ours.
    Args: key names the reply; count is the number of tokens that may be sampled.
    Returns: float64 [count] in [0, 1).
    """
    digest = hashlib.sha256(json.dumps(list(key)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little"))).random(count)
