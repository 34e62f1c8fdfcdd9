"""Published values are the published values, and there is one for every figure that shows them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator

import pytest

from analysis.reference import CURVES, PAPER_VALUES, PaperValue, paper_curves, paper_values

B3, B7, B17 = "Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-1.7B"


def of(paper: str) -> dict[tuple[str, str], PaperValue]:
    """The values of one paper by quantity and model, single ones (no curve)."""
    return {(v.quantity, v.model): v for v in PAPER_VALUES if v.source.startswith(paper) and math.isnan(v.at)}


def numbers(tree: object, *path: str) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every leaf of the collected tables, with the keys that lead to it."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key != "source":
                yield from numbers(value, *path, key)
    else:
        yield path, tree


def quantities(path: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(paper, quantity, model) under which the project keeps a collected number; several for a list of them."""
    match path:
        case ("sdar_main", "models", model, method, env, column):
            paper = "OPID" if method == "opid" else "SDAR"
            if env == "alfworld":
                every = column == "all"
                name = f"success/alfworld/{method}" if every else f"success_by_type/alfworld/{method}/{column}"
            elif env == "webshop":
                name = f"{'accuracy' if column == 'acc' else column}/webshop/{method}"
            else:
                name = f"exact_match/search_qa/{method}/{column}"
            return [(paper, name, model)]
        case ("sdar_retrieval_7b", how):
            name = f"sdar_{how.removesuffix('_grpo')}"
            kinds = ("success/alfworld", "score/webshop", "accuracy/webshop")
            return [("SDAR", f"{kind}/{name}", B7) for kind in kinds]
        case ("sdar_gate_3b_alfworld", gate):
            return [("SDAR", f"success/alfworld/sdar_{gate}", B3)]
        case ("pcsd", "alfworld_all", model, method):
            return [("PCSD", f"success/alfworld/{method}", model)]
        case ("pcsd", "pick2_3b", "pcsd"):
            return [("PCSD", "success_by_type/alfworld/pcsd/pick2", B3)]
        case ("pcsd", "components_3b_alfworld", name) if name != "full":
            return [("PCSD", f"success/alfworld/pcsd_{name}", B3)]
        case ("pcsd", "lambda_3b_alfworld", value):
            return [("PCSD", f"success/alfworld/pcsd_lambda_{value}", B3)]
        case ("pcsd", "alfworld_unseen_3b", method):
            return [("PCSD", f"success/alfworld_unseen/{method}", B3)]
        case ("pcsd", "perturbation_rho", method, kind):
            return [("PCSD", f"perturbation/{method}/{kind}", "")]
        case ("pcsd" | "pr_opd" as paper, "webshop", model, method, column):
            name = f"{'accuracy' if column == 'acc' else column}/webshop/{method}"
            return [({"pcsd": "PCSD", "pr_opd": "PR-OPD"}[paper], name, model)]
        case ("pr_opd", "alfworld_all", model, method):
            return [("PR-OPD", f"success/alfworld/{method}", model)]
        case ("pr_opd", "channel_ablation_alfworld", model, "token_opd"):
            return [("PR-OPD", "success/alfworld/token_opd", model)]
        case ("pr_opd", "channel_ablation_alfworld", model, "hidden_no_projector"):
            return [("PR-OPD", "success/alfworld/pr_opd_no_projector", model)]
        case ("pr_opd", "warmup_webshop_1.7b", kind, steps, column):
            name = {"acc": "gain", "score": "score_gain"} if "gain" in kind else {"acc": "accuracy", "score": "score"}
            return [("PR-OPD", f"{name[column]}/webshop/pr_opd_{steps.replace('/', '_')}", B17)]
        case ("pr_opd", "change_rate", model, channel):
            return [("PR-OPD", f"change/{channel}", model)]
        case ("pr_opd", "fig1c_webshop_success", who):
            arm = {"teacher": "own_skill", "aligned_student": "alignment"}.get(who, who)
            return [("PR-OPD", f"success/webshop/{arm}", "")]
        case ("pr_opd", "probe_accuracy", place, model):
            return [("PR-OPD", f"probe/hidden/{place}", model)]
        case ("pr_opd", "hidden_change_vs_unrelated_text", model):
            return [("PR-OPD", "hidden_change/skill_over_unrelated", model)]
    return []


def test_every_collected_number_is_kept(shared):
    tables, checked = json.loads((shared / "reference" / "tables.json").read_text()), 0
    for path, found in numbers(tables):
        scale = 1 if path[1] in ("perturbation_rho", "hidden_change_vs_unrelated_text") else 100  # else percent
        for key, value in zip(quantities(path), found if isinstance(found, list) else [found], strict=False):
            kept = of(key[0])[key[1:]]
            assert kept.low == kept.high == pytest.approx(value / scale), key
            checked += 1
    assert checked > 600


def test_ranges_and_single_facts():
    pr_opd, sdar, pcsd = of("PR-OPD"), of("SDAR"), of("PCSD")
    ranges = {
        "probe/hidden": (0.654, 0.983),
        "probe/output": (0.502, 0.54),
        "alignment/loss_start": (1.22, 1.52),
        "alignment/steps_to_0.5": (4, 7),
        "alignment/steps_to_0.3": (11, 19),
        "alignment/final_cosine": (0.913, 0.933),
        "cka/same_layer_mean": (0.996, 0.996),
        "cka/dissimilarity/own_skill": (0.00406, 0.00406),
        "cka/dissimilarity/unrelated": (0.00067, 0.00067),
        "cka/above_controls_from_layer": (13, 13),
    }
    assert {name: (pr_opd[name, ""].low, pr_opd[name, ""].high) for name in ranges} == ranges
    assert (pcsd["weight/pcsd/over_half", ""].low, pcsd["weight/pcsd/over_half", ""].high) == (0.2, 0.28)
    assert pcsd["window/effective_sample_size", ""].low == 6.41
    assert sdar["gap/alfworld/sdar/mean", B3].low == -0.1168
    assert pr_opd["success/alfworld/grpo", B3].low == 0.664 and sdar["success/alfworld/grpo", B3].low == 0.75


def test_rates_are_shares_and_no_value_stands_twice():
    keys = [(v.quantity, v.model, v.source, v.at) for v in PAPER_VALUES if not math.isnan(v.at)]
    keys += [(v.quantity, v.model, v.source, 0.0) for v in PAPER_VALUES if math.isnan(v.at)]
    assert len(set(keys)) == len(PAPER_VALUES)
    for value in PAPER_VALUES:
        assert value.low <= value.high and value.source.partition(" (arXiv ")[2]
        if value.quantity.startswith(("success", "accuracy", "score/", "exact_match", "change", "probe")):
            assert 0 <= value.low <= value.high <= 1, value
    # the figure draws everything of this prefix, and knows these arms only
    assert set(paper_values("success/webshop/")["quantity"]) == {
        "success/webshop/student",
        "success/webshop/own_skill",
        "success/webshop/alignment",
    }


FIGURES = """
change/ hidden_change/ probe/ cka/ alignment/ gain/ success/alfworld/pr_opd_no_projector success/alfworld/token_opd
success/alfworld_unseen/ perturbation/ weight/ success/alfworld/pcsd_no_ success/alfworld/pcsd_lambda_ success_by_type/
gap/alfworld/sdar/by_step gap/alfworld/grpo_opsd/by_step gap/alfworld/sdar/by_turn gap/alfworld/sdar/by_position
kl/by_turn gate/ success/alfworld/sdar_gap success/alfworld/sdar_ucb accuracy/webshop/sdar_ucb exact_match/search_qa/
"""


@pytest.mark.parametrize("prefix", FIGURES.split())
def test_every_figure_has_its_values(prefix):
    found = paper_values(prefix)
    assert list(found) == ["quantity", "model", "low", "high", "source", "at"]
    assert found["at"].notna().all() == ("/by_" in prefix)


def test_curves(shared):
    success = paper_curves("success_rate")
    row = success.set_index(["method", "env", "step"])["value"]
    assert row["sdar", "alfworld", 150] == pytest.approx(0.758, abs=1e-3)
    assert row["grpo", "webshop", 300] == pytest.approx(0.789, abs=1e-3)
    assert set(success["source"]) == {CURVES} and (success["step"] % 5 == 0).all()
    with (shared / "reference" / "curves.csv").open() as file:
        logged = {(r["method"], r["env"], r["metric"], int(r["step"])): float(r["value"]) for r in csv.DictReader(file)}
    for metric in ("success_rate", "gate_mean", "gate_active_share", "gap_mean", "distill_loss", "kl", "entropy"):
        for point in paper_curves(metric).itertuples():
            assert point.value == pytest.approx(logged[point.method, point.env, metric, point.step], abs=1e-9)


def test_what_is_not_there_is_refused():
    assert len(paper_values("change/")) == 5
    with pytest.raises(ValueError, match="quantities start with ablation, accuracy, alignment, change"):
        paper_values("chagne")
    with pytest.raises(ValueError, match="no published curve of 'sucess'; there are distill_loss"):
        paper_curves("sucess")
