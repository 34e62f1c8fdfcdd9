"""Episodes and skills that were made elsewhere, kept as artifacts of the run they are read for.

    <run>/trajectories/imported_<name>      <run>/skills/imported_<name>

The manifest's `remarks` say what was assumed; that of episodes also names the tokenizer their ids are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diagnostics.artifact import MANIFEST, Artifact, save_skills, save_trajectories
from diagnostics.importers import import_skills, import_trajectories
from diagnostics.records import Trajectory
from diagnostics.run import tokenizer_digest


def is_foreign(word: str) -> bool:
    """Whether a path names something to import, and not an artifact: a file, or a folder of JSONL without manifest."""
    path = Path(word)
    return path.suffix == ".jsonl" or path.is_file() or (not (path / MANIFEST).exists() and any(path.glob("*.jsonl")))


def is_imported(trajectories: Artifact) -> bool:
    """Whether the episodes of an artifact were imported: no policy of ours played them."""
    return "rendered" in trajectories.manifest


def imported_episodes(word: str, tokenizer: object, run: Path) -> Artifact:
    """The episodes of a JSONL file or folder as a trajectories artifact, with ids of this tokenizer."""
    found = import_trajectories(word, tokenizer)
    extra = {"tokenizer": tokenizer_digest(tokenizer), "rendered": found.rendered, "remarks": found.remarks}
    return save_trajectories(run / "trajectories" / _name(word), found.trajectories, extra=extra)


def imported_skills(word: str, trajectories: Sequence[Trajectory], run: Path) -> Artifact:
    """The skills of a JSONL file as a skills artifact, by trajectory."""
    skills, remarks = import_skills(word, trajectories)
    return save_skills(run / "skills" / _name(word), skills, extra={"remarks": remarks})


def _name(word: str) -> str:
    path = Path(word).resolve()
    return f"imported_{path.name if path.is_dir() else path.stem}"
