"""The columns of the papers' main tables: what stands in them, by hand, and what is published of a method."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.main_table import DATASETS, TASKS, columns, main_table, named_methods, published_table
from analysis.scores import score_table
from analysis.tables import success_table


def episodes(env: str, rows: list[tuple[str, str, bool, float | None]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["arm", "type", "success", "score"]).astype({"score": float})
    same = {"env": env, "seed": 0, "error": None, "n_invalid": 0, "n_turns": 1}
    return frame.assign(task=[f"t{place}" for place in range(len(frame))], **same)


def values(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    scores = score_table(frame, ("arm",)) if frame["score"].notna().any() else pd.DataFrame()
    table = main_table(success_table(frame, ("arm",)), scores, frame["env"].iloc[0])
    assert (table["low"].isna() | (table["low"] <= table["value"])).all()
    assert (table["high"].isna() | (table["high"] >= table["value"])).all()
    return {arm: dict(zip(rows["column"], rows["value"], strict=True)) for arm, rows in table.groupby("arm")}


def test_alfworld_has_its_types_in_the_papers_order_and_all():
    look, pick = "look_at_obj_in_light", "pick_and_place_simple"
    found = values(
        episodes("household", [("a", look, True, None), ("a", pick, False, None), ("a", pick, True, None),
                               ("b", pick, False, None), ("b", "juggle", True, None)])
    )  # fmt: skip
    assert found == {
        "a": {"pick": 0.5, "look": 1.0, "all": pytest.approx(2 / 3)},
        "b": {"pick": 0, "juggle": 1, "all": 0.5},
    }
    assert [column.name for column in columns("alfworld", set(TASKS))] == [*TASKS.values(), "all"]
    assert [column.published for column in columns("household", {pick, "juggle"})] == [
        ("success_by_type/alfworld/{}/pick",), (), ()
    ]  # fmt: skip


def test_webshop_has_score_and_success():
    rows = [("a", "shoes", True, 1.0), ("a", "shoes", False, 0.5), ("a", "hats", False, 0.0), ("a", "hats", False, 0.1)]
    assert values(episodes("webshop", rows)) == {"a": {"Score": pytest.approx(0.4), "Success": 0.25}}


def test_search_qa_has_its_data_sets_and_their_mean():
    rows = [("a", "popqa", True, 1.0), ("a", "nq", False, 0.9), ("a", "nq", False, 0.9), ("a", "nq", True, 1.0)]
    assert values(episodes("searchqa", rows)) == {
        "a": {"NQ": pytest.approx(1 / 3), "PopQA": 1.0, "Avg.": pytest.approx(2 / 3)}  # of exact matches
    }
    assert [column.name for column in columns("searchqa", {"one_hop", "two_hop"})] == ["one_hop", "two_hop", "Avg."]
    assert [column.name for column in columns("searchqa", set(DATASETS))] == [
        "NQ", "TriviaQA", "PopQA", "HotpotQA", "2Wiki", "MuSiQue", "Bamboogle", "Avg."
    ]  # fmt: skip


def published(env: str, types: set[str], **methods: str) -> dict[tuple[str, str, str], list[float]]:
    table = published_table(methods, env, types)
    keys = ["arm", "column", "model"]
    return {key: rows["low"].tolist() for key, rows in table.groupby(keys)}


def test_published_values_stand_in_their_columns():
    small, middle = "Qwen3-1.7B", "Qwen2.5-3B-Instruct"
    shop = published("webshop", {"shoes"}, mine="pr_opd", alignment="alignment", other="nothing")
    assert shop["mine", "Score", middle] == [0.837] and shop["mine", "Success", small] == [0.57]
    assert shop["alignment", "Success", ""] == [0.648] and "other" not in {arm for arm, *_ in shop}
    search = published("searchqa", set(DATASETS), sdar="sdar")
    assert search["sdar", "2Wiki", middle] == [0.362] and search["sdar", "Avg.", middle] == [0.434]
    assert {column for _, column, _ in published("searchqa", {"one_hop"}, sdar="sdar")} == {"Avg."}
    home = published("household", set(TASKS), grpo="grpo")
    assert home["grpo", "pick2", middle] == [0.474]
    assert home["grpo", "all", middle] == [0.664, 0.75]  # PR-OPD ran GRPO anew; what PCSD repeats stands once
    assert published("household", {"juggle"}, grpo="grpo") == {}
    assert published_table({}, "webshop", set()).empty


def test_an_arm_is_the_method_that_its_study_names():
    named = [("grpo", "accuracy/webshop/grpo"), ("aligned", "success/webshop/alignment"),
             ("search", "exact_match/search_qa/sdar/avg"), ("late", "gain/webshop/pr_opd_140_10")]  # fmt: skip
    paper = pd.DataFrame(named, columns=["arm", "quantity"])
    arms = ["grpo", "aligned", "search", "late", "opd"]
    assert named_methods(arms, paper) == {
        "grpo": "grpo", "aligned": "alignment", "search": "sdar", "late": "late", "opd": "opd"
    }  # fmt: skip
    assert named_methods(["opd"], pd.DataFrame()) == {"opd": "opd"}
