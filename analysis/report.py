"""One self-contained HTML page a run or study: what was found, what it rests on, and what must be said beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from analysis.card import reproduction_card
from analysis.claims import COLUMNS, NAME
from analysis.findings import findings
from analysis.frames import artifacts, metrics_frame
from analysis.page import Page, write_report
from analysis.token_page import TABLES, token_views
from diagnostics.artifact import MANIFEST, load_artifact

TINY = (
    "The tiny policy was taught to read skills, so its change rates cannot test the papers' claim about pretrained "
    "models. Its skills are written from a record that keeps only what the task names."
)
SMOLLM = "smollm2-135m is a pretrained reader: it reads episodes it did not play, under skills it did not write."
ONE_SEED = "One training seed: the intervals cover evaluation (tasks and evaluation seeds), not training."
PAPER = "Marks of the papers were measured on other models and environments, with thresholds that are not published."
_NUMBERS = (
    "value",
    "low",
    "high",
    "published_low",
    "published_high",
)  # of a claim; null in the file where there is none


def report_run(run: Path) -> Path:
    """report.html of a run or study folder, from what lies in it: tables, figures, claims.json, tokens, settings.

    Raises: ValueError when the folder holds none of these, or a broken claims.json.
    """
    tables = {
        f"{artifact.path.relative_to(run)}: {Path(name).stem}": artifact.table(Path(name).stem).to_pandas()
        for artifact in artifacts(run, "table")
        for name in artifact.names
        if name.endswith(".parquet") and Path(name).stem not in TABLES
    }
    training = _training(run)
    figures = sorted(path.with_suffix(".png") for path in (run / "figures").glob("*.json"))
    config = json.loads((run / "config.json").read_text()) if (run / "config.json").is_file() else {}
    claims = _claims(run / f"{NAME}.json")
    tokens, left_out = token_views(run)
    if not (tables or figures or config or training or tokens or claims is not None):
        raise ValueError(f"nothing to report in {run}: no tables, figures, metrics.jsonl or config.json")
    manifests = [load_artifact(path.parent) for path in sorted(run.rglob(MANIFEST))]
    notes = [name for name in tables if name.endswith(": notes")]  # what a study says about itself
    said = [note for name in notes for note in tables.pop(name)["note"]]
    said += [f"{m.path.name}: {remark}" for m in manifests for remark in m.manifest.get("remarks", ())]
    page = Page(
        title=run.resolve().name,
        found=findings({name.rpartition(": ")[2]: frame for name, frame in tables.items()}, claims),
        warnings=[*dict.fromkeys(said), *_warnings(tables), *_unfinished(run)],
        claims=claims,
        figures=figures,
        tokens=tokens,
        left_out=left_out,
        training=training,
        tables=tables,
        samples=_samples(run),
        card=reproduction_card(run, manifests),
        config=config,
        inputs=[(artifact.kind, str(artifact.path.relative_to(run)), artifact.digest) for artifact in manifests],
    )
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


def _training(run: Path) -> dict[str, pd.DataFrame]:
    if not (run / "metrics.jsonl").is_file():
        return {}
    metrics = metrics_frame(run)
    tables = {"training metrics": final_and_best(metrics), "skills that reached the context": skill_hits(metrics)}
    return {name: table for name, table in tables.items() if len(table)}


def _claims(path: Path) -> pd.DataFrame | None:
    """The claims that analysis.claims.write_claims left; None where there are none."""
    if not path.is_file():
        return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["claims"]
        claims = pd.DataFrame(rows)[COLUMNS] if rows else None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no claims ({error}); remove it and run `undertow figures` again") from None
    return claims if claims is None else claims.astype(dict.fromkeys(_NUMBERS, float))


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
