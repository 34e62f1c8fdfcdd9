"""What the teacher's context holds in each diagnostic condition: the own skill, its controls, nothing. No torch."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diagnostics.derangement import other_sources
from diagnostics.records import Trajectory

CONTEXTS = ("own_skill", "other_skill", "unrelated", "shuffled", "none", "floor")
WITHOUT_SKILL = ("none", "floor")  # the empty text; floor is the same context read again at another batch shape

# Plain sentences that say nothing about any task; length-matched pieces of them are the `unrelated` control. Their
# words are those of the games, so that a policy with a small vocabulary reads text, not bytes it has never seen.
UNRELATED = (
    "You look around the middle of the room and see nothing special.",
    "There is nothing to take, and there is nothing to put back.",
    "Some of the places are open and some of them are closed.",
    "You turn around quickly and look up, and nothing happens.",
    "This room is not hot, and the other room is not cold.",
    "You go back to the first of the two and examine it.",
    "It is normal, and you find nothing in it and nothing under it.",
    "You use nothing, you move nothing and you close nothing.",
    "At the other places there is nothing about.",
    "You are not in the middle of it, and it is not in the middle of you.",
    "Look at the room from there, and look at it from the other place.",
    "You pick nothing up and you put nothing in.",
    "No other room was seen, and no other room is there to find.",
    "The first look is quickly over, and there you are.",
    "With nothing to heat and nothing to clean, you turn to the middle of the room.",
    "You say nothing about it.",
)


def contexts_for(
    tokenizer: Any, trajectories: Sequence[Trajectory], skills: Mapping[str, str], names: Sequence[str], seed: int
) -> dict[str, dict[str, str]]:
    """The text placed in front of each trajectory in each named context; a trajectory without one is left out.

    own_skill: its skill. other_skill: the skill of a trajectory of another task (of another trajectory, where one task
    holds more than half of them), each used once, see derangement.other_sources. unrelated: prose cut to as many
    tokens as the own skill. shuffled: the own skill's words in random order. none, floor: the empty text.
    Source: PR-OPD Fig. 4 (length-matched text, "all controls"); their exact form ours.
    Args: skills, text by trajectory id; names, of CONTEXTS; seed, of the shuffles and draws, which do not depend on
    the order of the trajectories or on which contexts are asked for.
    Returns: context -> trajectory id -> text, in the order of `names`.
    Raises: ValueError on an unknown context, or when a context that is made from skills would stay empty.
    """
    written = {t.id: skills[t.id] for t in trajectories if skills.get(t.id, "").strip()}
    result: dict[str, dict[str, str]] = {}
    for name in names:
        if name not in CONTEXTS:
            near = difflib.get_close_matches(name, CONTEXTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"contexts are {', '.join(CONTEXTS)}"
            raise ValueError(f"unknown context {name!r}; {hint}")
        if name in WITHOUT_SKILL:
            result[name] = {t.id: "" for t in trajectories}
        elif name == "own_skill":
            result[name] = dict(written)
        elif name == "other_skill":
            result[name] = {id: written[source] for id, source in other_sources(trajectories, written, seed).items()}
        elif name == "unrelated":
            result[name] = {id: unrelated_text(tokenizer, text, _generator(seed, id)) for id, text in written.items()}
        else:
            result[name] = {id: shuffled_words(text, _generator(seed, id)) for id, text in written.items()}
        if not result[name] and name not in WITHOUT_SKILL:
            raise ValueError(
                f"context {name!r} is made from skills, and {len(written)} of {len(trajectories)} trajectories have "
                "one; pass the skills that were written from these trajectories"
            )
    return result


def shuffled_words(text: str, generator: np.random.Generator) -> str:
    """The words of a text in random order, joined by single spaces."""
    return " ".join(generator.permutation(np.array(text.split(), dtype=object)))


def unrelated_text(tokenizer: Any, text: str, generator: np.random.Generator) -> str:
    """Unrelated prose with as many tokens as `text`, starting at a random sentence.

    The shortest such prose whose own encoding reaches that count; it passes it only where one more character splits
    into several tokens.
    """
    count = _n_tokens(tokenizer, text)
    start = int(generator.integers(len(UNRELATED)))
    prose = " ".join([*UNRELATED[start:], *UNRELATED[:start]])
    while _n_tokens(tokenizer, prose) < count:
        prose += " " + prose
    low, high = 0, len(prose)  # the prefix of length `high` always has enough tokens
    while high - low > 1:
        middle = (low + high) // 2
        if _n_tokens(tokenizer, prose[:middle].rstrip()) < count:
            low = middle
        else:
            high = middle
    return prose[:high].rstrip()


def _n_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _generator(seed: int, trajectory_id: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(trajectory_id.encode())])
