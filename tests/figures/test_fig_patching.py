"""The patching figure: what lies beside the picture, where its lines stand, and what it says where nothing is."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from figures.fig_patching import draw, write

INPUTS = {"measurements/r": "0123abcd"}
LAYERS = 6
RUNS = [(p, "single", s) for p in ("action", "all", "thought") for s in ("teacher", "random")]
RUNS += [("thought", "up_to", "teacher"), ("thought", "from", "teacher")]


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    size = {"n_segments": 24, "n_trajectories": 20, "n_undefined": 0, "note": ""}
    patching, lens = [], []
    for number, (positions, scope, source) in enumerate(RUNS):
        for layer in range(LAYERS):
            place = {"reader": "tiny", "context": "own_skill", "positions": positions, "scope": scope, "source": source}
            value = 0.01 * number + (layer / (LAYERS - 1) if source == "teacher" else 0.0)
            for quantity in ("recovered", "same_action", "logprob_change"):
                bounds = {"value": value, "low": value - 0.05, "high": value + 0.05}
                patching.append({**place, "layer": str(layer), "quantity": quantity, **bounds, **size})
    place = {"reader": "tiny", "context": "own_skill", "positions": "", "scope": "", "source": "student", "layer": ""}
    patching.append({**place, "quantity": "same_action", "value": 0.3, "low": 0.2, "high": 0.4, **size})
    for branch in ("student", "teacher"):
        for tokens in ("first", "all"):
            for layer in range(LAYERS):
                place = {"reader": "tiny", "context": "own_skill", "branch": branch, "tokens": tokens}
                rank = 1000.0 / (layer + 1) if branch == "student" else 2000.0 / (layer + 1) ** 2
                bounds = {"value": rank, "low": rank / 2, "high": rank * 2}
                for quantity in ("rank", "logprob"):
                    lens.append({**place, "layer": str(layer), "quantity": quantity, **bounds, **size})
    return {"patching": pd.DataFrame(patching), "logit_lens": pd.DataFrame(lens)}


def drawn_values(axes) -> list[list[float]]:
    return [
        np.asarray(line.get_ydata(), float).round(9).tolist() for line in axes.lines if len(line.get_xdata()) == LAYERS
    ]


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, tables):
    saved = write(tmp_path, INPUTS, tables)
    patching, lens = (pd.read_csv(saved.data[name]) for name in ("patching", "lens"))
    assert set(patching["quantity"]) == {"recovered", "same_action"} and set(lens["quantity"]) == {"rank"}
    record = json.loads(saved.record.read_text())
    assert record["inputs"] == INPUTS and "bootstrap over trajectories" in record["interval"]
    again = write(tmp_path / "again", INPUTS, tables)
    assert saved.png.read_bytes() == again.png.read_bytes() and saved.pdf.read_bytes() == again.pdf.read_bytes()


def test_every_run_is_a_line_in_its_panel(tables):
    a, b, c, d = draw(tables["patching"], tables["logit_lens"]).axes
    for axes, quantity, positions in ((a, "recovered", ("action", "all")), (b, "recovered", ("thought",))):
        mine = tables["patching"]
        mine = mine[(mine["quantity"] == quantity) & mine["positions"].isin(positions)]
        runs = mine.groupby(["positions", "scope", "source"], sort=False)["value"].agg(lambda v: v.round(9).tolist())
        assert sorted(drawn_values(axes)) == sorted(runs)
    assert len(drawn_values(a)) == 4 and len(drawn_values(b)) == 4 and len(drawn_values(c)) == 4
    assert [0.3, 0.3] in [list(line.get_ydata()) for line in c.lines]  # the student without a patch
    assert len(drawn_values(d)) == 4 and d.yaxis_inverted()
    assert [len(axes.collections) for axes in (a, b, c, d)] == [4, 4, 4, 4]  # every line has its interval


def test_a_share_that_is_undefined_is_said_not_drawn(tmp_path, tables):
    patching = tables["patching"]
    small = patching["quantity"] == "recovered"
    patching.loc[small, ["value", "low", "high"]] = np.nan
    patching.loc[small, "note"] = "gap below 0.1 nats"
    a, b, *_ = draw(patching, tables["logit_lens"]).axes
    for axes in (a, b):
        assert any("undefined" in text.get_text() and "0.1 nats" in text.get_text() for text in axes.texts)
    assert write(tmp_path, INPUTS, tables).png.stat().st_size > 1000


def test_readers_stand_in_rows(tables):
    both = {name: pd.concat([table, table.assign(reader="larger")]) for name, table in tables.items()}
    assert len(draw(both["patching"], both["logit_lens"]).axes) == 8
