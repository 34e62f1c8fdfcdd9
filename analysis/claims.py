"""The papers' claims, sentence by sentence, as predicates on our tables: claims.json and a table for the report.

A claim holds where the whole 95 % interval of its quantity lies inside its bounds, does not hold where it lies outside
of one, and otherwise cannot be told at this power. Every claim is read alone; `p_holm` corrects the paired tests of one
study for their number. A verdict is about our models, tasks and thresholds, never about the papers' own runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from analysis.claim_readings import READERS, Reading, Tables
from analysis.reference import DATA, PAPER_VALUES
from analysis.stats import holm

NAME = "claims"
HOLDS, FAILS, OPEN, MISSING = "holds", "does not hold", "cannot tell at this power", "not measured"
VERDICTS = (HOLDS, FAILS, OPEN, MISSING)
_SENTENCE = ["id", "paper", "place", "claim"]
_FOUND = ["study", "subject", "value", "low", "high", "above", "below", "verdict"]
COLUMNS = [*_SENTENCE, *_FOUND, "published_low", "published_high", "p", "p_holm", "remark"]


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper. It says that a quantity lies above `above` and below `below`."""

    id: str
    paper: str
    place: str
    claim: str  # in our own words
    read: str  # of claim_readings.READERS
    arguments: Mapping[str, Any] = field(default_factory=dict)
    above: float = -math.inf
    below: float = math.inf
    published: tuple[str, ...] = ()  # one quantity of analysis.reference, or two whose difference is meant
    note: str = ""


def paper_claims() -> tuple[Claim, ...]:
    """The claims of analysis/data/claims.yaml, in their order."""
    found = []
    for entry in yaml.safe_load((DATA / "claims.yaml").read_text(encoding="utf-8")):
        published = entry.pop("published", ())
        published = (published,) if isinstance(published, str) else tuple(published)
        arguments = entry.pop("with", {})
        found.append(Claim(**entry, arguments=arguments, published=published))
    return tuple(found)


def verdict(claim: Claim, value: float, low: float, high: float) -> str:
    """Whether the interval lies inside the claim's bounds; a value without an interval tells nothing."""
    if math.isnan(value):
        return MISSING
    if low >= claim.below or high <= claim.above:
        return FAILS
    inside = (low > claim.above or claim.above == -math.inf) and (high < claim.below or claim.below == math.inf)
    return HOLDS if inside and not math.isnan(low + high) else OPEN


def claim_table(studies: Mapping[str, Tables], claims: Sequence[Claim] | None = None) -> pd.DataFrame:
    """One row a claim, study and subject (a model that read, an arm); one row `not measured` where no study has it.

    Args: studies, name -> its tables by name. Columns: COLUMNS; published_low and published_high span the models that
    the paper reports.
    """
    rows: list[dict[str, Any]] = []
    for claim in paper_claims() if claims is None else claims:
        same = {name: getattr(claim, name) for name in (*_SENTENCE, "above", "below")}
        same |= dict(zip(("published_low", "published_high"), _published(claim), strict=True))
        found = [
            (study, reading)
            for study, tables in studies.items()
            for reading in READERS[claim.read](tables, **claim.arguments)
        ]
        for study, reading in found or [("", Reading("", math.nan, math.nan, math.nan))]:
            remark = "; ".join(text for text in (reading.remark, claim.note) if text)
            row = {**same, "study": study, "subject": reading.subject, "p": reading.p, "remark": remark}
            row |= {"value": reading.value, "low": reading.low, "high": reading.high}
            rows.append({**row, "verdict": verdict(claim, reading.value, reading.low, reading.high)})
    table = pd.DataFrame(rows)
    table["p_holm"] = table.groupby("study")["p"].transform(lambda p: holm(p.to_numpy()))
    return table[COLUMNS]


def count_table(claims: pd.DataFrame) -> pd.DataFrame:
    """How many claims of each paper came to each verdict; a claim with several subjects counts with each of them."""
    counts = claims.groupby(["paper", "verdict"], sort=False).size().unstack(fill_value=0)
    return counts.reindex(columns=list(VERDICTS), fill_value=0).reset_index()


def write_claims(path: Path, claims: pd.DataFrame, inputs: Mapping[str, str]) -> Path:
    """claims.json at `path`: the rows of claim_table, null for what is no number; `inputs` are digests by path."""
    rows = [{name: _plain(value) for name, value in row.items()} for row in claims.to_dict("records")]
    document = {"claims": rows, "verdicts": list(VERDICTS), "inputs": dict(inputs)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def _plain(value: Any) -> Any:
    """No bound (infinite) and no number (NaN) as None."""
    return (float(value) if math.isfinite(value) else None) if isinstance(value, float | np.floating) else value


def _published(claim: Claim) -> tuple[float, float]:
    """Lowest and highest published value over models, or difference of two quantities of one model; NaN: none."""
    values = [value for value in PAPER_VALUES if value.source.startswith(claim.paper)]
    if len(claim.published) == 2:
        one, other = ({v.model: v for v in values if v.quantity == name} for name in claim.published)
        ends = [(other[model].low - one[model].low,) * 2 for model in one.keys() & other.keys()]
    else:
        names = [name for name in claim.published if not name.endswith("/")]
        starts = tuple(name for name in claim.published if name.endswith("/"))
        chosen = [v for v in values if v.quantity in names or (starts and v.quantity.startswith(starts))]
        ends = [(v.low, v.high) for v in chosen]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (math.nan, math.nan)
