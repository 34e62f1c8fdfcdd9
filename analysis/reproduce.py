"""The studies that are reproduced by name: the invisible advantage, and the training figures of the papers."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path

from analysis import invisible_advantage, reproduction, table1

STUDIES = (invisible_advantage.NAME, *reproduction.PAPERS, table1.NAME)
ALL = "all"


def chosen_studies(target: str, recipe: str, seeds: Sequence[int] | None) -> tuple[str, ...]:
    """The studies that a word means. Raises ValueError in one sentence for what cannot be run, before any work."""
    if target not in (*STUDIES, ALL):
        raise ValueError(f"there is no study {target!r}; {_nearest(target, (*STUDIES, ALL))}")
    names = STUDIES if target == ALL else (target,)
    recipes = set.intersection(*(set(_presets(name)) for name in names))
    if recipe not in recipes:
        raise ValueError(f"there is no recipe {recipe!r} of {target}; {_nearest(recipe, recipes)}")
    if invisible_advantage.NAME in names and len(seeds or ()) > 1:
        raise ValueError(
            f"{invisible_advantage.NAME} trains one seed a folder; give --seed one number, and each seed its own --out"
        )
    return names


def reproduce_study(name: str, folder: Path, recipe: str, seeds: Sequence[int] | None, jobs: int) -> int:
    """Run a study and return run_study's exit code.

    Args: seeds, of training (None: the recipe's); jobs, stages at once, of the papers' ablations.
    """
    if name == invisible_advantage.NAME:
        return invisible_advantage.reproduce_study(folder, invisible_advantage.PRESETS[recipe], (seeds or (0,))[0])
    if name == table1.NAME:
        return table1.reproduce_table1(folder, table1.PRESETS[recipe], seeds, jobs)
    return reproduction.reproduce_paper(folder, name, reproduction.PAPERS[name].recipes[recipe], seeds, jobs)


def _presets(name: str) -> Collection[str]:
    whole = {module.NAME: module.PRESETS for module in (invisible_advantage, table1)}
    return whole[name] if name in whole else reproduction.PAPERS[name].recipes


def _nearest(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
