"""From a word of the command line to a measurements artifact: finds episodes, skills and reader, and diagnoses."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from diagnostics.artifact import Artifact, load_artifact, load_skills, load_trajectories
from diagnostics.capture import backend as capture_backend
from diagnostics.contexts import WITHOUT_SKILL
from diagnostics.measures import measures as known_measures
from diagnostics.records import Provenance, Trajectory
from diagnostics.run import diagnose, same_tokenizer, tokenizer_digest
from training.config import Config
from training.episodes import latest_episodes, own_skills, skills_beside
from training.imports import imported_episodes, imported_skills, is_foreign, is_imported
from training.judge import judged
from training.models.load import load_policy
from training.session import Session
from training.subject import Subject, find_subject
from training.weights import method_weights


def diagnose_subject(
    target: str,
    base: Config,
    *,
    contexts: Sequence[str],
    measures: Sequence[str],
    trajectories: str | None = None,
    skills: str | None = None,
    reader: str | None = None,
    episodes: int = 0,
    max_tokens: int | None = None,
    backend: str = "hf",
    against: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    out: str | None = None,
) -> Artifact:
    """Measure a run (or any model with given episodes) and return the artifact; see options.Diagnose for the words.

    A reader with another tokenizer than the player's reads the texts anew; what was made elsewhere is imported for the
    reader's tokenizer. Log-probs are those at the temperature the policy samples with in training.
    Raises: ValueError when there are no episodes, or no skills that a context needs.
    """
    capture_backend(backend)  # what is not installed, and what there is not, is named before anything is loaded
    known_measures(measures)
    subject = find_subject(target, base)
    words = [] if trajectories is None else [trajectories] if Path(trajectories).exists() else trajectories.split(",")
    artifacts = {word: load_artifact(word, "trajectories") for word in words if not is_foreign(word)}
    reading = cache(lambda: load_policy(reader or subject.source, subject.config.model.dtype, device))
    played = [artifacts.get(word) or imported_episodes(word, reading()[1], subject.run) for word in words]
    played = played or [latest_episodes(subject.run)]
    found = _together(played)
    written = _skills(played, found, skills, subject, device, contexts)
    name = subject.name if reader is None else reader.rstrip("/").rpartition("/")[2]
    model, tokenizer = reading()
    chosen = sample([t for t in found if t.error is None], episodes)
    return diagnose(
        model,
        tokenizer,
        chosen,
        {key: skill.text for artifact in written for key, skill in load_skills(artifact.path).items()},
        contexts,
        measures,
        Provenance(subject.run.name, subject.config.method, subject.config.env.kind, name, seed, subject.step),
        Path(out) if out else subject.run / "measurements" / name,
        max_tokens=max_tokens,
        temperature=subject.config.sampler.temperature,
        retokenise=_other_tokenizer(tokenizer, played),
        backend=backend,
        against=None if against is None else _other_weights(against, base, tokenizer, device),
        remarks=[remark for artifact in (*played, *written) for remark in artifact.manifest.get("remarks", [])],
        weights=method_weights(),
        accepted=judged(chosen),
        config=subject.config,
        args={"target": target, "reader": reader, "episodes": episodes, "max_tokens": max_tokens, "backend": backend}
        | {"against": against},
        inputs=[*played, *written],
    )


def _other_weights(target: str, base: Config, tokenizer: Any, device: str) -> Any:
    """The weights of another run or model. Raises ValueError when they read other token ids."""
    subject = find_subject(target, base)
    model, its = load_policy(subject.source, subject.config.model.dtype, device)
    if tokenizer_digest(its) != tokenizer_digest(tokenizer):
        raise ValueError(f"{target} has another tokenizer; --against compares weights that read the same token ids")
    return model


def sample(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """`count` of them (0: all), chosen by the hash of their ids: a smaller choice is the beginning of a larger one."""
    ordered = sorted(trajectories, key=lambda t: hashlib.sha256(t.id.encode()).digest())
    return ordered[:count] if count else ordered


def _together(played: Sequence[Artifact]) -> list[Trajectory]:
    """The episodes of several artifacts. Raises ValueError on an id that stands for two of them."""
    found = [trajectory for artifact in played for trajectory in load_trajectories(artifact.path)]
    doubled = [name for name, count in Counter(trajectory.id for trajectory in found).items() if count > 1]
    if doubled:
        raise ValueError(f"trajectory {doubled[0]!r} stands twice in what --trajectories names; give each episode once")
    return found


def _other_tokenizer(tokenizer: Any, played: Sequence[Artifact]) -> bool:
    """Whether the texts have to be read anew. Raises ValueError where that cannot be done for all of them."""
    same = [same_tokenizer(tokenizer, artifact) for artifact in played]
    for artifact, is_same in zip(played, same, strict=True):
        if is_imported(artifact) and not is_same:
            raise ValueError(f"{artifact.path} was imported for another tokenizer; give the file it came from instead")
    if len(set(same)) > 1:
        raise ValueError("the reader's tokenizer made the ids of some of the --trajectories only; read them apart")
    return not same[0]


def _skills(
    played: Sequence[Artifact],
    found: Sequence[Trajectory],
    given: str | None,
    subject: Subject,
    device: str,
    contexts: Sequence[str],
) -> list[Artifact]:
    """The skills given, those beside the episodes, or those that the policy writes now."""
    if given is not None:
        return [imported_skills(given, found, subject.run) if is_foreign(given) else load_artifact(given, "skills")]
    if all(context in WITHOUT_SKILL for context in contexts):
        return []
    beside = [skills_beside(artifact) for artifact in played]
    missing = [artifact for artifact, skills in zip(played, beside, strict=True) if skills is None]
    for artifact in filter(is_imported, missing):
        named = ", ".join(context for context in contexts if context not in WITHOUT_SKILL)
        raise ValueError(
            f"contexts {named} are made from skills, and the policy did not play the episodes of {artifact.path.name}: "
            'give --skills, an artifact or a JSONL file of {"trajectory": id, "skill": text}, or --contexts none,floor'
        )
    written = [skills for skills in beside if skills is not None]
    if missing:
        model, tokenizer = load_policy(subject.source, subject.config.model.dtype, device)
        with Session(subject.config, model, tokenizer, source=subject.source) as session:
            written += [own_skills(session, artifact.path.parent.parent, artifact) for artifact in missing]
    return written
