"""All tables of what was measured: one entry a table, made from what the measures stored, reader by reader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pandas as pd

from analysis.causal_tables import audit_table, lens_table, patching_table
from analysis.cka_tables import cka_table, contrast_table
from analysis.gap_tables import gap_table, histogram_table
from analysis.layer_tables import layer_change_table
from analysis.perturbation_tables import action_perturbation_table, auroc_table, perturbation_table, perturbation_units
from analysis.probe_tables import probe_table
from analysis.tables import change_table, threshold_table
from diagnostics.artifact import Artifact, load_artifact

Made = Callable[..., pd.DataFrame]


def _first(frame: pd.DataFrame, *_: pd.DataFrame) -> pd.DataFrame:
    return frame


# Table -> the stored tables that it is made of (an artifact that lacks one has not measured it), and how.
TABLES: dict[str, tuple[tuple[str, ...], Made]] = {
    "changes": (("measurements", "thresholds"), lambda rows, _: change_table(rows)),
    "thresholds": (("thresholds",), threshold_table),
    "layer_changes": (("measurements", "thresholds"), lambda rows, _: layer_change_table(rows)),
    "probes": (("probe", "probe_trajectories"), probe_table),
    "probe_classes": (("probe_classes",), _first),
    "cka": (("measurements", "cka_blocks"), cka_table),
    "cka_contrasts": (("measurements", "cka_blocks"), contrast_table),
    "cka_map": (("cka_map",), _first),
    "patching": (("patching",), patching_table),
    "logit_lens": (("logit_lens",), lens_table),
    "audit": (("audit",), audit_table),
    "perturbation": (("perturbation",), perturbation_table),
    "perturbation_actions": (("perturbation",), action_perturbation_table),
    "perturbation_units": (("perturbation",), perturbation_units),
    "weight_auroc": (("agreement",), auroc_table),
    "gaps": (("gaps",), gap_table),
    "gap_histogram": (("gap_histogram",), histogram_table),
    "tokens": (("tokens",), _first),
    "token_contexts": (("token_contexts",), _first),
}


def measured_tables(
    readers: Mapping[str, Path], names: Collection[str] = TABLES
) -> tuple[dict[str, pd.DataFrame], list[Artifact]]:
    """Every table that can be made of measurements artifacts, and the artifacts.

    Args: readers, name of the model that read -> its artifact; one that is not there yet is passed over; names, of
    TABLES, those that are made.
    Returns: the tables that are not empty, by name; `reader` says whose row it is.
    """
    found = {name: load_artifact(path, "measurements") for name, path in readers.items() if path.exists()}
    tables = {}
    for table, (stored, made) in ((name, TABLES[name]) for name in names):
        parts = []
        for reader, artifact in found.items():
            if {f"{name}.parquet" for name in stored} <= set(artifact.names):
                frames = [artifact.table(name).to_pandas().assign(reader=reader) for name in stored]
                parts += [made(*frames)] if all(map(len, frames)) else []
        parts = [part for part in parts if len(part)]
        if parts:
            tables[table] = pd.concat(parts, ignore_index=True)
    return tables, list(found.values())
