"""Scores beside success: what an environment gives for an answer or a purchase that is right in part.

Search-QA: success is the exact match and score the F1 of words; WebShop: success is a perfect purchase and score its
raw reward. Both in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import stats
from analysis.frames import episode_frame, played
from analysis.tables import groups
from diagnostics.artifact import Artifact

MEAN = "mean"  # of the types, each counting the same: the "Avg." of the papers' tables
_SEED = 0


def score_table(episodes: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Mean success and score by group and task type (the data set of a question), then over "all" episodes and as the
    "mean" of the types.

    Columns: `by`, type, success, success_low, success_high, score, score_low, score_high, n_episodes, n_tasks,
    n_errors. Intervals: of success Wilson where every task was played once, else tasks resampled whole; of "mean"
    normal, from the standard errors of the types, cut to [0, 1], NaN where the tasks of every type came out alike.
    Episodes with an error count nowhere.
    Source: ours; the papers print means alone.
    Raises: ValueError when no episode has a score: its environment tells success alone.
    """
    if not graded(episodes):
        raise ValueError("no episode has a score: their environment tells success alone, see success_table")
    rows = []
    for key, group in groups(episodes, by):
        parts = {str(name): part for name, part in group.groupby("type", sort=True)}
        rows += [{**key, "type": name, **_means(part)} for name, part in {**parts, "all": group}.items()]
        rows.append({**key, "type": MEAN, **_mean_of_types(list(parts.values()))})
    return pd.DataFrame(rows)


def graded(episodes: pd.DataFrame) -> bool:
    """Whether their environment tells a score beside success."""
    return bool(episodes["score"].notna().any())


def graded_table(artifacts: Sequence[Artifact]) -> pd.DataFrame:
    """score_table of an evaluation's trajectories artifacts; empty where their environment tells success alone."""
    episodes = pd.concat([episode_frame(artifact) for artifact in artifacts])
    return score_table(episodes) if graded(episodes) else pd.DataFrame()


def _by_task(episodes: pd.DataFrame, column: str) -> np.ndarray:
    done = played(episodes)
    return done[column].astype(float).groupby(done["task"]).mean().to_numpy()


def _variance_of_mean(values: np.ndarray) -> float:
    return float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else np.nan


def _counts(episodes: pd.DataFrame) -> dict[str, Any]:
    done = played(episodes)
    return {"n_episodes": len(done), "n_tasks": done["task"].nunique(), "n_errors": len(episodes) - len(done)}


def _means(episodes: pd.DataFrame) -> dict[str, Any]:
    row: dict[str, Any] = {}
    done = played(episodes)
    for column in ("success", "score"):
        if column == "success" and done["task"].is_unique:
            interval = stats.wilson(int(done[column].sum()), len(done))
        else:
            interval = stats.bootstrap_mean(_by_task(episodes, column), np.random.default_rng(_SEED))
        middle = done[column].astype(float).mean()
        row |= {column: middle, f"{column}_low": interval.low, f"{column}_high": interval.high}
    return row | _counts(episodes)


def _mean_of_types(types: Sequence[pd.DataFrame]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column in ("success", "score"):
        means = [played(part)[column].astype(float).mean() for part in types]
        spread = [_variance_of_mean(_by_task(part, column)) for part in types]
        middle, half = np.mean(means), 1.96 * np.sqrt(np.sum(spread) or np.nan) / len(types)
        low, high = np.clip([middle - half, middle + half], 0, 1)
        row |= {column: middle, f"{column}_low": low, f"{column}_high": high}
    return row | _counts(pd.concat(types))
