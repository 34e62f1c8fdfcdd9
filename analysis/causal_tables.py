"""Patching, logit lens and gradient audit with intervals by trajectory. A value that has no meaning says why in `note`.

All three tables are long: one row a quantity, with value, low, high, n_segments (those it is made of), n_undefined
(those left out, with the reason in `note`) and n_trajectories (the units that are resampled).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from analysis import stats
from analysis.tables import groups

MIN_GAP = 0.1  # nats of the whole action; below it there is nothing to recover
SMALL_GAP = f"gap between teacher and student below {MIN_GAP} nats"
NO_TOKENS = "no such token"
NO_EXPECTATION = "expected gradient is zero"  # as the measure says it
OTHER_SPACE = "its per-token gradient is on the states, not on the logits"
CLASSES = ("think", "action", "format")
_TURN = ["trajectory", "segment"]
_SEED = 0  # every group of rows draws from its own generator, so no row depends on its neighbours


def patching_table(patching: pd.DataFrame) -> pd.DataFrame:
    """What a patch does to the action, by block.

    Quantities: logprob_change (nats of the whole action, a turn); recovered, the share of the gap between the branches
    that the patch closes, sum sign(gap) change / sum |gap| over the turns with |gap| >= MIN_GAP (1: the teacher's
    log-prob; negative: away from it); turned, the share of the action tokens with another greedy token than the
    teacher's that take the teacher's; lost, the share of the others that give it up; same_action, the share of turns
    all of whose greedy action tokens are the teacher's (source `student`: without a patch). Random draws are averaged.
    Args: the measure's table, with a column reader.
    Columns: reader, context, positions, scope, source, layer, quantity, and those of the module.
    """
    rows: list[dict[str, Any]] = []
    same = (patching["turned"] == patching["differ"]) & (patching["lost"] == 0)
    patching = patching.assign(
        logprob_change=patching["patched_logprob"] - patching["student_logprob"], same_action=same.astype(float)
    )
    for place, group in groups(patching, ["reader", "context", "positions", "scope", "source"]):
        turns = group.groupby(_TURN, sort=False).first()
        wide = {
            name: group.pivot_table(name, _TURN, "layer", sort=False).loc[turns.index, group["layer"].unique()]
            for name in ("logprob_change", "turned", "lost", "same_action")
        }
        gap = turns["teacher_logprob"] - turns["student_logprob"]
        towards = wide["logprob_change"].mul(np.sign(gap), axis=0)
        each = pd.Series(1.0, index=turns.index)
        for quantity, counts, totals, reason in (
            ("logprob_change", wide["logprob_change"], each, ""),
            ("recovered", towards, gap.abs().where(gap.abs() >= MIN_GAP, 0.0), SMALL_GAP),
            ("turned", wide["turned"], turns["differ"], NO_TOKENS),
            ("lost", wide["lost"], turns["tokens"] - turns["differ"], NO_TOKENS),
            ("same_action", wide["same_action"], each, ""),
        ):
            ratios = _ratios(counts, totals, reason)
            rows += [{**place, "layer": layer, "quantity": quantity, **ratio} for layer, ratio in ratios]
    for place, group in groups(patching, ["reader", "context"]):
        turns = group.groupby(_TURN, sort=False).first()
        alone = {"positions": "", "scope": "", "source": "student", "layer": "", "quantity": "same_action"}
        counts = (turns["differ"] == 0).astype(float).to_frame()
        rows += [{**place, **alone, **ratio} for _, ratio in _ratios(counts, pd.Series(1.0, index=turns.index), "")]
    return pd.DataFrame(rows)


def lens_table(lens: pd.DataFrame) -> pd.DataFrame:
    """Where the teacher's greedy action tokens appear, by branch and block, for the first token and for all of them.

    Quantities: logprob (nats, mean over tokens), rank (geometric mean; 1: the most probable), top1 (share of rank 1).
    Args: the measure's table, with a column reader.
    Columns: reader, context, branch, tokens ("first", "all"), layer, quantity, and those of the module.
    """
    rows: list[dict[str, Any]] = []
    lens = lens.assign(rank=np.log(lens["rank"]), top1=(lens["rank"] == 1).astype(float))
    for place, group in groups(lens, ["reader", "context", "branch"]):
        for tokens, part in (("first", group[group["token"] == 0]), ("all", group)):
            for quantity in ("logprob", "rank", "top1"):
                cells = part.pivot_table(quantity, _TURN, "layer", aggfunc=["sum", "count"], sort=False)
                totals = cells["count"].iloc[:, 0]  # a token is read behind every block
                for layer, ratio in _ratios(cells["sum"][part["layer"].unique()], totals, ""):
                    if quantity == "rank":
                        ratio |= {bound: np.exp(ratio[bound]) for bound in ("value", "low", "high")}
                    rows.append({**place, "tokens": tokens, "layer": layer, "quantity": quantity, **ratio})
    return pd.DataFrame(rows)


def audit_table(audit: pd.DataFrame) -> pd.DataFrame:
    """Which way each channel pushes, how noisily, and on which tokens.

    Quantities: cosine_logits and cosine_parameters, of the expected gradient with that of the full reverse KL (mean
    over turns); noise, the variance of a single sample over the square of what it expects (sums over tokens);
    norm_share and expected_share, a class's share of the per-token gradient norms (root mean square over samples; of
    the expected gradient); effective_tokens, (sum n)^2 / (tokens * sum n^2) of the per-token norms n, 1: all alike.
    Args: the measure's table, with a column reader.
    Columns: reader, context, channel, space, token_class, quantity, and those of the module.
    """
    rows: list[dict[str, Any]] = []
    for place, group in groups(audit, ["reader", "context", "channel", "space"]):
        whole = group[group["token_class"] == "all"].set_index(_TURN)
        defined = (whole["undefined"] == "").astype(float)
        reason = "; ".join(sorted(set(whole["undefined"]) - {""}))
        moved = whole["expected_sq"].where(whole["undefined"] != NO_EXPECTATION, 0.0)
        effective = whole["norm"] ** 2 / (whole["tokens"] * whole["norm_sq"]).where(whole["norm_sq"] > 0)
        logits = defined * (place["space"] == "logits")
        cosine = whole["dot"].astype(float) / np.sqrt(whole["expected_sq"] * whole["reference_sq"]).where(logits > 0)
        quantities = [
            ("cosine_logits", "all", cosine, logits, reason if place["space"] == "logits" else OTHER_SPACE),
            ("cosine_parameters", "all", whole["parameter_cosine"].astype(float), defined, reason),
            ("noise", "all", whole["norm_sq"] - whole["expected_sq"], moved, reason),
            ("effective_tokens", "all", effective, (whole["norm_sq"] > 0).astype(float), reason),
        ]
        for token_class in CLASSES:
            part = group[group["token_class"] == token_class].set_index(_TURN).reindex(whole.index)
            for name, column in (("norm_share", "norm"), ("expected_share", "expected_norm")):
                total = whole[column] if name == "norm_share" else whole[column].where(moved > 0, 0.0)
                quantities.append((name, token_class, part[column].fillna(0.0), total, reason))
        for quantity, token_class, counts, totals, why in quantities:
            cell = {"token_class": token_class, "quantity": quantity}
            rows += [{**place, **cell, **ratio} for _, ratio in _ratios(counts.to_frame(), totals, why)]
    return pd.DataFrame(rows)


def _ratios(counts: pd.DataFrame, totals: pd.Series, reason: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """sum(counts) / sum(totals) of every column, interval by trajectory; turns with total 0 are left out and counted.

    Args: counts [turns, K], totals [turns], both by trajectory and segment. Yields (column, fields of a row).
    """
    kept = totals.to_numpy(dtype=np.float64) > 0
    undefined = {"n_undefined": int((~kept).sum()), "note": "" if kept.all() else reason}
    if not kept.any():
        for column in counts:
            yield (
                column,
                {"value": np.nan, "low": np.nan, "high": np.nan, "n_segments": 0, "n_trajectories": 0} | undefined,
            )
        return
    trajectory = counts.index.get_level_values("trajectory")[kept]
    count = counts[kept].astype(float).groupby(trajectory, sort=False).sum()
    total = totals[kept].astype(float).groupby(trajectory, sort=False).sum()
    value, low, high = stats.bootstrap_ratios(count.to_numpy(), total.to_numpy(), np.random.default_rng(_SEED))
    size = {"n_segments": int(kept.sum()), "n_trajectories": len(total)}
    for place, column in enumerate(counts):
        yield column, {"value": value[place], "low": low[place], "high": high[place]} | size | undefined
