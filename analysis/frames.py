"""From files to data frames: metrics logs, episodes, measurements."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from diagnostics.artifact import MANIFEST, Artifact, load_artifact

_INDEX = ("step", "attempt")


def metrics_frame(run: Path) -> pd.DataFrame:
    """metrics.jsonl in long form: columns step, attempt, metric, value; numbers only.

    Only the last attempt counts: where a resumed run logged from step s on, earlier attempts' rows from s on belong to
    a branch that was given up, and are dropped (case B71).
    Raises: ValueError for a missing file or a broken line (a last line cut by a crash is passed over).
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"no metrics.jsonl in {run}; give the folder of a training run")
    rows = _json_lines(path)
    starts: dict[int, int] = {}
    for row in rows:
        attempt, step = int(row.get("attempt", 0)), int(row["step"])
        starts[attempt] = min(step, starts.get(attempt, step))
    kept = [
        row
        for row in rows
        if all(int(row["step"]) < start for a, start in starts.items() if a > int(row.get("attempt", 0)))
    ]
    long = [
        {"step": int(row["step"]), "attempt": int(row.get("attempt", 0)), "metric": name, "value": float(value)}
        for row in kept
        for name, value in row.items()
        if name not in _INDEX and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return pd.DataFrame(long, columns=["step", "attempt", "metric", "value"])


def artifacts(run: Path, kind: str) -> list[Artifact]:
    """The complete artifacts of one kind under a run folder, sorted by path; every file is checked."""
    folders = sorted(path.parent for path in run.rglob(MANIFEST))
    return [load_artifact(folder) for folder in folders if json.loads((folder / MANIFEST).read_text())["kind"] == kind]


def episode_frame(artifact: Artifact, **labels: str) -> pd.DataFrame:
    """One row an episode of a trajectories artifact; `labels` become columns (e.g. arm="grpo").

    Columns: trajectory, task, type, env, split, step, seed, attempt, success, reward, n_turns, n_invalid, stop_reason,
    error (None or the reason), with_skill, score (NaN where the environment tells success alone).
    Episodes with an error never count as a loss: see `played`.
    """
    table = artifact.table("trajectories").combine_chunks()
    names = {"id": "trajectory", "task_id": "task", "task_type": "type"}
    same = ("env", "split", "step", "seed", "attempt", "success", "reward", "stop_reason", "error")
    frame = table.select([*names, *same]).to_pandas().rename(columns=names)
    turns = table.column("turns").combine_chunks()
    invalid = np.asarray(pc.invert(pc.struct_field(pc.list_flatten(turns), "valid")), dtype=bool)
    owner = np.asarray(pc.list_parent_indices(turns))
    frame["n_turns"] = np.bincount(owner, minlength=len(frame))
    frame["n_invalid"] = np.bincount(owner[invalid], minlength=len(frame))
    frame["error"] = frame["error"].astype(object).where(frame["error"].notna(), None)
    frame["with_skill"] = np.asarray(pc.is_valid(table.column("skill")))
    graded = "score" in table.column_names  # not in episodes of before there was one
    frame["score"] = table.column("score").to_numpy(zero_copy_only=False).astype(float) if graded else np.nan
    return frame.assign(**labels)


def played(episodes: pd.DataFrame) -> pd.DataFrame:
    """The episodes that ran to their end; those with an error are left out of every denominator."""
    return episodes[episodes["error"].isna()]


def _json_lines(path: Path) -> list[dict]:
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline behind it: the writer was stopped in the middle
                break
            raise ValueError(f"line {number} of {path} is not JSON ({error.msg}); remove the line") from None
    return rows
