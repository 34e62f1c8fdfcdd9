"""All that is made public of a folder of results: its figures, the papers' claims, and the report."""

from __future__ import annotations

from pathlib import Path

from analysis.plain import print_table
from analysis.report import report_run
from analysis.results import claims_of, results
from figures.figure import SavedFigure
from figures.gallery import draw_all


def publish(folder: Path, printed: bool = False, failed: bool = False) -> None:
    """Make the tables of a run or a study anew, and from them figures, claims.json and report.html.

    Args: printed, print the tables that matter; failed, the study has a stage that failed, which has been said: it
    need not have results.
    Raises: ValueError when there are no results.
    """
    try:
        found = results(folder)
    except ValueError:
        if failed:
            return
        raise
    for each in found:
        for title, table in each.summary.items() if printed else ():
            print_table(table, title)
        saved, _ = draw_all(each.folder / "figures", each.inputs, each.tables)
        print("".join(f"figure: {figure.png}\n" for figure in saved), end="")
    for each in found:
        print(f"claims: {claims_of(each, found)}\nreport: {report_run(each.folder)}")


def redraw(folder: Path, only: str) -> None:
    """Draw the figures whose names begin with `only`, from the tables that were stored before.

    Raises: ValueError when there is no such figure, or no table for it.
    """
    drawn: list[SavedFigure] = []
    missing: dict[str, str] = {}
    for each in results(folder, stored=True):
        saved, left = draw_all(each.folder / "figures", each.inputs, each.tables, only)
        drawn, missing = [*drawn, *saved], missing | left
    if not drawn:
        raise ValueError("; ".join(f"{folder}: {name} cannot be drawn, {reason}" for name, reason in missing.items()))
    print("\n".join(f"figure: {figure.png}" for figure in drawn))
