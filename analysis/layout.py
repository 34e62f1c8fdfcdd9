"""Table 1 in the papers' layout, as text to paste: Markdown, LaTeX, and the same numbers as CSV."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

HEADS = {"household": "ALFWorld", "search": "Search-QA", "webshop": "WebShop"}
OURS, METHOD, WEIGHTS = "ours", "method", "weights"
METHODS = {  # as the papers write them; others stand under their own names
    "vanilla": "Vanilla",
    "skill_prompt*": "SkillPrompt*",
    "opsd": "OPSD",
    "grpo": "GRPO",
    "skill_grpo": "Skill-GRPO",
    "skill_grpo*": "Skill-GRPO*",
    "grpo_opsd": "GRPO+OPSD",
    "skill_sd": "Skill-SD",
    "rlsd": "RLSD",
    "sdar": "SDAR",
    "pcsd": "PCSD",
    "pr_opd": "PR-OPD",
}
NOTES = (
    "Ours: in per cent with 95 % intervals, of the weights and environments that were run here. Published values (in "
    "italics) are of other models, tasks and budgets, from one evaluation each.",
    "Vanilla and SkillPrompt*: the policy before any training; all other methods go on from one Stage I of GRPO. *: "
    "with a library's skills in the prompt.",
)
_MARKDOWN = str.maketrans({"*": r"\*"})
_LATEX = str.maketrans({"_": r"\_"})


def write_layouts(folder: Path, table: pd.DataFrame) -> list[Path]:
    """table1_<paper>.md, .tex and .csv of every paper. Args: table, of table1.tabulate. Returns: the files."""
    made = []
    for paper, rows in table.groupby("paper", sort=False):
        parts = {HEADS[str(name)]: layout(part) for name, part in rows.groupby("environment", sort=False)}
        tasks = {HEADS[str(name)]: part["n_tasks"].max() for name, part in rows.groupby("environment", sort=False)}
        texts = {
            "md": markdown(str(paper), parts, tasks),
            "tex": latex(str(paper), parts, tasks),
            "csv": rows.to_csv(index=False, lineterminator="\n"),
        }
        for kind, text in texts.items():
            path = folder / f"table1_{str(paper).lower().replace('-', '_')}.{kind}"
            temporary = path.with_name(f"{path.name}.tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
            made.append(path)
    return made


def layout(rows: pd.DataFrame) -> pd.DataFrame:
    """One line of ours a method, `value [low, high]`, and below it one a published model; "" where there is no value.

    Args: rows of table1, of one paper and environment. Columns: method, weights (ours, or the model), then those of
    the main table, in per cent.
    """
    columns = list(dict.fromkeys(rows["column"]))
    lines: list[dict[str, str]] = []
    for name, group in rows.groupby("method", sort=False):
        method = METHODS.get(str(name), str(name))
        mine = group.dropna(subset="value").drop_duplicates("column").set_index("column")
        if len(mine):
            cells = {name: _cell(mine.loc[name]) for name in columns if name in mine.index}
            lines.append({METHOD: method, WEIGHTS: OURS, **cells})
        for model, published in group.dropna(subset="published").groupby("model", sort=False):
            printed = published.set_index("column")["published"]
            cells = {name: f"{100 * value:.1f}" for name, value in printed.items()}
            lines.append({METHOD: method, WEIGHTS: str(model) or "not named", **cells})
    return pd.DataFrame(lines, columns=[METHOD, WEIGHTS, *columns]).fillna("")


def markdown(paper: str, parts: Mapping[str, pd.DataFrame], tasks: Mapping[str, float]) -> str:
    """One table an environment, published values in italics. Args: parts, layouts by heading; tasks of the panel."""
    lines = [f"# Table 1 of {paper}", "", *(line for note in NOTES for line in (note.translate(_MARKDOWN), ""))]
    for head, table in parts.items():
        rows = [list(table.columns), ["---"] * table.shape[1], *_cells(table, "*{}*", _MARKDOWN)]
        lines += [f"## {head}{_panel(tasks[head])}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]
    return "\n".join(lines)


def latex(paper: str, parts: Mapping[str, pd.DataFrame], tasks: Mapping[str, float]) -> str:
    """The same as one tabular (booktabs) an environment."""
    lines = [f"% Table 1 of {paper}", *(f"% {note}" for note in NOTES)]
    for head, table in parts.items():
        first, *rows = [[name.translate(_LATEX) for name in table.columns], *_cells(table, r"\textit{{{}}}", _LATEX)]
        lines += [
            f"% {head}{_panel(tasks[head])}",
            rf"\begin{{tabular}}{{ll{'c' * (table.shape[1] - 2)}}}",
            r"\toprule",
        ]
        lines += [rf"{' & '.join(first)} \\", r"\midrule", *(rf"{' & '.join(row)} \\" for row in rows)]
        lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def _cells(table: pd.DataFrame, italics: str, escaped: Mapping[int, str]) -> Iterator[list[str]]:
    """The cells of each line; a method is named once."""
    before = ""
    for line in table.to_dict("records"):
        method, weights, *values = (str(cell).translate(escaped) for cell in line.values())
        if line[WEIGHTS] != OURS:
            weights, *values = (cell and italics.format(cell) for cell in (weights, *values))
        yield ["" if method == before else method, weights, *values]
        before = method


def _cell(row: pd.Series) -> str:
    interval = f" [{100 * row['low']:.1f}, {100 * row['high']:.1f}]" if row["low"] == row["low"] else ""
    return f"{100 * row['value']:.1f}{interval}"


def _panel(tasks: float) -> str:
    return f", {tasks:.0f} tasks" if tasks == tasks else ""
