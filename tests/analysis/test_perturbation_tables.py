"""Planted relations are found and none is invented; correlations and areas are those of scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from sklearn.metrics import roc_auc_score

from analysis import stats
from analysis.claim_readings import perturbation as claimed
from analysis.perturbation_tables import (
    FEW,
    FLAT_QUALITY,
    FLAT_WEIGHT,
    ONE_VERDICT,
    action_perturbation_table,
    auroc,
    auroc_table,
    perturbation_table,
    perturbation_units,
    spearman,
)


def measured(changes: dict[str, np.ndarray], quality: np.ndarray, context: str = "none") -> pd.DataFrame:
    """The measure's table: weights that change by so much, the rest unchanged."""
    rows = []
    for method, change in changes.items():
        for k, (dw, dq) in enumerate(zip(change, quality, strict=True)):
            weights = {"weight_own": 0.5 + dw, "weight_perturbed": 0.5}
            weights |= {"action_weight_own": 0.5 - dw, "action_weight_perturbed": 0.5}
            rows.append(
                {"reader": "tiny", "trajectory": f"t{k}", "task": f"task{k // 2}", "context": context, "method": method}
                | weights
                | {"quality_own": -1.0, "quality_perturbed": -1.0 - dq, "n_tokens": 40, "n_action_tokens": 9}
                | {"mate": f"t{k ^ 1}", "undefined": ""}
            )
    return pd.DataFrame(rows)


@pytest.fixture
def planted() -> pd.DataFrame:
    """60 trajectories: one weight follows the quality, one opposes it, one knows nothing of it."""
    rng = np.random.default_rng(4)
    quality = rng.standard_normal(60)
    changes = {
        "follows": quality + 0.2 * rng.standard_normal(60),
        "opposes": -quality + 0.2 * rng.standard_normal(60),
        "independent": rng.standard_normal(60),
    }
    return measured(changes, quality)


def test_what_is_planted_is_found_and_nothing_else(planted: pd.DataFrame) -> None:
    table = perturbation_table(planted).set_index("method")
    follows, opposes, independent = (table.loc[name] for name in ("follows", "opposes", "independent"))
    assert 0.9 < follows["low"] < follows["spearman"] < follows["high"] <= 1
    assert -1 <= opposes["low"] < opposes["spearman"] < opposes["high"] < -0.9
    assert independent["low"] < 0 < independent["high"] and independent["high"] - independent["low"] > 0.3
    assert (table["n_units"] == 60).all() and (table["n_undefined"] == 0).all() and (table["note"] == "").all()
    actions = action_perturbation_table(planted).set_index("method")  # planted the other way round
    assert actions["spearman"].to_numpy() == pytest.approx(-table["spearman"].to_numpy())
    (reading,) = claimed({"perturbation": table.reset_index()}, "opposes", "none")
    assert (reading.subject, reading.high) == ("tiny", opposes["high"])


def test_the_interval_of_independent_weights_holds_zero_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 1000)
    rng = np.random.default_rng(0)
    held = []
    for _ in range(150):
        _, low, high = spearman(rng.standard_normal(40), rng.standard_normal(40), rng)
        held.append(low <= 0 <= high)
    assert 0.88 < np.mean(held) < 0.99


def test_the_correlation_is_scipys_with_ties_and_in_every_resample(planted: pd.DataFrame) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.integers(5, size=30).astype(float), rng.standard_normal(30).round(1)
    value, low, high = spearman(x, y, np.random.default_rng(9))
    assert value == pytest.approx(scipy_stats.spearmanr(x, y).statistic)
    other = np.random.default_rng(9)
    drawn = np.concatenate([other.integers(30, size=(1000, 30)) for _ in range(10)])[:200]
    expected = [scipy_stats.spearmanr(x[i], y[i]).statistic for i in drawn]
    assert np.quantile(expected, [0.025, 0.975]) == pytest.approx([low, high], abs=0.08)
    units = perturbation_units(planted)
    mine = units[units["method"] == "independent"]
    expected = scipy_stats.spearmanr(mine["weight_change"], mine["quality_change"]).statistic
    table = perturbation_table(planted).set_index("method")
    assert table.loc["independent", "spearman"] == pytest.approx(expected)
    pd.testing.assert_frame_equal(perturbation_table(planted), perturbation_table(planted))
    assert perturbation_table(planted[planted["method"] == "opposes"]).iloc[0]["low"] == table.loc["opposes", "low"]


def test_what_cannot_be_correlated_says_why() -> None:
    quality = np.linspace(-1, 1, 8)
    flat = measured({"constant": np.zeros(8), "rounded": 1e-9 * quality, "moves": quality}, quality)
    table = perturbation_table(flat).set_index("method")
    assert table["spearman"].isna().tolist() == [True, True, False]
    assert table["note"].tolist() == [FLAT_WEIGHT, FLAT_WEIGHT, ""]
    assert perturbation_table(measured({"m": quality}, 0 * quality))["note"].tolist() == [FLAT_QUALITY]
    lost = measured({"m": quality}, quality)
    lost.loc[2:, "undefined"] = ["no skill"] * 2 + ["no mate"] * 4
    lost.loc[2:, ["quality_own", "quality_perturbed"]] = None
    row = perturbation_table(lost).iloc[0]
    assert (row["n_units"], row["n_undefined"]) == (2, 6) and np.isnan(row["low"])
    assert row["note"] == f"{FEW}; 4 × no mate; 2 × no skill"
    assert perturbation_units(lost)["trajectory"].tolist() == ["t0", "t1"]
    silent = measured({"m": quality}, quality)
    silent.loc[:2, ["action_weight_own", "action_weight_perturbed"]] = None
    assert action_perturbation_table(silent).iloc[0]["note"] == "3 × no action token of its own"
    assert perturbation_table(silent).iloc[0]["note"] == ""


# Agreement with an expert


def counted(weights: dict[str, np.ndarray], verdict: np.ndarray, trajectory: np.ndarray) -> pd.DataFrame:
    rows = []
    for method, values in weights.items():
        frame = pd.DataFrame({"bin": values, "accepted": verdict, "rejected": ~verdict, "trajectory": trajectory})
        rows.append(
            frame.groupby(["trajectory", "bin"])[["accepted", "rejected"]].sum().reset_index().assign(method=method)
        )
    return pd.concat(rows).assign(reader="tiny", task="", context="own_skill", not_finite=0, undefined="")


@pytest.fixture
def tokens() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.random(900) < 0.7, np.array([f"t{k}" for k in np.repeat(np.arange(30), 30)])


def test_the_area_is_that_of_scikit_learn(tokens: tuple[np.ndarray, np.ndarray]) -> None:
    verdict, trajectory = tokens
    rng = np.random.default_rng(5)
    weights = {
        "right": rng.integers(0, 40, 900) + 12 * verdict,
        "wrong": rng.integers(0, 40, 900) - 12 * verdict,
        "blind": rng.integers(0, 40, 900),
        "constant": np.full(900, 7),
        "perfect": np.where(verdict, 9, 3),
    }
    table = auroc_table(counted(weights, verdict, trajectory)).set_index("method")
    for method, values in weights.items():
        assert table.loc[method, "auroc"] == pytest.approx(roc_auc_score(verdict, values), abs=1e-12)
    assert table.loc["constant", ["auroc", "low", "high"]].tolist() == [0.5] * 3
    assert table.loc["perfect", ["auroc", "low", "high"]].tolist() == [1.0] * 3
    assert table.loc["right", "low"] > 0.5 > table.loc["wrong", "high"]
    assert table.loc["blind", "low"] < 0.5 < table.loc["blind", "high"]
    assert (table["n_accepted"] == verdict.sum()).all() and (table["n_rejected"] == (~verdict).sum()).all()
    assert (table["n_trajectories"] == 30).all()


def test_the_interval_resamples_whole_trajectories() -> None:
    """Tokens of a trajectory that are all alike are worth one: the interval is that of trajectories, not of tokens."""
    rng = np.random.default_rng(6)
    accepted, rejected = (rng.integers(0, 3, (20, 6)).astype(float) for _ in range(2))
    once, often = (auroc(k * accepted, k * rejected, np.random.default_rng(0)) for k in (1, 50))
    assert often == pytest.approx(once)
    value, low, high = auroc(accepted[:1], rejected[:1], np.random.default_rng(0))
    assert 0 < value < 1 and np.isnan([low, high]).all()


def test_what_has_no_area_says_why(tokens: tuple[np.ndarray, np.ndarray]) -> None:
    verdict, trajectory = tokens
    only = counted({"m": np.arange(900)}, np.ones(900, bool), trajectory)
    row = auroc_table(only).iloc[0]
    assert np.isnan(row["auroc"]) and row["note"] == ONE_VERDICT and row["n_accepted"] == 900
    none = {"method": "", "accepted": 0, "rejected": 0, "not_finite": 0, "undefined": "no expert"}
    unjudged = pd.DataFrame([{"reader": "tiny", "trajectory": f"u{k}", "bin": np.nan, **none} for k in range(2)])
    row = auroc_table(unjudged).iloc[0]
    assert (row["method"], row["n_trajectories"], row["note"]) == ("", 0, f"{ONE_VERDICT}; 2 × no expert")
    both = auroc_table(pd.concat([counted({"m": np.arange(900)}, verdict, trajectory), unjudged])).iloc[0]
    assert both["auroc"] == pytest.approx(roc_auc_score(verdict, np.arange(900))) and both["n_undefined"] == 2
