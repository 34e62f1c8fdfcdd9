"""Tables with intervals: the only thing figures and reports read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import stats
from analysis.frames import episode_frame, played
from diagnostics.artifact import Artifact, load_artifact, save_artifact

# (baseline, arm): what the study asks of its arms
GAINS = (
    ("student", "own_skill"),
    ("student", "grpo"),
    ("student", "pr_opd"),
    ("student", "alignment"),
    ("grpo", "pr_opd"),
    ("grpo", "alignment"),
    ("own_skill", "alignment"),
)
_SEED = 0  # of every bootstrap; each row draws from its own generator, so no row depends on its neighbours


def success_table(episodes: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Success by group and task type, with a last row "all" a group.

    Columns: `by`, type, success, low, high, n_episodes, n_tasks, n_seeds, n_errors, invalid_share (of turns), turns
    (mean a episode), interval. Wilson where every task was played once; tasks played with several seeds are resampled
    whole, because their episodes are not independent.
    """
    rows = []
    for key, group in groups(episodes, by):
        parts = [*((str(name), part) for name, part in group.groupby("type", sort=True)), ("all", group)]
        rows += [{**key, "type": name, **_success(part)} for name, part in parts]
    return pd.DataFrame(rows)


def curve_table(episodes: pd.DataFrame) -> pd.DataFrame:
    """Success of each arm at each step on one panel: arm, step and the columns of success_table.

    Raises: ValueError when two points were played on different tasks (errors count as played here).
    """
    panels = episodes.groupby(["arm", "step"])["task"].agg(frozenset)
    if panels.nunique() > 1:
        arm, step = panels.index[[panel != panels.iloc[0] for panel in panels].index(True)]
        raise ValueError(f"arm {arm!r} at step {step} was played on other tasks than the first; use one panel")
    rows = [{**key, **_success(group)} for key, group in groups(episodes, ("arm", "step"))]
    return pd.DataFrame(rows)


def gain_table(episodes: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Paired gain of arm over baseline, both at their last step, on the tasks that both played.

    Args: pairs of (baseline, arm). Columns: baseline, arm, step, the fields of stats.PairedDifference, and
    episodes_per_arm: how many independent episodes an unpaired test would need for 80 % power at these rates.
    """
    last = played(episodes)
    last = last[last["step"] == last.groupby("arm")["step"].transform("max")]
    rows = []
    for baseline, arm in pairs:
        a, b = (last[last["arm"] == name] for name in (baseline, arm))
        for name, part in ((baseline, a), (arm, b)):
            if part.empty:
                raise ValueError(f"no episode of arm {name!r}; arms are {', '.join(sorted(set(last['arm'])))}")
        rows.append({"baseline": baseline, "arm": arm, "step": int(b["step"].iloc[0]), **_paired(a, b)})
    return pd.DataFrame(rows)


def skill_gain_table(without: pd.DataFrame, with_skill: pd.DataFrame, earlier: pd.DataFrame) -> pd.DataFrame:
    """What the own hindsight skill of an earlier attempt brings on the same tasks, also apart by how that one ended.

    Args: episodes without and with the skill, and the earlier episodes the skills were written from. The baseline must
    hold none of the earlier episodes: a task picked because that very episode failed would gain by chance alone.
    Raises: ValueError when it does.
    """
    reused = set(without["trajectory"]) & set(earlier["trajectory"])
    if reused:
        raise ValueError(
            f"episode {sorted(reused)[0]!r} is both baseline and source of a skill; play the baseline anew"
        )
    outcome = played(earlier).groupby("task")["success"].mean()
    rows = []
    for name, tasks in (
        ("all", outcome.index),
        ("failed", outcome.index[outcome == 0]),
        ("succeeded", outcome.index[outcome == 1]),
    ):
        a, b = (played(part)[played(part)["task"].isin(tasks)] for part in (without, with_skill))
        if len(a) and len(b):
            rows.append({"earlier_attempt": name, **_paired(a, b)})
    return pd.DataFrame(rows)


def change_table(measurements: pd.DataFrame) -> pd.DataFrame:
    """Share of tokens that change more than the 99th percentile under an unrelated text, interval by trajectory.

    One row for each (reader, channel, token_class, context); hidden channels averaged over layers.
    Columns: these, threshold, unit, share, low, high, n_tokens, n_trajectories, interval.
    """
    rows = []
    summary = measurements[measurements["layer"].isin(("", "mean"))]
    place = ["reader", "context", "token_class", "trajectory"]
    tokens = summary[summary["metric"] == "tokens"].set_index(place)["value"]
    headline = summary[summary["metric"].str.endswith("/null_threshold")].set_index(["reader", "metric"])
    shares = summary[summary["metric"].str.endswith("/share_above_null")]
    for (reader, metric, token_class, context), group in shares.groupby(
        ["reader", "metric", "token_class", "context"], sort=False
    ):
        total = tokens.loc[pd.MultiIndex.from_frame(group[place])].to_numpy()
        interval = stats.bootstrap_ratio(group["value"].to_numpy() * total, total, _rng())
        channel = metric.removesuffix("/share_above_null")
        threshold = headline.loc[(reader, f"{channel}/null_threshold")]
        rows.append(
            {
                "reader": reader,
                "channel": channel,
                "token_class": token_class,
                "context": context,
                "threshold": threshold["value"],
                "unit": threshold["unit"],
                "share": interval.estimate,
                "low": interval.low,
                "high": interval.high,
                "n_tokens": int(total.sum()),
                "n_trajectories": interval.n,
                "interval": interval.method,
            }
        )
    return pd.DataFrame(rows)


def threshold_table(thresholds: pd.DataFrame, token_classes: Sequence[str] = ("all",)) -> pd.DataFrame:
    """Share of tokens that change more than each threshold, interval by trajectory.

    Columns: reader, channel, token_class, context, threshold, share, low, high, n_tokens, n_trajectories.
    """
    frames = []
    chosen = thresholds[thresholds["token_class"].isin(token_classes)]
    for key, group in groups(chosen, ("reader", "channel", "token_class", "context")):
        counts = group.pivot(index="trajectory", columns="threshold", values="count")
        totals = group.groupby("trajectory")["total"].first().loc[counts.index]
        share, low, high = stats.bootstrap_ratios(counts.to_numpy(), totals.to_numpy(), _rng())
        columns = {"threshold": counts.columns, "share": share, "low": low, "high": high}
        frames.append(pd.DataFrame({**key, **columns, "n_tokens": int(totals.sum()), "n_trajectories": len(totals)}))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def arm_tables(arms: Mapping[str, Sequence[Path]]) -> tuple[dict[str, pd.DataFrame], list[Artifact]]:
    """Tables of what the arms played: success_by_type of their last weights, curves, and gains where GAINS asks.

    Args: arms (name -> trajectories artifacts, one for each step and evaluation seed). An artifact that is not there
    yet is passed over, so that what is ready can be drawn.
    Returns: the tables, none without episodes, and the artifacts they were made from.
    """
    found = [(arm, load_artifact(p, "trajectories")) for arm, paths in arms.items() for p in paths if p.exists()]
    if not found:
        return {}, []
    episodes = pd.concat([episode_frame(artifact, arm=arm) for arm, artifact in found])
    last = episodes[episodes["step"] == episodes.groupby("arm")["step"].transform("max")]
    known = set(episodes["arm"])
    pairs = [(baseline, arm) for baseline, arm in GAINS if {baseline, arm} <= known]
    tables = {"success_by_type": success_table(last, by=("arm", "step")), "curves": curve_table(episodes)}
    if pairs:
        tables["gains"] = gain_table(episodes, pairs)
    return tables, [artifact for _, artifact in found]


def save_tables(path: Path, tables: Mapping[str, pd.DataFrame], inputs: Sequence[Artifact]) -> Artifact:
    """Write tables as one artifact that names the artifacts they were made from."""
    rows = {name: frame.to_dict("records") for name, frame in tables.items()}
    return save_artifact(path, "table", tables=rows, inputs=inputs)


def load_tables(path: Path) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """The tables that save_tables wrote, by name, and the artifacts they were made from: path -> digest."""
    saved = load_artifact(path, "table")
    names = [name.removesuffix(".parquet") for name in saved.names if name.endswith(".parquet")]
    inputs = {str(path / entry["path"]): entry["digest"] for entry in saved.manifest["inputs"]}
    return {name: saved.table(name).to_pandas() for name in names}, inputs


def groups(frame: pd.DataFrame, by: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """(key as a mapping, rows) of each group, in order of first appearance; one group for no key."""
    if not by:
        yield {}, frame
        return
    for values, group in frame.groupby(list(by), sort=False):
        yield dict(zip(by, values, strict=True)), group


def _success(episodes: pd.DataFrame) -> dict[str, float | int | str]:
    done = played(episodes)
    success = done["success"].astype(float)
    if done["task"].is_unique:
        interval = stats.wilson(int(success.sum()), len(done))
    else:
        interval = stats.bootstrap_mean(success.groupby(done["task"]).mean(), _rng())
    return {
        "success": float(success.mean()) if len(done) else np.nan,
        "low": interval.low,
        "high": interval.high,
        "n_episodes": len(done),
        "n_tasks": done["task"].nunique(),
        "n_seeds": episodes["seed"].nunique(),
        "n_errors": len(episodes) - len(done),
        "invalid_share": float(done["n_invalid"].sum() / max(done["n_turns"].sum(), 1)),
        "turns": float(done["n_turns"].mean()) if len(done) else np.nan,
        "interval": interval.method,
    }


def _paired(a: pd.DataFrame, b: pd.DataFrame) -> dict[str, float | int]:
    before, after = (part.set_index("task")["success"] for part in (a, b))
    difference = stats.paired_difference(before, after, _rng())
    return {**difference.__dict__, "episodes_per_arm": stats.episodes_per_arm(difference.a, difference.b)}


def _rng() -> np.random.Generator:
    return np.random.default_rng(_SEED)
