"""What a claim is decided by: one quantity with its interval, read from the tables of a study.

Each function takes the tables by name and a claim's arguments, and returns a Reading for every subject (a model that
read, an arm) that the tables hold; none where the tables, the rows or the arms are missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from analysis.stats import episodes_per_arm

Tables = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Reading:
    """A quantity with its 95 % interval; NaN bounds where there is none."""

    subject: str
    value: float
    low: float
    high: float
    p: float = math.nan  # of a paired test, where there is one
    remark: str = ""


# --- success ---------------------------------------------------------------------------------------------------------


def difference(tables: Tables, base: str, arm: str, named: Sequence[str] = ("differences", "gains")) -> list[Reading]:
    """Success of arm minus base, paired where a table compares the two; else through an arm both are compared with.

    Args: named, the tables to look in: differences (of ablations), gains. Through a third arm the ends of the two
    intervals are taken against each other, which is wider than the interval of the difference.
    """
    subject = f"{arm} – {base}"
    for name in named:
        pairs = _pairs(tables.get(name))
        if (base, arm) in pairs:
            return [_paired(pairs[base, arm], subject)]
        if (arm, base) in pairs:
            found = _paired(pairs[arm, base], subject)
            return [replace(found, value=-found.value, low=-found.high, high=-found.low)]
        for shared in dict.fromkeys(first for first, _ in pairs):
            if (shared, base) in pairs and (shared, arm) in pairs:
                one, other = (_paired(pairs[shared, name], subject) for name in (base, arm))
                return [replace(_apart(other, one, subject), remark=f"both against {shared}: wider than paired")]
    return []


def least_difference(tables: Tables, pairs: Sequence[Sequence[str]]) -> list[Reading]:
    """The smallest of several differences (base, arm); none unless all can be read."""
    found = [reading for base, arm in pairs for reading in difference(tables, base, arm)]
    return [_least(found)] if len(found) == len(pairs) else []


def difference_of_gains(tables: Tables, less: Sequence[str], more: Sequence[str]) -> list[Reading]:
    """Gain (base, arm) of `more` minus that of `less`; ends of the intervals against each other."""
    one, other = (difference(tables, base, arm) for base, arm in (less, more))
    return [_apart(other[0], one[0], f"({other[0].subject}) – ({one[0].subject})")] if one and other else []


def starred_difference(tables: Tables, arm: str) -> list[Reading]:
    """Success with a library's skills in the prompt minus success without, of the same weights. Table: starred."""
    rows = _rows(tables, "starred", arm=arm)
    return [Reading(f"{row.arm} with – without", row.difference, row.low, row.high, row.p) for row in rows.itertuples()]


# --- change rates, probes, CKA, perturbation ------------------------------------------------------------------------


def change_share(tables: Tables, channel: str, token_class: str = "all", context: str = "own_skill") -> list[Reading]:
    """Share of tokens that change, by reader. Table: changes."""
    rows = _rows(tables, "changes", channel=channel, token_class=token_class, context=context)
    return [Reading(row.reader, row.share, row.low, row.high) for row in rows.itertuples()]


def hidden_minus_output(tables: Tables) -> list[Reading]:
    """Share of tokens whose hidden state changes minus share whose probability does; ends against each other."""
    hidden, output = (change_share(tables, channel) for channel in ("hidden_change", "output_change"))
    return _by_subject(hidden, output)


def change_over_control(tables: Tables, channel: str, control: str) -> list[Reading]:
    """Share of tokens that change under the own skill minus under a control; ends against each other."""
    own, other = (change_share(tables, channel, context=context) for context in ("own_skill", control))
    return _by_subject(own, other)


def probe_accuracy(tables: Tables, labels: str, features: str | Sequence[str]) -> list[Reading]:
    """Held-out accuracy by reader: of each output feature, or of the layer where it is lowest. Table: probes.

    `embed` is left out: it has the same features for both answers.
    """
    names = [features] if isinstance(features, str) else features
    rows = _rows(tables, "probes", labels=labels)
    if rows.empty:
        return []
    rows = rows[rows["features"].isin(names) & (rows["layer"] != "embed")].dropna(subset="accuracy")
    return [
        _least([Reading(f"{reader}: {name} {r.layer}".strip(), r.accuracy, r.low, r.high) for r in group.itertuples()])
        for (reader, name), group in rows.groupby(["reader", "features"], sort=False)
    ]


def cka_dissimilarity(tables: Tables) -> list[Reading]:
    """1 - debiased CKA between states with and without the own skill, mean over layers, by reader. Table: cka."""
    rows = _rows(tables, "cka", context="own_skill", coordinates="all", layer="mean")
    return [
        Reading(row.reader, row.dissimilarity, row.low, row.high, remark=str(row.note)) for row in rows.itertuples()
    ]


def cka_contrast(tables: Tables, controls: Sequence[str], from_depth: float | None = None) -> list[Reading]:
    """Dissimilarity under the own skill minus that under controls, by reader: the lowest of them. Table: cka_contrasts.

    Args: from_depth, share of the layers that are passed over, None for the mean over layers.
    Returns: none unless there is every control.
    """
    found = []
    rows = _rows(tables, "cka_contrasts", coordinates="all")
    for reader, group in rows.groupby("reader", sort=False) if len(rows) else ():
        if not set(controls) <= set(group["control"]):
            continue
        chosen = group[group["control"].isin(controls)]
        if from_depth is None:
            chosen = chosen[chosen["layer"] == "mean"]
        else:
            blocks = chosen[chosen["layer"].str.isdigit()]
            depth = blocks["layer"].astype(int)
            chosen = blocks[depth >= from_depth * (depth.max() + 1)]
        chosen = chosen.dropna(subset="difference")
        readings = [
            Reading(f"{reader}: {r.control} {r.layer}", r.difference, r.low, r.high) for r in chosen.itertuples()
        ]
        found += [_least(readings)] if readings else []
    return found


def perturbation(tables: Tables, method: str, context: str) -> list[Reading]:
    """Rank correlation of a method's weight with the teacher's quality when the skill is perturbed.

    Table: perturbation, with columns reader, method, context, spearman, low, high.
    """
    rows = _rows(tables, "perturbation", method=method, context=context)
    return [Reading(row.reader, row.spearman, row.low, row.high) for row in rows.itertuples()]


# --- training --------------------------------------------------------------------------------------------------------


def signal(tables: Tables, arm: str, metric: str, at: float | str) -> list[Reading]:
    """A logged quantity of an arm; bounds are its extremes over training seeds, none for one seed. Table: signals.

    Args: metric, one ending in / stands for the mean of all that begin so; at, the share of the arm's steps that is
    behind (0: the first step, 1: the last), or "mean" over all steps.
    """
    rows = _signal(tables, arm, metric)
    if rows.empty:
        return []
    row = rows.mean() if at == "mean" else rows.iloc[round(float(at) * (len(rows) - 1))]
    return [_seeds(arm, row["value"], row["lowest"], row["highest"], row["n_training_seeds"])]


def signal_change(tables: Tables, arm: str, metric: str) -> list[Reading]:
    """Last fifth of the steps minus the first fifth, means; extremes over training seeds against each other."""
    rows = _signal(tables, arm, metric)
    part = len(rows) // 5 or 1
    return _between(arm, rows.iloc[:part], rows.iloc[-part:]) if len(rows) > 1 else []


def signal_difference(tables: Tables, arm: str, first: str, second: str) -> list[Reading]:
    """Mean over steps of the second metric minus the first; extremes over training seeds against each other."""
    one, other = (_signal(tables, arm, metric) for metric in (first, second))
    return _between(arm, one, other) if len(one) and len(other) else []


READERS: dict[str, Callable[..., list[Reading]]] = {
    function.__name__: function
    for function in (
        difference,
        least_difference,
        difference_of_gains,
        starred_difference,
        change_share,
        hidden_minus_output,
        change_over_control,
        probe_accuracy,
        cka_dissimilarity,
        cka_contrast,
        perturbation,
        signal,
        signal_change,
        signal_difference,
    )
}


# --- shared ----------------------------------------------------------------------------------------------------------


def _rows(tables: Tables, name: str, **where: str) -> pd.DataFrame:
    table = tables.get(name, pd.DataFrame())
    for column, value in where.items():
        if column not in table:
            return pd.DataFrame()
        table = table[table[column] == value]
    return table


def _pairs(table: pd.DataFrame | None) -> dict[tuple[str, str], Any]:
    if table is None or table.empty:
        return {}
    base = "base" if "base" in table else "baseline"
    return {(row[base], row["arm"]): row for row in table.to_dict("records")}


def _paired(row: Mapping[str, Any], subject: str) -> Reading:
    needed = episodes_per_arm(row["a"], row["b"])
    remark = f"{row['n_tasks']} tasks"
    remark += f"; unpaired, this difference needs {math.ceil(needed):,} episodes an arm" if needed < math.inf else ""
    return Reading(subject, row["difference"], row["low"], row["high"], row["p"], remark)


def _least(readings: Sequence[Reading]) -> Reading:
    """The least of several quantities: where its interval is above a bound, so is every one of theirs; where it is
    below, so is at least one (without a correction for their number)."""
    low, high = (
        min(math.inf if x != x else x for x in ends) for ends in zip(*((r.low, r.high) for r in readings), strict=True)
    )
    if any(math.isnan(reading.low) for reading in readings):
        low = math.nan
    return replace(min(readings, key=lambda reading: reading.value), low=low, high=high, p=math.nan)


def _apart(one: Reading, other: Reading, subject: str) -> Reading:
    return Reading(subject, one.value - other.value, one.low - other.high, one.high - other.low)


def _by_subject(ones: Sequence[Reading], others: Sequence[Reading]) -> list[Reading]:
    known = {reading.subject: reading for reading in others}
    return [_apart(one, known[one.subject], one.subject) for one in ones if one.subject in known]


def _signal(tables: Tables, arm: str, metric: str) -> pd.DataFrame:
    """value, lowest, highest and n_training_seeds by step."""
    rows = _rows(tables, "signals", arm=arm)
    if rows.empty:
        return rows
    named = rows["metric"].str.startswith(metric) if metric.endswith("/") else rows["metric"] == metric
    return rows[named].groupby("step")[["value", "lowest", "highest", "n_training_seeds"]].mean().sort_index()


def _between(arm: str, first: pd.DataFrame, second: pd.DataFrame) -> list[Reading]:
    one, other = first.mean(), second.mean()
    ends = other["lowest"] - one["highest"], other["highest"] - one["lowest"]
    return [_seeds(arm, other["value"] - one["value"], *ends, min(one["n_training_seeds"], other["n_training_seeds"]))]


def _seeds(arm: str, value: float, low: float, high: float, seeds: float) -> Reading:
    if seeds < 2:
        return Reading(arm, value, math.nan, math.nan, remark="one training seed: no interval")
    return Reading(arm, value, low, high, remark=f"extremes of {seeds:.0f} training seeds")
