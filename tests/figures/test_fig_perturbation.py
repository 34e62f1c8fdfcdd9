"""The figures of weights: points and correlations stand at the numbers, what is undefined says why."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from figures.fig_agreement import NEEDS as AGREEMENT_NEEDS
from figures.fig_agreement import draw as draw_agreement
from figures.fig_agreement import write as write_agreement
from figures.fig_perturbation import NEEDS, draw, write

INPUTS = {"measurements/r": "0123abcd"}
METHODS = ("pcsd", "sdar", "sdar_normalised", "constant")
FLAT = "the mean weight does not change"


def correlations(reader: str, flat: tuple[str, ...], contexts: tuple[str, ...]) -> pd.DataFrame:
    rows = []
    for context in contexts:
        for place, method in enumerate(METHODS):
            value = np.nan if method in flat else 0.1 * place - 0.2
            bounds = {"spearman": value, "low": value - 0.1, "high": value + 0.1}
            note = FLAT if method in flat else ""
            size = {"n_units": 20, "n_undefined": 2, "note": f"{note}; 2 × no skill" if note else "2 × no skill"}
            rows.append({"reader": reader, "context": context, "method": method, **bounds, **size, "interval": ""})
    return pd.DataFrame(rows)


def made(reader: str = "tiny", contexts: tuple[str, ...] = ("none", "shuffled")) -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(0)
    units = pd.concat(
        pd.DataFrame(
            {
                "reader": reader,
                "context": context,
                "method": method,
                "trajectory": [f"t{k}" for k in range(20)],
                "weight_change": 0.0 if method in ("sdar_normalised", "constant") else rng.standard_normal(20),
                "action_weight_change": 0.0 if method == "constant" else rng.standard_normal(20),
                "quality_change": rng.standard_normal(20),
            }
        )
        for context in contexts
        for method in METHODS
    )
    return {
        "perturbation": correlations(reader, ("sdar_normalised", "constant"), contexts),
        "perturbation_actions": correlations(reader, ("constant",), contexts),
        "perturbation_units": units,
    }


def drawn(tables: dict[str, pd.DataFrame]):
    from figures.fig_perturbation import _paper

    names = [name for name in ("perturbation", "perturbation_actions") if name in tables]
    return draw(units=tables["perturbation_units"], paper=_paper(), **{name: tables[name] for name in names})


def marks(axes, marker: str, filled: bool) -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if line.get_marker() == marker]
    lines = [line for line in lines if (line.get_markerfacecolor() != "white") == filled]
    return [(float(x), float(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def test_points_are_the_changes_and_flat_weights_show_their_action_tokens() -> None:
    tables = made()
    a, _, c, *_ = drawn(tables).axes
    units = tables["perturbation_units"]
    for axes, method, column in ((a, "pcsd", "weight_change"), (c, "sdar_normalised", "action_weight_change")):
        mine = units[(units["method"] == method) & (units["context"] == "none")]
        points = marks(axes, "v", True)
        assert np.allclose(points, mine[["quality_change", column]].to_numpy())
    assert a.get_title("left") == "tiny: PCSD" and c.get_title("left") == "SDAR, normalised, action tokens"


def test_correlations_stand_in_the_rows_of_their_methods_beside_published_ones() -> None:
    *_, d, e = drawn(made()).axes
    assert [label.get_text() for label in d.get_yticklabels()] == ["no weights", "SDAR, normalised", "SDAR", "PCSD"]
    found = dict((round(y), x) for x, y in marks(d, "v", True) if not np.isnan(x))
    assert found == pytest.approx({3: -0.2, 2: -0.1})
    assert sorted(x for x, _ in marks(d, "v", False)) == [-0.489, 0.174]
    assert sorted(x for x, _ in marks(d, "^", False)) == [-0.208, 0.052]
    assert not marks(e, "v", False)  # nothing published is about action tokens alone
    said = {text.get_position()[1]: text.get_text() for text in d.texts if "undefined" in text.get_text()}
    assert said == {1: f"undefined: {FLAT}", 0: f"undefined: {FLAT}"}


def test_one_reader_one_context_one_table_are_enough() -> None:
    assert len(drawn(made()).axes) == 5
    one = made(contexts=("other_skill",))
    del one["perturbation_actions"]
    assert len(drawn(one).axes) == 4
    both = {name: pd.concat([table, made("larger")[name]]) for name, table in made().items()}
    assert len(drawn(both).axes) == 10


def test_the_same_tables_give_the_same_files_and_none_are_an_error(tmp_path) -> None:
    saved = write(tmp_path, INPUTS, made())
    record = json.loads(saved.record.read_text())
    assert record["script"] == "figures.fig_perturbation" and any("PCSD" in source for source in record["references"])
    assert set(saved.data) == {"units", "paper", "perturbation", "perturbation_actions"} and set(NEEDS) <= set(made())
    assert saved.png.read_bytes() == write(tmp_path / "again", INPUTS, made()).png.read_bytes()
    empty = {name: table.assign(context="floor") for name, table in made().items()}
    with pytest.raises(ValueError, match="needs a perturbed skill"):
        write(tmp_path, INPUTS, empty)


# Agreement with an expert


def areas(reader: str = "tiny") -> pd.DataFrame:
    rows = []
    for method, value in {"pcsd": 0.58, "sdar": 0.55, "constant": 0.5}.items():
        bounds = {"auroc": value, "low": value - 0.02, "high": value + 0.02}
        size = {"n_accepted": 900, "n_rejected": 100, "n_trajectories": 20, "n_undefined": 0, "n_not_finite": 0}
        rows.append({"reader": reader, "method": method, **bounds, **size, "note": "", "interval": ""})
    return pd.DataFrame(rows)


def test_areas_stand_at_the_numbers_a_panel_a_reader(tmp_path) -> None:
    (axes,) = draw_agreement(areas()).axes
    points = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    assert {float(line.get_ydata()[0]): float(line.get_xdata()[0]) for line in points} == {2: 0.58, 1: 0.55, 0: 0.5}
    assert len(draw_agreement(pd.concat([areas(f"r{k}") for k in range(4)])).axes) == 6  # three in a row
    saved = write_agreement(tmp_path, INPUTS, {"weight_auroc": areas()})
    again = write_agreement(tmp_path / "again", INPUTS, {"weight_auroc": areas()})
    assert saved.png.read_bytes() == again.png.read_bytes() and AGREEMENT_NEEDS == ("weight_auroc",)


def test_without_both_verdicts_there_is_no_figure(tmp_path) -> None:
    none = areas().assign(auroc=np.nan, note="tokens of one verdict only; 2 × no expert")
    with pytest.raises(ValueError, match="expert accepts .*one verdict only"):
        write_agreement(tmp_path, INPUTS, {"weight_auroc": none})
    with pytest.raises(ValueError, match="no reader has tokens"):
        write_agreement(tmp_path, INPUTS, {})
