"""What an evaluation comes to: success by task type, and with several attempts at a task what counts after each."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.frames import episode_frame
from analysis.tables import success_table
from diagnostics.artifact import Artifact

_COLUMNS = ["type", "success", "low", "high", "n_episodes", "n_tasks", "n_errors", "turns", "interval"]


def evaluation(artifacts: Sequence[Artifact], protocol: str, trials: int = 1) -> tuple[pd.DataFrame, str]:
    """Success by task type of an evaluation's episodes, and a remark for its title.

    Args: protocol, as in training/protocols.py; trials, attempts at a task under reflexion.
    """
    episodes = pd.concat([episode_frame(artifact) for artifact in artifacts])
    if protocol == "reflexion":
        return success_table(by_trial(episodes, trials), ["trials"])[["trials", *_COLUMNS]], ": won so far"
    texts = f" ({episodes['with_skill'].sum()} of {len(episodes)} episodes with a text)"
    return success_table(episodes)[_COLUMNS], "" if protocol in ("vanilla", "expert") else texts


def by_trial(episodes: pd.DataFrame, trials: int) -> pd.DataFrame:
    """For each number of trials 1 .. `trials`, the one episode of every task (and seed) that counts.

    That is its first win among the attempts so far; else the last attempt that ran to its end; else the last one.
    Source: Reflexion, success of any attempt so far. Args: episodes as of frames.episode_frame.
    Returns: rows of `episodes` with a column `trials` in front, ordered by it; a task that was won early and not
    played again keeps its win.
    """
    ended = episodes["error"].isna()
    # 2: won, 1: ran to its end, 0: crashed. Of the best kind the first win, else the last attempt.
    kind = ended.astype(int) + (ended & episodes["success"]).astype(int)
    order = episodes["attempt"].where(kind < 2, -episodes["attempt"])
    ranked = episodes.assign(_kind=kind, _order=order).sort_values(["_kind", "_order"], kind="stable")
    parts = []
    for count in range(1, trials + 1):
        so_far = ranked[ranked["attempt"] < count].drop_duplicates(["task", "seed"], keep="last").sort_index()
        parts.append(so_far.drop(columns=["_kind", "_order"]).assign(trials=count))
    made = pd.concat(parts, ignore_index=True)
    return made[["trials", *episodes.columns]]
