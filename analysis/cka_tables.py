"""CKA with intervals: dissimilarity 1 - CKA by layer and context, the own skill against controls, the layer map."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from analysis.stats import LEVEL, Interval

OWN = "own_skill"
OTHER_WEIGHTS = "other_weights"  # in the place of a context: the same tokens read by another model
MEAN = "mean"  # over the layers that are defined
BIASED = "n below d: the plug-in value is biased upward"
_PREFIX = {"all": "cka/", "trimmed": "cka/trimmed/"}
_COLUMNS = {name: name for name in ("debiased", "plug_in", "null_debiased", "null_plug_in")} | {"coordinates": "d"}


def jackknife(estimate: float, left_out: np.ndarray) -> Interval:
    """Interval of an estimate from its values without each of B blocks.

    se^2 = (B - 1) / B sum (v_b - mean v)^2; estimate +- t(B - 1) se.
    Source: Tukey 1958; Efron and Stein 1981. Departures: the blocks hold about, not exactly, equally many rows.
    Args: left_out [B], the values without each block, of any sample with the spread of the estimate's.
    Returns: NaN bounds below two blocks, or where a value without a block is undefined; `n` counts blocks.
    """
    values = np.asarray(left_out, dtype=np.float64)
    count, method = len(values), f"delete-one-block jackknife, t, {len(values)} blocks of tasks"
    if count < 2 or np.isnan(values).any() or np.isnan(estimate):
        return Interval(estimate, np.nan, np.nan, count, method)
    error = np.sqrt((count - 1) / count * np.square(values - values.mean()).sum())
    reach = float(scipy_stats.t.ppf((1 + LEVEL) / 2, count - 1) * error)
    return Interval(estimate, estimate - reach, estimate + reach, count, method)


def cka_table(measurements: pd.DataFrame, blocks: pd.DataFrame) -> pd.DataFrame:
    """Dissimilarity 1 - debiased CKA by layer with its interval, and their mean over layers as a last row.

    Args: rows of the measure `cka` and its table cka_blocks, with a column reader.
    Columns: reader, context, coordinates, layer, dissimilarity, low, high, debiased, plug_in, null_debiased,
    null_plug_in (of shuffled rows: what chance gives), n, n_sampled, d, note (n below d; why a layer is undefined),
    interval.
    """
    rows = []
    for (reader, context, coordinates), (values, left_out) in _readings(measurements, blocks).items():
        place = {"reader": reader, "context": context, "coordinates": coordinates}
        for layer, value in values.iterrows():
            interval = jackknife(value["dissimilarity"], left_out[layer].to_numpy())
            bounds = {"low": interval.low, "high": interval.high, "interval": interval.method}
            rows.append({**place, "layer": layer, **value.to_dict(), **bounds})
    return pd.DataFrame(rows)


def contrast_table(measurements: pd.DataFrame, blocks: pd.DataFrame) -> pd.DataFrame:
    """Dissimilarity under the own skill minus that under each control, by layer, paired by the blocks left out.

    Columns: reader, control, coordinates, layer, difference, low, high, ratio, ratio_low, ratio_high (jackknife of its
    logarithm; NaN where a dissimilarity is not positive), interval. Empty without an own skill.
    """
    rows = []
    readings = _readings(measurements, blocks)
    for (reader, control, coordinates), (values, left_out) in readings.items():
        if control in (OWN, OTHER_WEIGHTS) or (reader, OWN, coordinates) not in readings:
            continue
        own, own_left_out = readings[reader, OWN, coordinates]
        shared = own_left_out.index.intersection(left_out.index)
        for layer in own.index.intersection(values.index, sort=False):
            a, b = own.loc[layer, "dissimilarity"], values.loc[layer, "dissimilarity"]
            a_out, b_out = own_left_out.loc[shared, layer].to_numpy(), left_out.loc[shared, layer].to_numpy()
            difference = jackknife(a - b, a_out - b_out)
            positive = min(a, b, *a_out, *b_out) > 0
            ratio = jackknife(np.log(a / b), np.log(a_out / b_out)) if positive else None
            exponents = (ratio.estimate, ratio.low, ratio.high) if ratio else (np.nan,) * 3
            rows.append(
                {
                    "reader": reader,
                    "control": control,
                    "coordinates": coordinates,
                    "layer": layer,
                    "difference": difference.estimate,
                    "low": difference.low,
                    "high": difference.high,
                    **dict(zip(("ratio", "ratio_low", "ratio_high"), np.exp(exponents), strict=True)),
                    "interval": difference.method,
                }
            )
    return pd.DataFrame(rows)


def _readings(
    measurements: pd.DataFrame, blocks: pd.DataFrame
) -> dict[tuple[str, str, str], tuple[pd.DataFrame, pd.DataFrame]]:
    """(reader, context, coordinates) -> values by layer and their mean; dissimilarity by left-out block and layer."""
    readings = {}
    rows = measurements[measurements["metric"].str.startswith("cka/")]
    for (reader, context), mine in rows.groupby(["reader", "context"], sort=False):
        counts = mine[mine["layer"] == ""].set_index("metric")["value"]
        for coordinates, prefix in _PREFIX.items():
            values = _values(mine, prefix)
            if values.empty:
                continue
            values = values.assign(n=counts["cka/rows"], n_sampled=counts["cka/sampled_rows"])
            biased = values["n"] < values["d"]
            values["note"] = [
                "; ".join(note for note in (reason, BIASED if few else "") if note)
                for reason, few in zip(values["note"], biased, strict=True)
            ]
            defined = values.index[values["dissimilarity"].notna()]
            notes = "; ".join(dict.fromkeys(note for note in values["note"] if note))
            values.loc[MEAN] = {**values.loc[defined].drop(columns="note").mean(), "note": notes}
            place = {"reader": reader, "context": context, "coordinates": coordinates}
            chosen = blocks[(blocks[list(place)] == pd.Series(place)).all(axis=1) & (blocks["block"] >= 0)]
            left_out = 1 - chosen.pivot(index="block", columns="layer", values="debiased").reindex(columns=values.index)
            left_out[MEAN] = left_out[defined].mean(axis=1, skipna=False)
            readings[reader, context, coordinates] = values, left_out
    return readings


def _values(rows: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """What was measured of each layer, in their order; `note` names why a layer is undefined."""
    rows = rows[rows["metric"].str.startswith(prefix) & (rows["layer"] != "")]
    rows = rows.assign(name=rows["metric"].str.removeprefix(prefix))
    wide = rows[rows["name"].isin(_COLUMNS)].pivot(index="layer", columns="name", values="value")
    wide = wide.reindex(rows["layer"].drop_duplicates()).rename(columns=_COLUMNS)
    reasons = rows[rows["name"].str.startswith("undefined/")].set_index("layer")["name"].str.replace("/", ": ")
    return wide.assign(dissimilarity=1 - wide["debiased"], note=reasons.reindex(wide.index).fillna(""))
