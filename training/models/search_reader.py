"""A reader of any question: it searches until a passage holds a right answer, and answers with that.

Real questions cannot be read by pattern, and nothing here understands them. The reader is told the right answers, as
distant supervision is, and uses them for one thing: to see that a passage in front of it holds one. What no passage on
the page holds is never answered, so that "yes" and "no" are not, nor what the search does not find.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from diagnostics.records import Turn
from training.envs.answers import normalise
from training.models.search_expert import LINE, Move

_NAME = re.compile(r"\b[A-Z][\w'’-]*(?: (?:(?:of|the|and|in|de|von) )?[A-Z\d][\w'’-]*)*")
_UNREADABLE = frozenset(("yes", "no"))


@dataclass
class Reader:
    """One question's player. Args: answers, the right ones."""

    question: str
    answers: Sequence[str]
    searched: list[str] = field(default_factory=list)

    def act(self, observations: Sequence[str]) -> Move:
        """The next turn. Args: observations, the answers to the turns so far, oldest first."""
        if found := held(observations, self.answers):
            title, answer = found
            return Move(f"{title} tells it: {answer}.", f"<answer>{answer}</answer>")
        query = next((lead for lead in self._leads(observations) if lead not in self.searched), self.question)
        self.searched.append(query)
        return Move(f"I do not know it yet. I look for {query}", f"<search>{query}</search>")

    def _leads(self, observations: Sequence[str]) -> Iterator[str]:
        """What may be searched for: the question, the names in it, the longest first, and titles that were found."""
        yield self.question
        opening = self.question.split(" ")[0]  # "Which", a name only where more of it follows
        yield from sorted((name for name in _NAME.findall(self.question) if name != opening), key=len, reverse=True)
        yield from (title for seen in observations for title, _ in LINE.findall(seen))


def held(observations: Sequence[str], answers: Sequence[str]) -> tuple[str, str] | None:
    """(title of the first passage that holds one of the answers, that answer); None without one."""
    wanted = {answer: f" {normalise(answer)} " for answer in answers if normalise(answer) not in _UNREADABLE}
    for title, text in (line for seen in observations for line in LINE.findall(seen)):
        said = f" {normalise(title)} {normalise(text)} "
        for answer, words in wanted.items():
            if words in said:
                return title, answer
    return None


def skill_text(turns: Sequence[Turn], success: bool) -> str:
    """What an attempt teaches about its question: the passage that tells the answer, or what was searched in vain."""
    searches = [
        (_query(turn), after.observation)
        for turn, after in zip(turns, [*turns[1:], turns[-1]], strict=True)
        if turn.action.startswith("<search>")
    ]
    answer = turns[-1].action.removeprefix("<answer>").removesuffix("</answer>")
    if success:
        for query, observation in searches:
            if found := held([observation], [answer]):
                return f'Search "{query}": {found[0]} tells that the answer is {answer}.'
    tried = "; ".join(dict.fromkeys(query for query, _ in searches))
    return f"Nothing is found with: {tried or 'no search'}. Search in other words."


def _query(turn: Turn) -> str:
    return turn.action.removeprefix("<search>").removesuffix("</search>")
