"""What training cost: tokens, floating-point operations and seconds, from a run's own log.

Counted are response tokens: 2 FLOPs a parameter for a token that is generated or read forward, 6 for a token that is
trained on. Prompts and observations, the KL reference and evaluations are not in it; seconds have all but evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors import safe_open

BUDGETS = ("step", "flops", "seconds")
FORWARD, TRAINED = 2, 6  # FLOPs a parameter and token
COUNTED = (
    "FLOPs count response tokens: 2 a parameter for each token generated or read by a teacher, 6 for each token "
    "trained on; prompts, the KL reference and evaluations are not in them. Seconds hold all of training but "
    "evaluations."
)


def parameters(checkpoint: Path) -> int:
    """Numbers in the weights of a checkpoint, embeddings included, from the heads of its files.

    Raises: ValueError when there are no weights.
    """
    files = sorted(checkpoint.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"there are no weights in {checkpoint}; give the folder of a checkpoint")
    total = 0
    for file in files:
        with safe_open(file, framework="np") as weights:
            for name in weights.keys():  # noqa: SIM118 (no mapping)
                size = 1
                for length in weights.get_slice(name).get_shape():
                    size *= length
                total += size
    return total


def cost_frame(metrics: pd.DataFrame, parameters: float) -> pd.DataFrame:
    """What the steps up to each one have cost together, indexed by step, 0 first.

    Args: metrics, of frames.metrics_frame. Columns: tokens_rollout; tokens_read, by a teacher, and every other
    `tokens/*` (skills that the policy wrote); tokens_trained; flops; seconds (of training); eval_seconds.
    """
    wide = metrics.pivot(index="step", columns="metric", values="value").fillna(0.0).sort_index()
    wide = wide.reindex(sorted({0, *wide.index}), fill_value=0.0)
    tokens = wide.filter(regex="^tokens/|^distill/tokens$")
    frame = pd.DataFrame(index=wide.index)
    frame["tokens_rollout"] = tokens.get("tokens/rollout", 0.0)
    frame["tokens_read"] = tokens.drop(columns=["tokens/rollout", "tokens/train"], errors="ignore").sum(axis=1)
    frame["tokens_trained"] = tokens.get("tokens/train", 0.0)
    forward = frame["tokens_rollout"] + frame["tokens_read"]
    frame["flops"] = parameters * (FORWARD * forward + TRAINED * frame["tokens_trained"])
    times = wide.filter(regex="^time/")
    frame["seconds"] = times.drop(columns="time/eval", errors="ignore").sum(axis=1)
    frame["eval_seconds"] = times.get("time/eval", 0.0)
    return frame.cumsum()


def curve_frame(logs: Mapping[tuple[str, int], pd.DataFrame], sizes: Mapping[tuple[str, int], float]) -> pd.DataFrame:
    """Success and cost so far at every evaluation and at the end: arm, training_seed, step (of the arm), success (NaN
    where there was no evaluation), and the columns of cost_frame."""
    frames = []
    for (arm, seed), log in logs.items():
        cost = cost_frame(log, sizes[arm, seed])
        success = log[log["metric"] == "eval/success"].set_index("step")["value"]
        cost.insert(0, "success", success.reindex(cost.index))
        kept = cost[cost["success"].notna() | (cost.index == cost.index.max())]
        frames.append(kept.reset_index(names="step").assign(arm=arm, training_seed=seed))
    table = pd.concat(frames, ignore_index=True)
    return table[["arm", "training_seed", *(name for name in table if name not in ("arm", "training_seed"))]]


def cost_table(curves: pd.DataFrame, arms: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """What an arm's own training cost, mean over training seeds, and how many times its base's."""
    ends = curves.sort_values("step").groupby(["arm", "training_seed"]).tail(1)
    names = ["step", "tokens_rollout", "tokens_read", "tokens_trained", "flops", "seconds", "eval_seconds"]
    means = ends.groupby("arm")[names].mean()
    rows = []
    for arm in arms:
        row, base = means.loc[arm["arm"]], means.reindex([arm["base"]]).iloc[0]
        ratios = {f"{name}_over_base": row[name] / base[name] for name in ("flops", "seconds")}
        rows.append({"arm": arm["arm"], **row, **ratios})
    return pd.DataFrame(rows)


def equal_table(curves: pd.DataFrame, arms: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Arms that start at the same step, read at equal steps, FLOPs and seconds: what the cheapest of them spent.

    Each run counts with its last evaluation within the budget. Columns: start, arm, budget (step, flops, seconds),
    limit, spent, step, success (means over training seeds).
    """
    rows = []
    starts = {arm["arm"]: arm["start"] for arm in arms}
    for start, group in curves.groupby(curves["arm"].map(starts)):
        for budget in BUDGETS:
            limit = group.groupby(["arm", "training_seed"])[budget].max().min()
            within = group[(group[budget] <= limit) & group["success"].notna()].sort_values("step")
            last = within.groupby(["arm", "training_seed"]).tail(1)
            for arm, runs in last.groupby("arm"):
                means = runs[list({"step", budget, "success"})].mean()
                row = {"start": int(start), "arm": arm, "budget": budget, "limit": limit, "spent": means[budget]}
                rows.append({**row, "step": means["step"], "success": means["success"]})
    return pd.DataFrame(rows)
