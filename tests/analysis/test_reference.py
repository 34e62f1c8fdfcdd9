"""Published values are the published values."""

from __future__ import annotations

import json

import pytest

from analysis.reference import PAPER_VALUES, paper_values


def test_against_the_collected_tables(shared):
    tables = json.loads((shared / "reference" / "tables.json").read_text())
    pr_opd, checked = tables["pr_opd"], 0
    for value in PAPER_VALUES:
        kind, *rest = value.quantity.split("/")
        if kind == "change" and value.model:
            expected = pr_opd["change_rate"][value.model][rest[0]] / 100
        elif value.quantity.startswith("success/webshop"):
            names = {"student": "student", "own_skill": "teacher", "alignment": "aligned_student"}
            expected = pr_opd["fig1c_webshop_success"][names[rest[1]]] / 100
        elif kind == "gain":
            expected = pr_opd["warmup_webshop_1.7b"]["paired_gain_over_grpo"][_slash(rest[1])]["acc"] / 100
        elif "gate ablation" in value.source:
            expected = tables["sdar_gate_3b_alfworld"][rest[1].removeprefix("sdar_")] / 100
        elif "retrieval ablation" in value.source:
            name = {"none": "none_grpo"}.get(rest[1].removeprefix("sdar_"), rest[1].removeprefix("sdar_"))
            expected = tables["sdar_retrieval_7b"][name][0] / 100
        elif "component ablation" in value.source:
            expected = tables["pcsd"]["components_3b_alfworld"][rest[1].removeprefix("pcsd_")] / 100
        elif "lambda ablation" in value.source:
            expected = tables["pcsd"]["lambda_3b_alfworld"][rest[1].removeprefix("pcsd_lambda_")] / 100
        elif kind == "success" and value.source.startswith("SDAR"):
            expected = tables["sdar_main"]["models"][value.model][rest[1]]["alfworld"]["all"] / 100
        elif kind == "success" and value.source.startswith("PCSD"):
            expected = tables["pcsd"]["alfworld_all"][value.model][rest[1]] / 100
        elif value.source.endswith("channel ablation"):
            name = {"pr_opd_no_projector": "hidden_no_projector"}.get(rest[1], rest[1])
            expected = pr_opd["channel_ablation_alfworld"][value.model][name] / 100
        elif kind == "success":
            expected = pr_opd["alfworld_all"][value.model][rest[1]] / 100
        elif kind == "alignment":
            assert [value.low, value.high] == pr_opd["alignment"][rest[0]]
            expected = value.low
        elif kind == "hidden_change":
            expected = pr_opd["hidden_change_vs_unrelated_text"][value.model]
        else:
            continue  # "about 0" is stated in words
        assert value.low == pytest.approx(expected)
        checked += 1
    assert checked == len(PAPER_VALUES) - 1


def _slash(steps: str) -> str:
    """100_30 -> 100/30"""
    return steps.replace("pr_opd_", "").replace("_", "/")


def test_unknown_prefix_is_refused():
    assert len(paper_values("change/")) == 5
    with pytest.raises(ValueError, match="quantities start with alignment, change"):
        paper_values("chagne")
