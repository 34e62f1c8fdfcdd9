"""The audit figure: where its points stand, and the channels whose cosine is undefined."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from figures.fig_audit import LABELS, draw, write

INPUTS = {"measurements/r": "0123abcd"}
CHANNELS = {"reverse_kl": 1.0, "unit_weight": np.nan, "sdar": 0.4, "hidden_alignment": -0.1}
ZERO = "expected gradient is zero"


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    rows = []
    for channel, cosine in CHANNELS.items():
        place = {"reader": "tiny", "context": "own_skill", "channel": channel, "space": "logits", "token_class": "all"}
        note = ZERO if np.isnan(cosine) else ""
        undefined = 24 if note else 0
        size = {"n_segments": 24 - undefined, "n_trajectories": 20, "n_undefined": undefined, "note": note}
        noise = {"reverse_kl": 0.0, "hidden_alignment": 0.0, "sdar": 50.0}.get(channel, np.nan)
        values = {"cosine_parameters": cosine, "cosine_logits": cosine / 2, "noise": noise, "effective_tokens": 0.5}
        if channel == "hidden_alignment":
            values["cosine_logits"] = np.nan
        for quantity, value in values.items():
            bounds = {"value": value, "low": value * 0.9, "high": value * 1.1}
            rows.append({**place, "quantity": quantity, **bounds, **size})
        for token_class, share in (("think", 0.5), ("action", 0.3), ("format", 0.2)):
            bounds = {"value": share, "low": share - 0.1, "high": share + 0.1}
            for quantity in ("norm_share", "expected_share"):
                rows.append({**place, **size, "token_class": token_class, "quantity": quantity, **bounds})
    return {"audit": pd.DataFrame(rows)}


def points(axes, marker: str) -> dict[float, float]:
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return {
        round(float(y), 3): float(x) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }


def test_what_lies_beside_the_figure_is_what_is_drawn(tmp_path, tables):
    saved = write(tmp_path, INPUTS, tables)
    drawn = pd.read_csv(saved.data["audit"])
    assert set(drawn["quantity"]) == {"cosine_parameters", "cosine_logits", "noise", "norm_share", "effective_tokens"}
    record = json.loads(saved.record.read_text())
    assert record["inputs"] == INPUTS and record["script"] == "figures.fig_audit"
    assert saved.png.read_bytes() == write(tmp_path / "again", INPUTS, tables).png.read_bytes()


def test_points_stand_at_the_numbers(tables):
    a, b, c, d = draw(tables["audit"]).axes
    assert [label.get_text() for label in a.get_yticklabels()] == [
        LABELS.get(name, name) for name in reversed(CHANNELS)
    ]
    assert points(a, "o") == pytest.approx({3.14: 1.0, 1.14: 0.4, 0.14: -0.1})  # the first channel on top
    assert points(a, "s") == pytest.approx({2.86: 0.5, 0.86: 0.2})
    assert points(b, "^") == pytest.approx({y + 0.22: 0.5 for y in range(4)})
    assert points(c, "o") == {1: 50.0} and c.get_xscale() == "log"
    assert points(d, "o") == {y: 0.5 for y in range(4)}
    assert sorted(text.get_position()[1] for text in c.texts if text.get_text() == "no sampling") == [0, 3]


def test_an_undefined_cosine_says_why(tables):
    a = draw(tables["audit"]).axes[0]
    (said,) = [text for text in a.texts if "undefined" in text.get_text()]
    assert said.get_text() == f"undefined: {ZERO}" and said.get_position()[1] == 2


def test_readers_stand_in_rows(tables):
    assert len(draw(pd.concat([tables["audit"], tables["audit"].assign(reader="larger")])).axes) == 8
