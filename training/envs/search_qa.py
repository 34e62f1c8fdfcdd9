"""Search-QA: a question, a few searches in a store of passages, one answer.

    <think>...</think><search>query</search>   ->   <information>passages</information>
    <think>...</think><answer>answer</answer>  ->   the end; won where the answer is an exact match

Passages reach the policy as an observation in the prompt of its next turn, never as tokens of its own (case B53).
Source: Search-R1 (tags, top 3, exact match), SDAR (four turns). Departures: an action without both tags costs its turn;
F1 is kept beside; passages are numbered, with their titles.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from training.config import EnvConfig
from training.envs.answers import exact_match, f1
from training.envs.base import Env, Step, Task
from training.envs.questions import PASSAGES, read_question
from training.envs.retrievers import PAUSE, TRIES, open_retriever, passage_index
from training.envs.search_folders import search_folder

WIN_REWARD = 10.0
COMMANDS = ("<search><your query></search>", "<answer><your answer></answer>")
NOTHING_YET = "Nothing has been searched for yet."
NOTHING_FOUND = "No passage matches the query."
NO_ANSWER = "no answer was given"
NO_ACTION = "That was neither a search nor an answer."

_ACTION = re.compile(r"<(search|answer)>\s*(\S.*?)\s*</\1>", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<(?=[/|a-z_])", re.IGNORECASE)


class SearchQAEnv:
    """One question at a time. Reward is 10 for an answer that is an exact match, and nothing else; score is its F1.

    Args: retriever, a passage file or the address of a retrieval server; passages, of one search; passage_tokens, after
    which a passage is cut; timeout, seconds of one request to a server; tokenizer, of the policy, in the JSON form of
    the tokenizers package (None: words count as tokens).
    """

    def __init__(
        self,
        retriever: str,
        passages: int = 3,
        passage_tokens: int = 160,
        timeout: float = 8.0,
        max_turns: int = 4,
        tokenizer: str | None = None,
    ) -> None:
        self._retriever = open_retriever(retriever, timeout)
        self._passages, self._passage_tokens, self._tokenizer = passages, passage_tokens, tokenizer
        self.max_turns = max_turns
        self._answers: list[str] | None = None  # None: no running episode
        self._turn = 0

    def reset(self, task: Task) -> Step:
        """The start of a question. Raises ValueError naming the file where it cannot be read."""
        self._answers, self._turn = read_question(task)["answers"], 0
        return Step(NOTHING_YET, COMMANDS, score=0.0)

    def step(self, action: str) -> Step:
        """Search or answer; anything else changes nothing and costs the turn.

        Raises: OutsideError when the retrieval server does not answer: a search that failed is no search without
        results.
        """
        if self._answers is None:
            raise ValueError("no running episode: call reset before step, also after an episode is done")
        self._turn += 1
        found = _ACTION.search(action)
        if found and found[1].lower() == "answer":
            return self._end(found[2], self._answers)
        observation = self._information(found[2]) if found else NO_ACTION
        done = self._turn >= self.max_turns
        if done:
            self._answers = None
        return Step(observation, COMMANDS, done=done, score=0.0, outcome=NO_ANSWER)

    def close(self) -> None:
        """The environment may be reset again; passages are shared by all environments of the process."""
        self._answers = None

    def _end(self, answer: str, right: list[str]) -> Step:
        won, score = exact_match(answer, right), f1(answer, right)
        self._answers = None
        outcome = "exact match" if won else f"the answer is wrong, F1 {score:.2f}"  # what is right was never seen
        return Step("The answer was given.", (), WIN_REWARD if won else 0.0, True, won, score, outcome)

    def _information(self, query: str) -> str:
        lines = [
            f"{number}. {_plain(passage.title)}: {cut(_plain(passage.text), self._passage_tokens, self._tokenizer)}"
            for number, passage in enumerate(self._retriever.search(query, self._passages), start=1)
        ]
        return "\n".join(["<information>", *(lines or [NOTHING_FOUND]), "</information>"])


def cut(text: str, limit: int, tokenizer: str | None = None) -> str:
    """The first `limit` tokens of a text; what is missing is told: "... [... 57 more tokens]", beyond the limit.

    Args: tokenizer, JSON of the tokenizers package; None: words count.
    """
    if tokenizer is None:
        ends = [word.end() for word in re.finditer(r"\S+", text)]
    else:
        ends = [end for _, end in _tokenizer(tokenizer).encode(text, add_special_tokens=False).offsets]
    if len(ends) <= limit:
        return text
    return f"{text[: ends[limit - 1]].rstrip()} [... {len(ends) - limit} more tokens]"


def make_search_qa(env: EnvConfig, tokenizer: Any) -> Callable[[], Env]:
    """A picklable maker of environments. The index of the passages is built here, before any worker needs it.

    Raises: ValueError without passages or a server, and for a server's time limit that the pool would cut short.
    """
    search = env.search
    if search.passages < 1 or search.passage_tokens < 1:
        raise ValueError(
            f"env.search has {search.passages} passages of {search.passage_tokens} tokens, expected 1 or more of each"
        )
    where = search.retriever or str(search_folder(env) / PASSAGES)
    if "://" in where:
        open_retriever(where, search.timeout)
        longest = TRIES * 2 * search.timeout + PAUSE * (2 ** (TRIES - 1) - 1)
        if longest >= env.timeout:
            raise ValueError(
                f"env.timeout is {env.timeout:g} seconds, but {TRIES} requests of env.search.timeout "
                f"{search.timeout:g} (to connect, then to answer) take up to {longest:g}; raise it or lower the latter"
            )
    elif Path(where).is_file() and not where.endswith(".gz"):
        passage_index(Path(where))
    else:
        raise ValueError(
            f"{where}: no passages to search in; name a plain .jsonl file of them or a retrieval server's address with "
            "--env.search.retriever"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return partial(
        SearchQAEnv,
        where,
        search.passages,
        search.passage_tokens,
        search.timeout,
        env.max_turns,
        None if backend is None else backend.to_str(),
    )


def _plain(text: str) -> str:
    """On one line, without anything that reads as a tag or as a special token of a chat template."""
    return _TAG.sub("< ", " ".join(text.split()))


@lru_cache(maxsize=1)
def _tokenizer(text: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text)
