"""The papers' main table of an environment: its columns, our value in each of them, and the published ones.

ALFWorld (and household games)   success by type of task, and over all tasks
WebShop                          mean score, and share of perfect purchases
Search-QA                        exact match by data set, and their mean
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pandas as pd

from analysis.reference import PAPER_VALUES
from analysis.scores import MEAN

ALL = "all"
TASKS = {  # type of ALFWorld's tasks -> its name in the papers' tables, in their order
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "pick2",
}
DATASETS = {  # data set of a question -> (heading, its name in analysis.reference)
    "nq": ("NQ", "nq"),
    "triviaqa": ("TriviaQA", "triviaqa"),
    "popqa": ("PopQA", "popqa"),
    "hotpotqa": ("HotpotQA", "hotpotqa"),
    "2wikimultihopqa": ("2Wiki", "2wiki"),
    "musique": ("MuSiQue", "musique"),
    "bamboogle": ("Bamboogle", "bamboogle"),
}
NAMES = {"household": "ALFWorld", "alfworld": "ALFWorld", "webshop": "WebShop", "searchqa": "Search-QA"}


@dataclass(frozen=True)
class Column:
    """One column: a mean over the episodes of a type, over ALL of them, or over types (MEAN)."""

    name: str  # as the papers head it; a type of our own by its own name
    type: str
    published: tuple[str, ...] = ()  # quantities of analysis.reference, {} for the method
    score: bool = False  # mean score instead of success


def columns(env: str, types: Collection[str]) -> list[Column]:
    """The columns of an environment's main table.

    Args: env, its kind; types of task that were played. Types that the papers do not have stand behind theirs, and
    where there is one nothing is published for the mean over ALFWorld's tasks.
    """
    if env == "webshop":
        return [
            Column("Score", ALL, ("score/webshop/{}",), score=True),
            Column("Success", ALL, ("accuracy/webshop/{}", "success/webshop/{}")),
        ]
    if env == "searchqa":
        quantity = "exact_match/search_qa/{}/"
        found = [Column(head, name, (quantity + ours,)) for name, (head, ours) in DATASETS.items() if name in types]
        own = [Column(name, name) for name in sorted(set(types) - set(DATASETS))]
        return [*found, *own, Column("Avg.", MEAN, (f"{quantity}avg",))]
    found = [
        Column(head, name, (f"success_by_type/alfworld/{{}}/{head}",)) for name, head in TASKS.items() if name in types
    ]
    own = [Column(name, name) for name in sorted(set(types) - set(TASKS))]
    return [*found, *own, Column(ALL, ALL, () if own else ("success/alfworld/{}",))]


def main_table(success: pd.DataFrame, scores: pd.DataFrame, env: str) -> pd.DataFrame:
    """Our values in the columns of the environment's main table.

    Args: success, of success_table by arm; scores, of score_table by arm, empty where the environment grades nothing.
    Returns: arm, column, value, low, high, n_episodes, n_tasks; arm by arm, in the order of the columns.
    """
    frames = []
    for column in columns(env, set(success["type"]) - {ALL}):
        table, name = (success, "success")
        if column.score or column.type == MEAN:
            table, name = scores, "score" if column.score else "success"
        ends = {f"{name}_{end}": end for end in ("low", "high")} if table is scores else {}
        rows = table[table["type"] == column.type].rename(columns={name: "value", **ends})
        frames.append(rows.assign(column=column.name))
    wanted = ["arm", "column", "value", "low", "high", "n_episodes", "n_tasks"]
    table = pd.concat(frames)[wanted]
    order = {arm: place for place, arm in enumerate(dict.fromkeys(success["arm"]))}
    return table.sort_values("arm", key=lambda arms: arms.map(order), kind="stable", ignore_index=True)


def published_table(methods: Mapping[str, str], env: str, types: Collection[str], paper: str = "") -> pd.DataFrame:
    """What the papers print for the arms: arm, column, and the fields of reference.PaperValue.

    Args: methods, arm -> the name its values have in analysis.reference; paper, the beginning of their source. A value
    that a paper repeats from another stands once, with its first source.
    """
    values = pd.DataFrame([value.__dict__ for value in PAPER_VALUES if value.source.startswith(paper)])
    values = values.drop_duplicates(["quantity", "model", "low"])
    frames = [values[:0].assign(arm="", column="")]
    for arm, method in methods.items():
        places = {text.format(method): column.name for column in columns(env, types) for text in column.published}
        mine = values[values["quantity"].isin(places)]
        frames.append(mine.assign(arm=arm, column=mine["quantity"].map(places)))
    return pd.concat(frames[1:] or frames, ignore_index=True)


def named_methods(arms: Iterable[str], paper: pd.DataFrame) -> dict[str, str]:
    """Arm -> the method that its published values are of: the one its study names, else that of the arm's own name.

    Args: paper, a study's table of the values it names.
    """
    names = {arm: arm for arm in arms}
    if len(paper):
        for arm, quantity in zip(paper["arm"], paper["quantity"], strict=True):
            measure, _, rest = quantity.partition("/")
            if measure in ("success", "accuracy", "score", "exact_match") and arm in names:
                names[arm] = rest.split("/")[1]
    return names
