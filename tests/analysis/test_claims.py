"""Claims: what decides them, from tables whose answers are known; nothing is claimed without being measured."""

from __future__ import annotations

import inspect
import json
import math

import numpy as np
import pandas as pd
import pytest

from analysis import claim_readings as read
from analysis.claim_readings import READERS
from analysis.claims import (
    FAILS,
    HOLDS,
    MISSING,
    OPEN,
    VERDICTS,
    Claim,
    claim_table,
    count_table,
    paper_claims,
    verdict,
    write_claims,
)
from analysis.reference import PAPER_VALUES
from analysis.stats import holm


@pytest.mark.parametrize(
    "low, high, above, below, says",
    [
        (0.01, 0.2, 0, math.inf, HOLDS),
        (-0.1, -0.01, 0, math.inf, FAILS),
        (-0.2, 0.0, 0, math.inf, FAILS),
        (-0.1, 0.1, 0, math.inf, OPEN),
        (math.nan, math.nan, 0, math.inf, OPEN),
        (0.1, 0.2, -math.inf, 0.25, HOLDS),
        (0.3, 0.4, -math.inf, 0.25, FAILS),
        (0.21, 0.27, 0.2, 0.28, HOLDS),
        (0.21, 0.3, 0.2, 0.28, OPEN),
        (0.1, 0.15, 0.2, 0.28, FAILS),
        (0.0, 0.0, -math.inf, 0.05, HOLDS),
    ],
)
def test_verdicts(low, high, above, below, says):
    claim = Claim("x", "SDAR", "", "", "signal", above=above, below=below)
    assert verdict(claim, 0.1, low, high) == says
    assert verdict(claim, math.nan, low, high) == MISSING


def test_the_list_is_sound():
    claims = paper_claims()
    assert len({claim.id for claim in claims}) == len(claims) > 50
    assert {claim.paper for claim in claims} == {"PR-OPD", "SDAR", "PCSD"}
    for claim in claims:
        assert claim.id.startswith(claim.paper.lower() + "/") and claim.claim.endswith(".")
        assert math.isfinite(claim.above) or math.isfinite(claim.below)
        inspect.signature(READERS[claim.read]).bind({}, **claim.arguments)
        for quantity in claim.published:
            assert any(
                v.quantity == quantity or (quantity.endswith("/") and v.quantity.startswith(quantity))
                for v in PAPER_VALUES
                if v.source.startswith(claim.paper)
            ), quantity
    assert {claim.read for claim in claims} == set(READERS)  # nothing is read that no claim asks for


def test_published_values_of_a_claim():
    table = claim_table({}).set_index("id")
    assert (table["verdict"] == MISSING).all() and table["value"].isna().all()
    gain = table.loc["pr-opd/beats-grpo"]
    assert (gain["published_low"], gain["published_high"]) == (pytest.approx(0.031), pytest.approx(0.047))
    share = table.loc["pr-opd/output-stays"]
    assert (share["published_low"], share["published_high"]) == (0.164, 0.237)
    assert table.loc["pr-opd/warm-up-gains", "published_high"] == 0.0962
    assert math.isnan(table.loc["sdar/gap-closes", "published_low"])


def differences(*rows: tuple[str, str, float, float, float]) -> pd.DataFrame:
    """(base, arm, difference, low, high); the base has success 0.5."""
    columns = ["base", "arm", "difference", "low", "high"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(a=0.5, b=0.5 + table["difference"], p=0.04, n_tasks=128)


def only(readings: list[read.Reading]) -> tuple[float, float, float]:
    (reading,) = readings
    return pytest.approx((reading.value, reading.low, reading.high), nan_ok=True)


def test_differences_direct_turned_and_through_a_third_arm():
    table = differences(("grpo", "sdar", 0.1, 0.02, 0.18), ("grpo", "opd", -0.05, -0.1, 0.0))
    for name in ("differences", "gains"):
        tables = {name: table.rename(columns={"base": "baseline"}) if name == "gains" else table}
        assert only(read.difference(tables, "grpo", "sdar")) == (0.1, 0.02, 0.18)
        assert only(read.difference(tables, "sdar", "grpo")) == (-0.1, -0.18, -0.02)
        assert only(read.difference(tables, "opd", "sdar")) == (0.15, 0.02, 0.28)
        assert read.difference(tables, "grpo", "pcsd") == []
    direct, through = read.difference(tables, "grpo", "sdar")[0], read.difference(tables, "opd", "sdar")[0]
    assert "128 tasks" in direct.remark and "388 episodes an arm" in direct.remark and direct.p == 0.04
    assert "both against grpo" in through.remark and math.isnan(through.p)
    assert read.difference({"unseen": table}, "grpo", "sdar") == []
    assert len(read.difference({"unseen": table}, "grpo", "sdar", named=["unseen"])) == 1


def test_least_of_several_differences():
    table = differences(("n", "a", 0.1, 0.02, 0.18), ("n", "b", 0.3, 0.01, 0.4), ("n", "c", 0.2, -0.5, 0.05))
    tables = {"differences": table}
    assert only(read.least_difference(tables, [["n", "a"], ["n", "b"]])) == (0.1, 0.01, 0.18)
    assert only(read.least_difference(tables, [["n", "a"], ["n", "c"]])) == (0.1, -0.5, 0.05)
    assert read.least_difference(tables, [["n", "a"], ["n", "d"]]) == []  # one is missing
    more = read.difference_of_gains(tables, less=["n", "a"], more=["n", "b"])
    assert only(more) == (0.2, 0.01 - 0.18, 0.4 - 0.02)


def test_starred():
    starred = pd.DataFrame([{"arm": "skill_grpo", "difference": 0.2, "low": 0.1, "high": 0.3, "p": 0.001}])
    assert only(read.starred_difference({"starred": starred}, "skill_grpo")) == (0.2, 0.1, 0.3)
    assert read.starred_difference({"starred": starred}, "grpo") == []


@pytest.fixture
def changes() -> pd.DataFrame:
    shares = {("hidden_change", "own_skill"): 0.85, ("hidden_change", "shuffled"): 0.6}
    shares |= {("output_change", "own_skill"): 0.2}
    return pd.DataFrame(
        [
            {"reader": reader, "channel": channel, "context": context, "token_class": "all", "share": share}
            | {"low": share - 0.02, "high": share + 0.02}
            for reader in ("tiny", "135m")
            for (channel, context), share in shares.items()
        ]
    )


def test_change_rates_by_reader(changes):
    tables = {"changes": changes}
    found = read.change_share(tables, "hidden_change")
    assert [r.subject for r in found] == ["tiny", "135m"] and (found[0].low, found[0].high) == (0.83, 0.87)
    assert read.change_share(tables, "hidden_change", "action") == []
    both = read.hidden_minus_output(tables)
    assert len(both) == 2 and (both[0].value, both[0].low, both[0].high) == pytest.approx((0.65, 0.61, 0.69))
    control = read.change_over_control(tables, "hidden_change", "shuffled")
    assert (control[1].value, control[1].low) == pytest.approx((0.25, 0.21))
    assert read.change_over_control(tables, "hidden_change", "other_skill") == []


def test_probes_are_judged_where_they_are_lowest_but_not_at_the_embedding():
    rows = [("hidden", "embed", 0.5), ("hidden", "0", 0.9), ("hidden", "1", 0.7), ("hidden", "2", np.nan)]
    rows += [("top64", "", 0.52), ("success", "", 0.99)]
    probes = pd.DataFrame(rows, columns=["features", "layer", "accuracy"]).assign(labels="own_skill", reader="tiny")
    tables = {"probes": probes.assign(low=probes["accuracy"] - 0.1, high=probes["accuracy"] + 0.05)}
    assert only(read.probe_accuracy(tables, "own_skill", "hidden")) == (0.7, 0.6, 0.75)
    assert read.probe_accuracy(tables, "own_skill", "hidden")[0].subject == "tiny: hidden 1"
    assert only(read.probe_accuracy(tables, "own_skill", ["sampled_logprob", "top64"])) == (0.52, 0.42, 0.57)
    assert read.probe_accuracy(tables, "success", "hidden") == []


def test_cka_by_mean_and_in_the_later_layers():
    layers = ["0", "1", "2", "3", "mean"]
    rows = [
        {"reader": "tiny", "control": control, "coordinates": coordinates, "layer": layer, "difference": difference}
        for control, lift in (("unrelated", 0.0), ("shuffled", -0.004))
        for coordinates in ("all", "trimmed")
        for layer, difference in zip(layers, (-0.01, 0.001, 0.02, 0.03, 0.01 + lift), strict=True)
    ]
    contrasts = pd.DataFrame(rows)
    contrasts = contrasts.assign(low=contrasts["difference"] - 0.0005, high=contrasts["difference"] + 0.0005)
    tables = {"cka_contrasts": contrasts}
    assert only(read.cka_contrast(tables, ["unrelated"])) == (0.01, 0.0095, 0.0105)
    assert only(read.cka_contrast(tables, ["unrelated", "shuffled"])) == (0.006, 0.0055, 0.0065)
    assert only(read.cka_contrast(tables, ["unrelated", "shuffled"], from_depth=0.36)) == (0.02, 0.0195, 0.0205)
    assert only(read.cka_contrast(tables, ["unrelated"], from_depth=0.25)) == (0.001, 0.0005, 0.0015)
    assert read.cka_contrast(tables, ["unrelated", "other_skill"]) == []
    cka = pd.DataFrame(
        [{"reader": "tiny", "context": "own_skill", "coordinates": "all", "layer": "mean", "dissimilarity": 0.004}]
    ).assign(low=0.003, high=0.005, note="n below d")
    assert only(read.cka_dissimilarity({"cka": cka})) == (0.004, 0.003, 0.005)
    assert read.cka_dissimilarity({"cka": cka})[0].remark == "n below d"


def test_perturbation():
    row = {"reader": "tiny", "method": "sdar", "context": "shuffled", "spearman": -0.2, "low": -0.3, "high": -0.1}
    tables = {"perturbation": pd.DataFrame([row])}
    assert only(read.perturbation(tables, "sdar", "shuffled")) == (-0.2, -0.3, -0.1)
    assert read.perturbation(tables, "sdar", "none") == []


def signals(values: dict[str, list[float]], seeds: int = 3) -> dict[str, pd.DataFrame]:
    rows = [
        {"arm": "sdar", "metric": metric, "step": step, "value": value, "lowest": value - 0.1, "highest": value + 0.2}
        for metric, series in values.items()
        for step, value in enumerate(series, start=1)
    ]
    return {"signals": pd.DataFrame(rows).assign(n_training_seeds=seeds)}


def test_signals_at_a_step_over_all_and_their_change():
    tables = signals({"gap/mean": [-1.0, -0.8, -0.6, -0.4, -0.2], "c/0": [0.8] * 5, "c/1": [1.0] * 5})
    assert only(read.signal(tables, "sdar", "gap/mean", 0)) == (-1.0, -1.1, -0.8)
    assert only(read.signal(tables, "sdar", "gap/mean", 1)) == (-0.2, -0.3, 0.0)
    assert only(read.signal(tables, "sdar", "gap/mean", 0.25)) == (-0.8, -0.9, -0.6)
    assert only(read.signal(tables, "sdar", "gap/mean", "mean")) == (-0.6, -0.7, -0.4)
    assert only(read.signal(tables, "sdar", "c/", 1)) == (0.9, 0.8, 1.1)
    assert only(read.signal_change(tables, "sdar", "gap/mean")) == (0.8, -0.3 + 0.8, 0.0 + 1.1)
    assert only(read.signal_difference(tables, "sdar", "c/0", "c/1")) == (0.2, 0.9 - 1.0, 1.2 - 0.7)
    assert read.signal(tables, "pcsd", "gap/mean", 0) == read.signal(tables, "sdar", "gap", 0) == []
    assert read.signal({}, "sdar", "gap/mean", 0) == []
    alone = read.signal(signals({"gap/mean": [-1.0]}, seeds=1), "sdar", "gap/mean", 0)
    assert only(alone) == (-1.0, math.nan, math.nan) and "one training seed" in alone[0].remark
    assert read.signal_change(signals({"gap/mean": [-1.0]}), "sdar", "gap/mean") == []


def test_claims_of_several_studies(tmp_path, changes):
    """A planted gain holds, its reverse fails, a wide one is open, and what no table has is missing."""
    planted = differences(("grpo", "sdar", 0.2, 0.1, 0.3), ("grpo", "pcsd", -0.2, -0.3, -0.1))
    wide = differences(("grpo", "sdar", 0.02, -0.1, 0.14))
    studies = {"one": {"differences": planted, "changes": changes}, "two": {"differences": wide}}
    table = claim_table(studies)
    found = table.set_index(["id", "study"])["verdict"]
    assert (found["sdar/beats-grpo", "one"], found["sdar/beats-grpo", "two"]) == (HOLDS, OPEN)
    assert found["pcsd/beats-grpo", "one"] == FAILS and found["pcsd/beats-sdar", "one"] == FAILS
    assert found["pcsd/weights-follow-removal", ""] == MISSING
    assert (table[table["id"] == "pr-opd/hidden-changes"]["verdict"] == HOLDS).all()  # 83 to 87 %
    assert set(table[table["id"] == "pr-opd/output-stays"]["subject"]) == {"tiny", "135m"}
    tested = table[(table["study"] == "one") & table["p"].notna()]
    assert tested["p_holm"].tolist() == holm(tested["p"]).tolist() == [0.08, 0.08]
    counts = count_table(table).set_index("paper")
    assert counts.to_numpy().sum() == len(table) and counts.loc["SDAR", HOLDS] == 1 and list(counts) == list(VERDICTS)

    path = write_claims(tmp_path / "deep" / "claims.json", table, {"tables": "abc"})
    document = json.loads(path.read_text())
    assert len(document["claims"]) == len(table) and document["inputs"] == {"tables": "abc"}
    first = next(row for row in document["claims"] if row["id"] == "sdar/beats-grpo")
    assert (first["value"], first["low"], first["high"], first["verdict"]) == (0.2, 0.1, 0.3, HOLDS)
    assert first["above"] == 0 and first["below"] is None
    missing = next(row for row in document["claims"] if row["verdict"] == MISSING)
    assert missing["value"] is None and missing["p_holm"] is None
