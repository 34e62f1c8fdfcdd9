"""The figures of training, from tables with invented numbers: what stands where, what lies beside them."""

from __future__ import annotations

import json
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from figures import fig_gate, fig_kl, fig_learning, fig_unseen, fig_weights_dynamics
from figures.steps import ARMS, looks

INPUTS = {"seed0/sdar": "0123abcd"}
LEVELS = {"grpo": 0.6, "opsd": 0.32, "grpo_opsd": 0.55, "skill_sd": 0.58, "rlsd": 0.61, "sdar": 0.63, "pcsd": 0.64}
TYPES = [*list(fig_unseen.TYPES)[:-1], "all"]
MODULES = (fig_learning, fig_weights_dynamics, fig_gate, fig_unseen, fig_kl)
STEPS = range(1, 9)


def signal_rows(arm: str, metric: str, start: float, end: float, spread: float = 0.02) -> list[dict[str, object]]:
    values = np.linspace(start, end, len(STEPS))
    columns = {"arm": arm, "metric": metric, "n_training_seeds": 3}
    return [
        {**columns, "step": step, "value": value, "lowest": value - spread, "highest": value + spread}
        for step, value in zip(STEPS, values, strict=True)
    ]


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    signals = [row for arm in LEVELS for row in signal_rows(arm, "loss/kl", 0.02, 0.03 + 0.3 * (arm == "opsd"), 0.004)]
    for arm, start in (("grpo_opsd", -0.2), ("sdar", -0.18), ("pcsd", -0.21)):
        signals += signal_rows(arm, "gap/mean", start, start / 2)
    for arm, start in (("sdar", 0.5), ("pcsd", 0.3)):
        signals += signal_rows(arm, f"weight/{arm}/over_half", start, start + 0.04)
    success = [
        {"arm": arm, "success": level, "low": level - 0.05, "high": level + 0.05, "n_tasks": 64,
         "n_training_seeds": 3, "n_episodes": 384, "interval": "bootstrap"}
        for arm, level in LEVELS.items()
    ]  # fmt: skip
    curves = [
        {"arm": arm, "training_seed": seed, "step": step, "success": level - 0.1 + 0.02 * step + 0.01 * seed}
        for arm, level in LEVELS.items()
        for seed in (0, 1, 2)
        for step in (0, 2, 4, 6, 8)
    ]
    unseen = [
        {"arm": arm, "type": name, "success": level - 0.03 * place, "low": level - 0.03 * place - 0.12,
         "high": level - 0.03 * place + 0.12, "n_tasks": 64 if name == "all" else 10}
        for arm, level in LEVELS.items() if arm in ("grpo", "grpo_opsd", "rlsd", "sdar", "pcsd")
        for place, name in enumerate(TYPES)
    ]  # fmt: skip
    found = {"signals": signals, "success": success, "curves": curves, "unseen_types": unseen}
    return {name: pd.DataFrame(rows) for name, rows in found.items()}


def marks(axes, marker: str, filled: bool = True) -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if line.get_marker() == marker]
    chosen = [line for line in lines if (line.get_markerfacecolor() == "white") != filled]
    return [(float(x), float(y)) for line in chosen for x, y in zip(*line.get_data(), strict=True)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NAME)
def test_a_figure_says_what_it_drew_and_is_the_same_again(module: ModuleType, tables, tmp_path):
    saved = module.write(tmp_path, INPUTS, tables)
    assert saved.name == module.NAME and saved.png.stat().st_size > 1000
    record = json.loads(saved.record.read_text())
    assert record["inputs"] == INPUTS and record["script"] == module.__name__ and record["interval"]
    assert record["references"]  # published values stand beside ours
    assert all(len(pd.read_csv(path)) for path in saved.data.values())
    assert set(module.NEEDS) <= set(tables)
    again = module.write(tmp_path / "again", INPUTS, tables)
    assert saved.png.read_bytes() == again.png.read_bytes()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.NAME)
def test_one_arm_and_one_seed_are_enough(module: ModuleType, tables, tmp_path):
    alone = {name: table[table["arm"] == "sdar"] for name, table in tables.items()}
    for column in ("lowest", "highest"):
        alone["signals"] = alone["signals"].assign(**{column: alone["signals"]["value"]})
    alone["curves"] = alone["curves"][alone["curves"]["training_seed"] == 0]
    assert module.write(tmp_path, INPUTS, alone).png.stat().st_size > 1000


@pytest.mark.parametrize("module", [fig_learning, fig_weights_dynamics, fig_gate, fig_kl], ids=lambda m: m.NAME)
def test_without_the_rows_it_needs_it_says_so_in_one_sentence(module: ModuleType, tables, tmp_path):
    none = tables["signals"][tables["signals"]["metric"] == "nothing"]
    with pytest.raises(ValueError, match=f"{module.NAME} needs") as refusal:
        module.write(tmp_path, INPUTS, {**tables, "signals": none})
    assert "\n" not in str(refusal.value) and not list(tmp_path.iterdir())


def test_learning_stands_at_the_numbers(tables):
    learning = fig_learning.learning_table(tables["curves"], tables["success"])
    start = learning[(learning["arm"] == "sdar") & (learning["step"] == 0)].iloc[0]
    assert start["value"] == pytest.approx(0.63 - 0.1 + 0.01) and start["n_episodes"] == 3 * 64
    assert start["low"] < start["value"] < start["high"]
    assert set(learning["arm"]) == set(fig_learning.ARMS)
    signals = tables["signals"].rename(columns={"lowest": "low", "highest": "high"})
    gap = signals[(signals["metric"] == "gap/mean") & signals["arm"].isin(fig_learning.ARMS)]
    paper = fig_learning.published(list(LEVELS), fig_learning.ARMS)
    axes = fig_learning.draw(gap, learning, tables["success"], paper).axes
    a, b, c, gap_top, success_top = axes
    assert marks(a, "o") == [(row.step, row.value) for row in gap[gap["arm"] == "sdar"].itertuples()]
    assert [y for _, y in marks(b, "s")] == learning.loc[learning["arm"] == "grpo_opsd", "value"].tolist()
    assert [bar.get_height() for bar in c.patches] == list(LEVELS.values())
    assert pytest.approx(marks(c, "D", filled=False)[-1]) == (0.5 + 4.7, 0.844)
    # the paper's curve ends where ours ends: -0.14 at 150 of 150 steps, 8 of 8 of ours
    end = next(x for x, y in marks(gap_top, "o", filled=False) if y == -0.14)
    ours = a.transData.transform((8, 0))[0]
    assert gap_top.transData.transform((end, 0))[0] == pytest.approx(ours, abs=1)
    assert (150 * 2, 0.54) in marks(success_top, "o", filled=False)


def test_weights_have_the_published_range_beside_them(tables, tmp_path):
    data = fig_weights_dynamics.write(tmp_path, INPUTS, tables).data
    weight, paper = (pd.read_csv(data[name]) for name in ("weight", "paper"))
    assert set(weight["arm"]) == {"sdar", "pcsd"} and set(pd.read_csv(data["gap"])["arm"]) == {"sdar", "pcsd"}
    assert paper[["low", "high"]].iloc[0].tolist() == [0.2, 0.28]
    _, b = fig_weights_dynamics.draw(weight, weight, paper).axes
    assert [y for _, y in marks(b, "s", filled=False)] == [0.2, 0.28]
    assert b.get_ylim()[0] < 0.2


def test_unseen_bars_stand_in_the_order_of_arms_with_all_at_the_end(tables):
    paper = pd.DataFrame({"arm": ["pcsd"], "low": [0.867], "high": [0.867], "model": ["Qwen2.5-3B-Instruct"]})
    (axes,) = fig_unseen.draw(tables["unseen_types"], paper).axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[0] == "pick\n10 tasks" and labels[-1] == "all\n64 tasks"
    ((x, y),) = marks(axes, "D", filled=False)
    assert y == 0.867 and 6 < x < 6.5
    tops = {round(bar.get_x() + bar.get_width() / 2, 2): bar.get_height() for bar in axes.patches}
    assert tops[5.68] == pytest.approx(0.6 - 0.18)  # GRPO, the first of five arms, at `all`


def test_every_arm_has_a_look_of_its_own():
    assert looks(["sdar", "grpo"]) == {"sdar": ARMS["sdar"], "grpo": ARMS["grpo"]}
    others = looks(["beta_0", "beta_1", "sdar"])
    assert others["beta_0"][0] == "beta_0" and len({look[1:] for look in others.values()}) == 3
    assert len({look[1] for look in ARMS.values()}) == len({look[2] for look in ARMS.values()}) == len(ARMS)
