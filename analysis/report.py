"""One self-contained HTML page a run: figures, tables, configuration, digests, and what must be said beside them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined

from analysis.frames import artifacts, metrics_frame
from analysis.plain import SHARES
from diagnostics.artifact import MANIFEST, load_artifact

TINY = (
    "The tiny policy was taught to read skills, so its change rates cannot test the papers' claim about pretrained "
    "models. Its skills are written from a record that keeps only what the task names."
)
SMOLLM = (
    "smollm2-135m is the pretrained reader: it re-reads episodes it did not play, under skills it did not write, cut "
    "at a token limit."
)
ONE_SEED = "One training seed: the intervals cover evaluation (tasks and evaluation seeds), not training."
PAPER = "Marks of the papers were measured on other models and environments, with thresholds that are not published."
_ROWS = 60  # of a table on the page; curves have hundreds and are drawn


@dataclass(frozen=True)
class Page:
    """What a report shows; `figures` are PNG files, `inputs` rows of (kind, path, digest)."""

    title: str
    warnings: Sequence[str] = ()
    figures: Sequence[Path] = ()
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[tuple[str, str, str]] = ()
    samples: Sequence[tuple[str, str]] = ()  # (where from, teacher's prompt)


def write_report(path: Path, page: Page) -> Path:
    """Write the page as one HTML file that needs no other file and no network. Returns the path."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = _cell
    html = environment.from_string(_TEMPLATE).render(
        page=page,
        images=[(figure.stem, base64.b64encode(figure.read_bytes()).decode()) for figure in page.figures],
        tables=[
            (name, list(frame.columns), frame.head(_ROWS).to_numpy(dtype=object), len(frame))
            for name, frame in page.tables.items()
        ],
        config=json.dumps(page.config, indent=1, ensure_ascii=False) if page.config else "",
    )
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(html, encoding="utf-8")
    os.replace(temporary, path)
    return path


def report_run(run: Path) -> Path:
    """report.html of a run or study folder, from what lies in it: tables, figures, config.json, metrics.jsonl.

    Raises: ValueError when the folder holds none of these.
    """
    tables = {
        f"{artifact.path.relative_to(run)}: {Path(name).stem}": artifact.table(Path(name).stem).to_pandas()
        for artifact in artifacts(run, "table")
        for name in artifact.names
        if name.endswith(".parquet")
    }
    if (run / "metrics.jsonl").is_file():
        metrics = metrics_frame(run)
        tables["training metrics"] = final_and_best(metrics)
        if len(skills := skill_hits(metrics)):
            tables["skills that reached the context"] = skills
    figures = sorted(path.with_suffix(".png") for path in (run / "figures").glob("*.json"))
    config = json.loads((run / "config.json").read_text()) if (run / "config.json").is_file() else {}
    if not (tables or figures or config):
        raise ValueError(f"nothing to report in {run}: no tables, figures, metrics.jsonl or config.json")
    manifests = [load_artifact(path.parent) for path in sorted(run.rglob(MANIFEST))]
    inputs = [(artifact.kind, str(artifact.path.relative_to(run)), artifact.digest) for artifact in manifests]
    notes = [name for name in tables if name.endswith(": notes")]  # what a study says about itself
    said = [note for name in notes for note in tables.pop(name)["note"]]
    warnings = [*said, *_warnings(tables), *_unfinished(run)]
    page = Page(run.resolve().name, warnings, figures, tables, config, inputs, _samples(run))
    return write_report(run / "report.html", page)


def final_and_best(metrics: pd.DataFrame) -> pd.DataFrame:
    """Last and highest value of every success and reward metric, apart: the best of a curve is no result (case B72)."""
    chosen = metrics[metrics["metric"].str.contains("success")].sort_values("step")
    rows = []
    for name, group in chosen.groupby("metric"):
        best = group.loc[group["value"].idxmax()]
        last = group.iloc[-1]
        steps = {"final_step": int(last["step"]), "best_step": int(best["step"])}
        rows.append({"metric": name, "final": last["value"], "best": best["value"], **steps})
    return pd.DataFrame(rows, columns=["metric", "final", "final_step", "best", "best_step"])


def skill_hits(metrics: pd.DataFrame) -> pd.DataFrame:
    """By task type, the share of tasks whose own section was part of their skill (case B35); and the share of skills
    that were over the budget and left out of distillation (case B32). Means over steps; empty without skills."""
    names = {"distill/over_budget": "all: over budget"}
    rows = [
        {"task_type": names.get(name, name.removeprefix("skills/hit/")), "share": group["value"].mean()}
        for name, group in metrics.groupby("metric")
        if name.startswith("skills/hit/") or name in names
    ]
    return pd.DataFrame(rows, columns=["task_type", "share"])


def _samples(run: Path) -> list[tuple[str, str]]:
    """Teacher contexts of the first and the last step that has some, decoded."""
    paths = sorted((run / "samples").glob("step_*.json"), key=lambda path: int(path.stem.partition("_")[2]))
    found = []
    for path in dict.fromkeys([*paths[:1], *paths[-1:]]):
        for sample in json.loads(path.read_text(encoding="utf-8")):
            found.append((f"{path.stem}, {sample['trajectory']}", sample["teacher_prompt"]))
    return found


def _warnings(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    readers = {reader for frame in tables.values() if "reader" in frame for reader in frame["reader"]}
    found = [text for reader, text in (("tiny", TINY), ("smollm2-135m", SMOLLM)) if reader in readers]
    if readers:
        found.append(PAPER)
    seeds_told = any("n_training_seeds" in frame for frame in tables.values())
    if not seeds_told and any({"arm", "step"} <= set(frame.columns) for frame in tables.values()):
        found.append(ONE_SEED)
    for name, frame in tables.items():
        errors = int(frame["n_errors"].max()) if "n_errors" in frame and len(frame) else 0
        if errors:
            found.append(f"{name}: up to {errors} episodes of a row ended in an error; they are in no denominator.")
    return found


def _unfinished(run: Path) -> list[str]:
    path = run / "study.json"
    stages = json.loads(path.read_text()) if path.is_file() else {}
    return [
        f"Stage {name} {record['state']}; its log is {record['log']}."
        for name, record in stages.items()
        if record["state"] not in ("done", "running")  # the stage that writes the report is running
    ]


def _cell(value: Any, column: str) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return "–"
    if column in SHARES and isinstance(value, int | float):
        return f"{100 * value:.1f} %"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { width: 100%; max-width: 62rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .7rem .15rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid #eee; }
th { color: #666; font-weight: 600; }
.wide { overflow-x: auto; max-height: 32rem; }
.warnings { background: #fff6e0; border-left: 4px solid #e69f00; padding: .5rem 1rem .5rem 2rem; }
pre, code { font: .8rem ui-monospace, monospace; }
</style>
</head>
<body>
<h1>{{ page.title }}</h1>
{% if page.warnings %}
<ul class="warnings">
{% for warning in page.warnings %}
<li>{{ warning }}</li>
{% endfor %}
</ul>
{% endif %}
{% for name, image in images %}
<h2>{{ name }}</h2>
<img alt="{{ name }}" src="data:image/png;base64,{{ image }}">
{% endfor %}
{% for name, columns, rows, length in tables %}
<h2>{{ name }}</h2>
{% if length > rows | length %}
<p>First {{ rows | length }} of {{ length }} rows; the artifact holds all.</p>
{% endif %}
<div class="wide">
<table>
<tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in rows %}
<tr>{% for value in row %}<td>{{ value | cell(columns[loop.index0]) }}</td>{% endfor %}</tr>
{% endfor %}
</table>
</div>
{% endfor %}
{% if page.samples %}
<h2>What the teacher read</h2>
{% for where, text in page.samples %}
<p>{{ where }}</p>
<pre>{{ text }}</pre>
{% endfor %}
{% endif %}
{% if config %}
<h2>Configuration</h2>
<pre>{{ config }}</pre>
{% endif %}
{% if page.inputs %}
<h2>Artifacts</h2>
<div class="wide">
<table>
<tr><th>kind</th><th>path</th><th>digest (sha256)</th></tr>
{% for kind, path, digest in page.inputs %}
<tr><td>{{ kind }}</td><td>{{ path }}</td><td><code>{{ digest }}</code></td></tr>
{% endfor %}
</table>
</div>
{% endif %}
</body>
</html>
"""
