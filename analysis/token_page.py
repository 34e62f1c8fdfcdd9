"""The token view of a report: what each response token was worth under each skill context, as one small document.

Tables `tokens` and `token_contexts` of the measurements artifacts (see diagnostics/tokens.py) become nested lists with
four significant digits, which pages/tokens.js shows. A scale is shared by all contexts and episodes of a reader, so
that colours can be compared across them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.frames import artifacts
from diagnostics.artifact import Artifact

TABLES = ("tokens", "token_contexts")
MOST = 6  # readers on one page: each takes about a megabyte
SCALED = 0.98  # share of the tokens that lie inside a colour scale; the rest gets its end
LEAST = {"gap": 0.1, "hidden": 1e-4}  # no scale ends below: rounding of equal readings must not look like a change
_WEIGHT = "weight/"
_KEY = ["segment", "place"]  # place: of a token in its segment, the same in every context that read it
View = dict[str, Any]


def token_views(run: Path) -> tuple[list[View], list[str]]:
    """The views of the measurements under a run or a study, one a reader, and the names of those beyond MOST."""
    found = [artifact for artifact in artifacts(run, "measurements") if _has_tokens(artifact)]
    names = _names([artifact.path.relative_to(run) for artifact in found])
    views = [
        token_view(artifact.table("tokens").to_pandas(), artifact.table("token_contexts").to_pandas(), name)
        for artifact, name in zip(found[:MOST], names, strict=False)
    ]
    return [view for view in views if view["episodes"]], names[MOST:]


def token_view(tokens: pd.DataFrame, contexts: pd.DataFrame, name: str) -> View:
    """One reader's tokens, ready for JSON.

    Args: tokens, a row a response token, context and trajectory; contexts, a row a trajectory and context.
    Returns: reader; layers; methods; scales with gap and weight (low, high; symmetric about 0 where any value is
    negative) and hidden (high of each layer, low is 0); episodes, each with its tokens and, by context, the values in
    the order of the tokens. A token that was not read under a context has null there.
    """
    methods = [column.removeprefix(_WEIGHT) for column in tokens if str(column).startswith(_WEIGHT)]
    states = (
        [] if tokens.empty else [np.asarray(row) for row in tokens["hidden_change"] if row is not None and len(row)]
    )
    hidden = np.stack(states) if states else np.empty((0, 0))
    said = {(row.trajectory, row.context): row for row in contexts.itertuples()}
    return {
        "reader": name,
        "layers": hidden.shape[1],
        "methods": methods,
        "scales": {
            "gap": _diverging(tokens["gap"], LEAST["gap"]),
            "hidden": [_short(max(_high(column), LEAST["hidden"])) for column in hidden.T],
            "weight": [_scale(tokens[_WEIGHT + method]) for method in methods],
        },
        "episodes": [
            _episode(str(trajectory), rows, said, methods)
            for trajectory, rows in tokens.groupby("trajectory", sort=False)
        ],
    }


def script_json(document: Any) -> str:
    """JSON that may stand inside a <script> element, whatever its texts say."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _episode(
    trajectory: str, rows: pd.DataFrame, said: Mapping[tuple[str, str], Any], methods: Sequence[str]
) -> dict[str, Any]:
    rows = rows.sort_values("index")
    rows = rows.assign(place=rows.groupby(["context", "segment"]).cumcount())
    first = rows.drop_duplicates(_KEY).sort_values(_KEY)
    order = pd.MultiIndex.from_frame(first[_KEY])
    contexts = []
    for context, own in rows.groupby("context", sort=False):
        read = own.set_index(_KEY).reindex(order)
        row = said.get((trajectory, str(context)))
        contexts.append(
            {
                "name": str(context),
                "skill": "" if row is None else str(row.text),
                "student": _numbers(read["student_logprob"]),
                "teacher": _numbers(read["teacher_logprob"]),
                "gap": _numbers(read["gap"]),
                "hidden": [_numbers(state) if isinstance(state, Iterable) else [] for state in read["hidden_change"]],
                "weight": [_numbers(read[_WEIGHT + method]) for method in methods],
            }
        )
    told = next((row for (name, _), row in said.items() if name == trajectory), None)
    return {
        "trajectory": trajectory,
        "task": str(first["task"].iloc[0]),
        "description": "" if told is None else str(told.description),
        "success": None if told is None else bool(told.success),
        "text": [str(text) for text in first["text"]],
        "class": [str(name) for name in first["token_class"]],
        "turn": [int(turn) for turn in first["turn"]],
        "segment": [int(segment) for segment in first["segment"]],
        "contexts": contexts,
    }


def _has_tokens(artifact: Artifact) -> bool:
    return all(f"{name}.parquet" in artifact.names for name in TABLES)


def _names(paths: Sequence[Path]) -> list[str]:
    """The reader's name, which is the folder's; with the run in front where two runs have one of that name."""
    last = [path.name for path in paths]
    return [
        path.name if last.count(path.name) == 1 else f"{path.parent.parent.as_posix()}: {path.name}" for path in paths
    ]


def _scale(values: pd.Series) -> list[float]:
    return _diverging(values) if (values < 0).any() else [0.0, _short(_high(values) or 1.0)]


def _diverging(values: pd.Series, least: float = 0.0) -> list[float]:
    end = _short(max(_high(values.abs()), least) or 1.0)
    return [-end, end]


def _high(values: Any) -> float:
    """The end of a scale that starts at 0; 0.0 without any number above 0."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    return max(float(np.quantile(finite, SCALED)), 0.0) if len(finite) else 0.0


def _numbers(values: Iterable[Any]) -> list[float | None]:
    return [_short(float(value)) if value is not None and math.isfinite(value) else None for value in values]


def _short(value: float) -> float:
    return float(f"{value:.4g}")
