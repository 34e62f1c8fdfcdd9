"""The gallery: every figure file is in it, draws what there are tables for, and says why it does not draw the rest."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import figures
from figures.gallery import FIGURES, draw_all

APART = {"fig_power"}  # drawn from two rates, not from tables


def test_every_figure_file_is_in_the_gallery_under_a_name_of_its_own():
    files = {path.stem for path in Path(figures.__path__[0]).glob("fig_*.py")}
    assert files - APART == set(FIGURES) and len(FIGURES) == len(set(FIGURES))
    modules = [import_module(f"figures.{name}") for name in FIGURES]
    assert len({module.NAME for module in modules}) == len(FIGURES) and all(module.NEEDS for module in modules)


def test_draws_what_there_are_tables_for(tmp_path, changes, thresholds):
    tables = {"changes": changes, "thresholds": thresholds}
    saved, missing = draw_all(tmp_path, {"a": "1"}, tables)
    assert "fig1_invisible_advantage" in {figure.name for figure in saved}
    assert missing["fig6_cka"] == "there is no table 'cka'"
    assert len(saved) + len(missing) == len(FIGURES)
    only, rest = draw_all(tmp_path / "one", {}, tables, "fig1")
    assert [figure.name for figure in only] == ["fig1_invisible_advantage"] and not rest
    assert draw_all(tmp_path / "none", {}, tables, "fig6")[1] == {"fig6_cka": "there is no table 'cka'"}


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"no figure 'fgi6_cka' \(nearest: 'fig6_cka'\)"):
        draw_all(tmp_path, {}, {}, "fgi6_cka")
