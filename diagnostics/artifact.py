"""Artifacts: folders of tables, tensors and documents that are either complete and unaltered, or refused. No torch.

A folder is built under `<name>.partial-<pid>`, synced, and renamed; manifest.json is written last, so its existence
means complete. The digest covers the content only (file names and their sha256), never the time or the machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from diagnostics.columns import SEGMENT_ARRAYS, table_trajectories, trajectory_table
from diagnostics.records import Skill, Trajectory

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
Rows = Sequence[Mapping[str, Any]]


class ArtifactError(ValueError):
    """An artifact that cannot be written, or is missing, incomplete, altered, or of another kind."""


@dataclass(frozen=True)
class Artifact:
    """A complete artifact on disk. `manifest` has kind, schema, digest, config, args, commit, seeds, inputs, files."""

    kind: str
    path: Path
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """sha256 over the sorted (file, sha256) list."""
        return self.manifest["digest"]

    @property
    def names(self) -> list[str]:
        """File names, sorted."""
        return [entry["name"] for entry in self.manifest["files"]]

    def table(self, name: str) -> pa.Table:
        return pq.read_table(self._file(f"{name}.parquet"))

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        return load_file(self._file(f"{name}.safetensors"))

    def document(self, name: str) -> Any:
        return json.loads(self._file(f"{name}.json").read_text())

    def _file(self, name: str) -> Path:
        if name not in self.names:
            raise ArtifactError(f"no {name} in the {self.kind} artifact {self.path}; it has {', '.join(self.names)}")
        return self.path / name


def to_table(rows: Rows, columns: Mapping[str, str]) -> pa.Table:
    """Rows as a table with exactly these columns (name -> pyarrow type name), e.g. records.MEASUREMENT_COLUMNS."""
    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in columns.items()])
    return pa.Table.from_pylist(list(rows), schema=schema)


def save_artifact(
    path: str | Path,
    kind: str,
    *,
    tables: Mapping[str, pa.Table | Rows] | None = None,
    tensors: Mapping[str, Mapping[str, Any]] | None = None,
    documents: Mapping[str, Any] | None = None,
    write: Callable[[Path], object] | None = None,
    config: Any = None,
    args: Any = None,
    seeds: Iterable[int] = (),
    inputs: Iterable[Artifact] = (),
    extra: Mapping[str, Any] | None = None,
) -> Artifact:
    """Write an artifact folder in one step; an artifact that stood at `path` is replaced only by a complete one.

    Source: ours.
    Args: tables (name -> Table, or rows whose types pyarrow infers), tensors (name -> named arrays), documents
    (name -> anything JSON can hold), write (puts further files into the folder it is given, e.g. a model), config
    (resolved, dataclass or mapping), args (as passed), inputs (stored by path relative to this folder and by digest),
    extra (further manifest keys, e.g. the tokenizer's digest).
    Raises: ArtifactError in one sentence when a document is not JSON or the disk refuses; the old artifact stays.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _restore(path)
        remove_stale(path)
        partial.mkdir()
        for name, table in (tables or {}).items():
            pq.write_table(_as_table(table), partial / f"{name}.parquet", compression="zstd")
        for name, named in (tensors or {}).items():
            save_file(
                {key: np.ascontiguousarray(value) for key, value in named.items()}, partial / f"{name}.safetensors"
            )
        for name, document in (documents or {}).items():
            (partial / f"{name}.json").write_text(_json(name, document))
        if write is not None:
            write(partial)
        files = [_entry(file) for file in sorted(partial.iterdir())]
        manifest = {
            **(extra or {}),
            "kind": kind,
            "schema": SCHEMA_VERSION,
            "digest": _digest(files),
            "config": config,
            "args": args,
            "commit": _commit(),
            "versions": _versions(),
            "seeds": list(seeds),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "inputs": [{"path": Path(os.path.relpath(i.path, path)).as_posix(), "digest": i.digest} for i in inputs],
            "files": files,
        }
        text = _json(MANIFEST, manifest)
        (partial / MANIFEST).write_text(text)
        for file in partial.iterdir():
            shutil.copymode(partial / MANIFEST, file)  # safetensors leaves its files to their owner alone
            _sync(file)
        _sync(partial)
        _replace(partial, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error)
        raise ArtifactError(
            f"could not write {kind} artifact {path} ({reason}); what was there before is kept"
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Artifact(kind, path, json.loads(text))


def load_artifact(path: str | Path, kind: str | None = None) -> Artifact:
    """The artifact at `path`, every file checked against its size and sha256.

    Source: ours.
    Args: kind, when given, is the kind that is wanted.
    Raises: ArtifactError in one sentence naming file and folder when anything is missing, cut, altered or newer.
    """
    path = Path(path)
    _restore(path)
    if not (path / MANIFEST).is_file():
        state = "is incomplete (no manifest.json)" if path.is_dir() else "does not exist"
        raise ArtifactError(f"artifact {path} {state}; make it again with the command that writes it")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = [(str(f["name"]), int(f["bytes"]), str(f["sha256"])) for f in manifest["files"]]
        found, schema, digest = str(manifest["kind"]), int(manifest["schema"]), str(manifest["digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{MANIFEST} in {path} cannot be read; make the artifact again") from error
    if schema > SCHEMA_VERSION:
        raise ArtifactError(
            f"{path} has schema {schema}, this version reads up to {SCHEMA_VERSION}; update the package"
        )
    if kind is not None and found != kind:
        raise ArtifactError(f"{path} is a {found} artifact, expected {kind}; give the path of a {kind} artifact")
    for name, size, sha256 in files:
        file = path / name
        if Path(name).name != name:
            fault = "is outside the folder"
        elif not file.is_file():
            fault = "is missing"
        elif file.stat().st_size != size:
            fault = f"has {file.stat().st_size} bytes instead of {size}"
        elif _sha256(file) != sha256:
            fault = "was altered (its sha256 differs from the manifest)"
        else:
            continue
        raise ArtifactError(f"{name} of the {found} artifact {path} {fault}; copy the folder again or make it again")
    if _digest(manifest["files"]) != digest:
        raise ArtifactError(
            f"{MANIFEST} in {path} was altered (its digest differs); copy the folder again or make it again"
        )
    return Artifact(found, path, manifest)


def save_trajectories(path: str | Path, trajectories: Sequence[Trajectory], **manifest: Any) -> Artifact:
    """Write trajectories so that they read back exactly; further arguments are those of save_artifact.

    Raises: ArtifactError on an id that occurs twice or a segment whose arrays differ in length.
    """
    seen: set[str] = set()
    for trajectory in trajectories:
        if trajectory.id in seen:
            raise ArtifactError(f"trajectory id {trajectory.id!r} occurs twice in {path}; ids must be unique")
        seen.add(trajectory.id)
        for index, segment in enumerate(trajectory.segments):
            lengths = {name: len(getattr(segment, name)) for name in SEGMENT_ARRAYS}
            if len(set(lengths.values())) > 1:
                raise ArtifactError(
                    f"segment {index} of trajectory {trajectory.id!r} has arrays of unequal length {lengths}"
                )
    return save_artifact(path, "trajectories", tables={"trajectories": trajectory_table(trajectories)}, **manifest)


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """The trajectories of an artifact, equal to what was saved, in the same order."""
    return table_trajectories(load_artifact(path, "trajectories").table("trajectories"))


def save_skills(path: str | Path, skills: Mapping[str, Skill], **manifest: Any) -> Artifact:
    """Write skills by key (the trajectory they are placed in front of); further arguments as in save_artifact."""
    rows = [{"key": key, **dataclasses.asdict(skill)} for key, skill in skills.items()]
    return save_artifact(path, "skills", tables={"skills": to_table(rows, _SKILL_COLUMNS)}, **manifest)


def load_skills(path: str | Path) -> dict[str, Skill]:
    """The skills of an artifact by key, in the order they were saved."""
    rows = load_artifact(path, "skills").table("skills").to_pylist()
    return {row.pop("key"): Skill(**row) for row in rows}


_SKILL_COLUMNS = {"key": "string", "text": "string", "kind": "string", "task_id": "string"}
_SKILL_COLUMNS |= {"trajectory_id": "string", "source_success": "bool"}


def _as_table(table: pa.Table | Rows) -> pa.Table:
    return table if isinstance(table, pa.Table) else pa.Table.from_pylist(list(table))


def _json(name: str, document: Any) -> str:
    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        if isinstance(value, np.generic | np.ndarray):
            return value.tolist()
        if isinstance(value, Path):
            return value.as_posix()
        raise TypeError(f"a {type(value).__name__}")

    try:
        return json.dumps(document, default=plain, allow_nan=False, indent=1, ensure_ascii=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            f"{name} cannot be written as JSON ({error}); use numbers, strings, lists and mappings"
        ) from error


def _entry(file: Path) -> dict[str, Any]:
    return {"name": file.name, "sha256": _sha256(file), "bytes": file.stat().st_size}


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _digest(files: Sequence[Mapping[str, Any]]) -> str:
    pairs = sorted((str(file["name"]), str(file["sha256"])) for file in files)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _replace(partial: Path, path: Path) -> None:
    """Put a finished folder in place. Between the two renames the old one waits as `.previous`; see _restore."""
    if path.exists():
        os.rename(path, _previous(path))
    os.rename(partial, path)
    _sync(path.parent)
    shutil.rmtree(_previous(path), ignore_errors=True)


def _restore(path: Path) -> None:
    """Undo a replacement that was killed between its two renames."""
    if _previous(path).exists():
        if path.exists():
            shutil.rmtree(_previous(path), ignore_errors=True)
        else:
            os.rename(_previous(path), path)


def remove_stale(path: Path) -> None:
    """Remove half-written folders of an artifact, or of all whose name a pattern fits (`folder / "step_*"`), but for
    those that another living process writes.

    Source: ours. A process id tells nothing of another machine: one that looks dead there is taken for dead.
    """
    for folder in path.parent.glob(f"{path.name}.partial-*"):
        writer = folder.name.rpartition("-")[2]
        if writer == str(os.getpid()) or not _alive(writer):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _versions() -> dict[str, str]:
    """Of what numbers depend on, where it is installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "pyarrow"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@lru_cache(maxsize=1)
def _commit() -> str:
    """Commit of this source tree; "" when it is not a checkout of ours (e.g. installed inside somebody else's)."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], check=True, capture_output=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
