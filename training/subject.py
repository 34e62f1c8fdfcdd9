"""What a command works on: a run, one of its checkpoints, a model folder, or a model's name."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diagnostics.artifact import ArtifactError, load_artifact
from training.checkpoint import latest_complete
from training.config import Config
from training.models.load import NAMES
from training.settings import from_document, read_config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """A policy and where its results belong."""

    config: Config
    source: str  # what load_policy takes
    step: int  # training steps behind the weights, over all runs they came through
    run: Path  # folder of its results
    name: str  # in tables and figures


def find_subject(target: str, base: Config, out: str | None = None) -> Subject:
    """The policy that a word of the command line means.

    Args: target, a run, a checkpoint, a model folder, or a model's name; base, how a model that is no run plays; out,
    another folder for the results (default: the run itself, or runs/<model>).
    Raises: ValueError when there is no such thing, or when its last checkpoint is damaged.
    """
    folder = Path(target)
    if target in NAMES or not folder.is_dir():
        if target not in NAMES and (folder.exists() or folder.parent.is_dir()):
            raise ValueError(
                f"there is no run or model {target!r}; give a run folder, a model folder, {' or '.join(NAMES)}"
            )
        return _model(target, base, out)
    if (folder / "manifest.json").is_file():
        artifact = load_artifact(folder, "checkpoint")
        config = from_document(Config(), artifact.manifest["config"], f"{folder / 'manifest.json'}")
        step = first_step(config) + int(artifact.document("state")["step"])
        run = folder.resolve().parent.parent
        return Subject(config, target, step, Path(out) if out else run, f"{run.name} {folder.name}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is neither a run nor a model folder: it has no config.json")
    if "recipe" not in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return _model(target, base, out)
    config = read_config(folder / "config.json", Config())
    checkpoint = last_checkpoint(folder)
    run = Path(out) if out else folder
    if checkpoint is not None:
        state = load_artifact(checkpoint, "checkpoint").document("state")
        return Subject(config, str(checkpoint), first_step(config) + int(state["step"]), run, folder.resolve().name)
    return Subject(config, config.init_from or config.model.name, first_step(config), run, short_name(config))


def _model(name: str, base: Config, out: str | None) -> Subject:
    config = replace(base, model=replace(base.model, name=name))
    return Subject(config, name, 0, Path(out) if out else Path("runs") / short_name(config), short_name(config))


def short_name(config: Config) -> str:
    """A model's name without the folders or the owner it stands under."""
    return config.model.name.rstrip("/").rpartition("/")[2] or "model"


def last_checkpoint(run: str | Path) -> Path | None:
    """The last complete checkpoint of a run; None when it has none at all.

    Raises: ValueError when it has checkpoints and all of them are damaged.
    """
    found = sorted((Path(run) / "checkpoints").glob("step_*"))
    chosen = latest_complete(run)
    if chosen is None and found:
        load_artifact(found[-1], "checkpoint")  # says what is wrong
    return chosen


def first_step(config: Config) -> int:
    """Training steps behind the weights a run starts from: 0, or those of the checkpoint it branches from."""
    if config.init_from is None:
        return 0
    try:
        artifact = load_artifact(config.init_from, "checkpoint")
    except ArtifactError as error:
        log.warning("steps are counted from 0 here: %s", error)
        return 0
    parent = from_document(Config(), artifact.manifest["config"], f"the manifest of {config.init_from}")
    return first_step(parent) + int(artifact.document("state")["step"])


def keep_config(run: Path, config: Config) -> None:
    """Make a folder of results a run of its own, by writing config.json, unless it is one.

    Raises: ValueError when it holds results of another model.
    """
    path = run / "config.json"
    if path.is_file():
        before = read_config(path, Config()).model.name
        if before != config.model.name:
            raise ValueError(f"{run} holds results of {before}, not {config.model.name}; give another --out")
        return
    write_json(path, asdict(config))


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
