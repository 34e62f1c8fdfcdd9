"""How much every layer changes under each context, against its change under an unrelated text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from analysis import stats

CHANNELS = ("hidden_change", "hidden_change_centred", "hidden_norm_change")
UNRELATED = "unrelated"
MEAN = "mean"  # over layers
INTERVAL = f"percentile bootstrap over trajectories, {stats.RESAMPLES} resamples"
_SEED = 0  # every group of rows draws from its own generator, so no row depends on its neighbours


def layer_change_table(measurements: pd.DataFrame) -> pd.DataFrame:
    """Change of the hidden state of all response tokens by layer and context, and the mean over layers as a last row.

    mean = sum over tokens of the change / number of tokens; ratio_to_unrelated = mean / mean under `unrelated`, of the
    trajectories that were read in both contexts, resampled together.
    Source: PR-OPD Fig. 4, which states a ratio alone.
    Args: rows of the measure `change`, with a column reader.
    Returns: reader, context, channel, layer, mean, low, high, share_above_null, share_low, share_high (NaN where no
    share was counted: without `unrelated`, and under it layer by layer), ratio_to_unrelated, ratio_low, ratio_high
    (NaN without `unrelated`, or where nothing changes under it), n_tokens, n_trajectories, interval. Bounds are NaN
    below two trajectories.
    """
    rows: list[pd.DataFrame] = []
    chosen = measurements[measurements["token_class"] == "all"]
    for reader, mine in chosen.groupby("reader", sort=False):
        tokens = mine[mine["metric"] == "tokens"].pivot(index="trajectory", columns="context", values="value").fillna(0)
        for channel in CHANNELS:
            means, shares = (
                _wide(mine[mine["metric"] == f"{channel}/{name}"]) for name in ("mean", "share_above_null")
            )
            for context in dict.fromkeys(mine.loc[mine["metric"] == f"{channel}/mean", "context"]):
                total = tokens.loc[tokens[context] > 0, context]
                layers = means.columns
                mean, share = (
                    values.reindex(pd.MultiIndex.from_product([[context], total.index])).reindex(columns=layers)
                    for values in (means, shares)
                )
                columns = _ratio(mean, total, "mean", "low", "high")
                columns |= _ratio(share, total, "share_above_null", "share_low", "share_high")
                columns |= _over_unrelated(means, tokens, context)
                place = {"reader": reader, "context": context, "channel": channel, "layer": layers}
                size = {"n_tokens": int(total.sum()), "n_trajectories": len(total), "interval": INTERVAL}
                rows.append(pd.DataFrame({**place, **columns, **size}))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()


def _wide(rows: pd.DataFrame) -> pd.DataFrame:
    """(context, trajectory) x layer, layers in their order and their mean last."""
    wide = rows.pivot(index=["context", "trajectory"], columns="layer", values="value")
    return wide[sorted(wide.columns, key=lambda layer: (layer == MEAN, int(layer) if layer != MEAN else 0))]


def _ratio(values: pd.DataFrame, total: pd.Series, *names: str) -> dict[str, Any]:
    """Token-weighted mean of each layer and its interval."""
    weight = total.to_numpy()
    found = stats.bootstrap_ratios(values.to_numpy() * weight[:, None], weight, np.random.default_rng(_SEED))
    return dict(zip(names, found, strict=True))


def _over_unrelated(means: pd.DataFrame, tokens: pd.DataFrame, context: str) -> dict[str, Any]:
    names = ("ratio_to_unrelated", "ratio_low", "ratio_high")
    if UNRELATED not in tokens:
        return dict.fromkeys(names, np.nan)
    both = tokens.index[(tokens[context] > 0) & (tokens[UNRELATED] > 0)]
    sums = []
    for name in (context, UNRELATED):
        weight = tokens.loc[both, name].to_numpy()
        values = means.reindex(pd.MultiIndex.from_product([[name], both])).to_numpy()
        sums.append((values * weight[:, None], weight))
    return dict(zip(names, _quotients(*sums), strict=True))


def _quotients(
    a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quotient of two token-weighted means on the same units: estimate, low, high of K of them.

    Args: a, b, each sums [n, K] and tokens [n] of the units.
    """
    n, count = a[0].shape
    if not n:
        return tuple(np.full(count, np.nan) for _ in range(3))  # type: ignore[return-value]

    def quotient(weights: np.ndarray) -> np.ndarray:
        above, below = (weights @ sums / (weights @ tokens)[:, None] for sums, tokens in (a, b))
        return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)

    estimate = quotient(np.ones((1, n)))[0]
    if n < 2:
        return estimate, np.full(count, np.nan), np.full(count, np.nan)
    rng = np.random.default_rng(_SEED)
    drawn = quotient(rng.multinomial(n, np.full(n, 1 / n), size=stats.RESAMPLES).astype(np.float64))
    low, high = np.quantile(drawn, [(1 - stats.LEVEL) / 2, (1 + stats.LEVEL) / 2], axis=0)
    return estimate, low, high
