"""Threshold curves: every channel its panel, every context its line with its interval, and the null."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from figures.fig_thresholds import NULL, draw, write

INPUTS = {"measurements/tiny": "0123abcd"}


def test_every_channel_is_a_panel_and_every_context_a_line(tmp_path, thresholds, changes):
    extra = thresholds[thresholds["channel"] == "output_change"].assign(channel="output_jsd")
    table = pd.concat([thresholds, extra, thresholds.assign(token_class="think"), thresholds.assign(channel="odd")])
    saved = write(tmp_path, INPUTS, {"thresholds": table, "changes": changes})
    drawn, nulls = (pd.read_csv(saved.data[name]) for name in ("thresholds", "nulls"))
    assert set(drawn["channel"]) == {"output_change", "output_jsd", "hidden_change"}
    assert set(drawn["token_class"]) == {"all"} and len(drawn) == 2 * 3 * 3 * 200
    figure = draw(drawn, nulls)
    assert len(figure.axes) == 6
    channels = ("output_change", "output_jsd", "hidden_change")
    panels = [(reader, channel) for reader in ("tiny", "smollm2-135m") for channel in channels]
    for axes, (reader, channel) in zip(figure.axes, panels, strict=True):
        mine = drawn[(drawn["reader"] == reader) & (drawn["channel"] == channel)]
        lines = [line.get_ydata() for line in axes.lines if len(line.get_xdata()) == 200]
        wanted = [part["share"].to_numpy() for _, part in mine.groupby("context", sort=False)]
        assert sorted(line[0] + line[100] for line in lines) == pytest.approx(sorted(w[0] + w[100] for w in wanted))
        assert len(axes.collections) == 3
        limits = changes[(changes["reader"] == reader) & (changes["channel"] == channel)]["threshold"].unique()
        dotted = [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2]
        assert dotted == pytest.approx(list(limits))
    assert "99 %" in "".join(text.get_text() for text in figure.legends[0].get_texts()) and NULL == "unrelated"


def test_one_channel_without_nulls_and_nothing_known(tmp_path, thresholds):
    alone = thresholds[(thresholds["channel"] == "hidden_change") & (thresholds["context"] == "own_skill")]
    assert write(tmp_path, INPUTS, {"thresholds": alone}).png.stat().st_size > 1000
    flat = alone.assign(share=0.0, low=np.nan, high=np.nan)
    assert write(tmp_path / "flat", INPUTS, {"thresholds": flat}).png.stat().st_size > 1000
    with pytest.raises(ValueError, match="no threshold curve"):
        write(tmp_path / "none", INPUTS, {"thresholds": alone.assign(channel="odd")})
