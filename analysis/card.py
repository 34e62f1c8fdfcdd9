"""The reproduction card of a report: what was run, with which settings, seeds, tasks and versions, and what departs."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from diagnostics.artifact import Artifact

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pandas", "scipy", "scikit-learn", "matplotlib")
_RUN = ("config.json", "*/config.json", "*/*/config.json")  # a run, the runs of a study, those of its seeds


@dataclass(frozen=True)
class Card:
    """`commands` are rows of (name, state, command), `departures` of (method, text)."""

    runs: pd.DataFrame
    commands: Sequence[tuple[str, str, str]]
    versions: pd.DataFrame
    departures: Sequence[tuple[str, str]]


def reproduction_card(run: Path, manifests: Sequence[Artifact]) -> Card:
    """The card of a run or a study folder, from config.json, args.json, method.json, study.json and the manifests."""
    folders = _runs(run)
    rows = [_row(run, folder, config, manifests) for folder, config in folders.items()]
    return Card(pd.DataFrame(rows), _commands(run, folders), _versions(run, manifests), _departures(folders))


def _runs(run: Path) -> dict[Path, Mapping[str, Any]]:
    found = {}
    for path in sorted({path for pattern in _RUN for path in run.glob(pattern)}):
        config = json.loads(path.read_text(encoding="utf-8"))
        if "recipe" in config:  # else the export of a model
            found[path.parent] = config
    return found


def _row(run: Path, folder: Path, config: Mapping[str, Any], manifests: Sequence[Artifact]) -> dict[str, str]:
    """What one run was; values that differ among its artifacts are all named."""
    own = [artifact for artifact in manifests if folder in artifact.path.parents]
    played = [artifact.manifest.get("played", {}) for artifact in own]
    diff = folder / "code.diff"
    changed = " with changes (code.diff)" if diff.is_file() and diff.stat().st_size else ""
    commits = _all(artifact.manifest.get("commit") for artifact in own)
    sections = {name: config.get(name) or {} for name in ("model", "eval", "env")}
    return {
        "run": folder.relative_to(run).as_posix() if folder != run else run.resolve().name,
        "recipe": str(config["recipe"]),
        "method": Path(str(config.get("method", ""))).name,
        "model": str(sections["model"].get("name", "")),
        "environment": str(sections["env"].get("kind", "")),
        "training seed": str(config.get("seed", "")),
        "evaluation seeds": _all(sorted({entry["seed"] for entry in played if "seed" in entry})),
        "steps": str(config.get("steps", "")),
        "panel": f"{sections['eval'].get('panel', '')}, {sections['eval'].get('size', '')} tasks",
        "commit": f"{commits}{changed}",
        "panel sha256": _all(entry.get("panel") for entry in played),
    }


def _commands(run: Path, folders: Mapping[Path, Any]) -> list[tuple[str, str, str]]:
    """The commands of a study's stages, else those that the runs were trained with."""
    study = run / "study.json"
    if study.is_file():
        stages = json.loads(study.read_text(encoding="utf-8"))
        return [
            (name, record["state"], _line(record["command"])) for name, record in stages.items() if "command" in record
        ]
    found = []
    for folder in folders:
        if (folder / "args.json").is_file():
            given = json.loads((folder / "args.json").read_text(encoding="utf-8"))
            found.append((folder.name, "", _line(["undertow", given["command"], *given["words"]])))
    return found


def _line(words: Sequence[str]) -> str:
    """A command as it is typed: without the interpreter's path, words with spaces quoted."""
    words = ["undertow", *words[3:]] if list(words[1:3]) == ["-m", "undertow"] else list(words)
    return " ".join(f"'{word}'" if not word or set(word) & set(' "$&|;()<>*') else word for word in words)


def _versions(run: Path, manifests: Sequence[Artifact]) -> pd.DataFrame:
    """Versions that the artifacts and figures recorded, and those where the page was written."""
    recorded: dict[str, set[str]] = {}
    for artifact in manifests:
        for name, version in (artifact.manifest.get("versions") or {}).items():
            recorded.setdefault(name, set()).add(str(version))
        if "config.json" in artifact.names:
            exported = artifact.document("config").get("transformers_version")
            recorded.setdefault("transformers", set()).update([exported] if exported else [])
    for path in (run / "figures").glob("*.json"):
        drawn = json.loads(path.read_text(encoding="utf-8")).get("matplotlib")
        recorded.setdefault("matplotlib", set()).update([drawn] if drawn else [])
    here = {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}
    names = dict.fromkeys([*here, *recorded])
    return pd.DataFrame(
        [
            {
                "package": name,
                "recorded by the artifacts": ", ".join(sorted(recorded.get(name, ()))) or None,
                "where this page was written": here.get(name),
            }
            for name in names
        ]
    )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _departures(folders: Mapping[Path, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the methods of the runs say about themselves, once each; where none was recorded, where to read it."""
    found: dict[str, str] = {}
    for folder, config in folders.items():
        name = Path(str(config.get("method", ""))).name
        path = folder / "method.json"
        if path.is_file():
            told = json.loads(path.read_text(encoding="utf-8"))
            settings = [setting for setting in told.get("config", ()) if setting.get("source") == "ours"]
            ours = [f"{setting['name']} {json.dumps(setting['default'])}" for setting in settings]
            parts = [str(told.get("doc") or "").strip()]
            parts += [f"Settings that no paper gives: {', '.join(ours)}."] if ours else []
            found[name] = "\n\n".join(part for part in parts if part)
        elif name:
            found.setdefault(name, "Its numbered differences are in docs/methods.md; the run recorded none.")
    return list(found.items())


def _all(values: Any) -> str:
    """The values that occur, each once, in their order."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))
