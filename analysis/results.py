"""What lies in a folder of results, as tables: of a run, of a study, or of several studies one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import ablation_tables, invisible_advantage, table1
from analysis.arms import PLAN
from analysis.claims import NAME as CLAIMS
from analysis.claims import claim_table, write_claims
from analysis.reproduction import PAPERS, finished, tabulate
from analysis.tables import load_tables
from diagnostics.artifact import MANIFEST, Artifact

Made = tuple[dict[str, pd.DataFrame], list[Artifact]]


@dataclass(frozen=True)
class Results:
    """The tables of one folder, and what they were made from."""

    folder: Path
    tables: Mapping[str, pd.DataFrame]
    inputs: Mapping[str, str]  # artifact, by its path from the folder -> digest
    summary: Mapping[str, pd.DataFrame]  # what is printed, by title


def results(folder: Path, stored: bool = False) -> list[Results]:
    """The results of a folder: one entry, or of a paper, or of Table 1, one for each finished study and a last one for
    the whole.

    Args: stored, take the tables that were saved before, where there are any, instead of making them anew.
    Raises: ValueError when the folder holds none.
    """
    paper = next((name for name, paper in PAPERS.items() if (folder / paper.studies[0] / PLAN).is_file()), None)
    if paper is not None:
        return _paper(folder, paper, stored)
    if any((folder / name / PLAN).is_file() for name in table1.WORLDS):
        return _table1(folder, stored)
    module = ablation_tables if (folder / PLAN).is_file() else invisible_advantage
    tables, inputs = _tables(folder, module.NAME, lambda: module.tabulate(folder), stored)
    return [Results(folder, tables, inputs, module.summary(tables))]


def claims_of(result: Results, found: Sequence[Results]) -> Path:
    """Write claims.json of a folder: the papers' claims, read from its own tables, or from all for the whole."""
    chosen = found if result is found[-1] else [result]
    tables = {each.folder.resolve().name: each.tables for each in chosen}
    inputs = {
        _from(result.folder, each.folder / path): digest for each in chosen for path, digest in each.inputs.items()
    }
    return write_claims(result.folder / f"{CLAIMS}.json", claim_table(tables), inputs)


def _paper(folder: Path, paper: str, stored: bool) -> list[Results]:
    """Its studies, and the whole: the main comparison beside what was measured of the paper's arm."""
    parts = _parts(folder, PAPERS[paper].studies, finished(folder, paper), stored)
    main = parts[0]
    tables, inputs = _tables(folder, paper, lambda: tabulate(folder, paper), stored)
    moved = {_from(folder, main.folder / path): digest for path, digest in main.inputs.items()}
    again = main.summary if len(parts) > 1 else {}  # of several studies the first is said last
    return [*parts, Results(folder, {**main.tables, **tables}, {**moved, **inputs}, again)]


def _table1(folder: Path, stored: bool) -> list[Results]:
    """Its environments, and the whole: what the papers print beside what ran."""
    ready = [folder / name for name in table1.environments(folder)]
    parts = _parts(folder, table1.WORLDS, ready, stored)
    ablations = {part.folder.name: part.tables for part in parts}
    tables, inputs = _tables(folder, table1.NAME, lambda: table1.tabulate(folder, ablations), stored)
    return [*parts, Results(folder, tables, inputs, table1.summary(tables))]


def _parts(folder: Path, studies: Iterable[str], ready: Collection[Path], stored: bool) -> list[Results]:
    """The studies of a folder that have results, or tables that were stored before. Raises ValueError for none."""
    kept = [path.parents[2] for path in folder.glob(f"*/tables/{ablation_tables.NAME}/{MANIFEST}")] if stored else []
    folders = [folder / name for name in studies if folder / name in {*ready, *kept}]
    if not folders:
        raise ValueError(f"no study of {folder} has results yet; the folder logs/ in it says how far it came")
    return [result for path in folders for result in results(path, stored)]


def _tables(
    folder: Path, name: str, make: Callable[[], Made], stored: bool
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """The tables of <folder>/tables/<name> as they are stored, or made anew; and the digests of their inputs."""
    saved = folder / "tables" / name
    if stored and (saved / MANIFEST).is_file():
        tables, digests = load_tables(saved)
    else:
        tables, made = make()
        digests = {str(artifact.path): artifact.digest for artifact in made}
    return tables, {_from(folder, Path(path)): digest for path, digest in digests.items()}


def _from(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()
