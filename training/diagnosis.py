"""From a word of the command line to a measurements artifact: finds episodes, skills and reader, and diagnoses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from diagnostics.artifact import Artifact, load_artifact, load_skills, load_trajectories
from diagnostics.contexts import WITHOUT_SKILL
from diagnostics.records import Provenance, Trajectory
from diagnostics.run import diagnose, same_tokenizer
from training.config import Config
from training.episodes import latest_episodes, own_skills, skills_beside
from training.judge import judged
from training.models.load import load_policy
from training.session import Session
from training.subject import find_subject
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
    device: str = "cpu",
    seed: int = 0,
    out: str | None = None,
) -> Artifact:
    """Measure a run (or any model with given episodes) and return the artifact; see options.Diagnose for the words.

    A reader with another tokenizer than the player's reads the texts anew. Log-probs are those at the temperature the
    policy samples with in training.
    Raises: ValueError when there are no episodes, or no skills that a context needs.
    """
    subject = find_subject(target, base)
    played = load_artifact(trajectories, "trajectories") if trajectories else latest_episodes(subject.run)
    written = _skills(played, skills, subject.source, subject.config, device, contexts)
    name = subject.name if reader is None else reader.rstrip("/").rpartition("/")[2]
    model, tokenizer = load_policy(reader or subject.source, subject.config.model.dtype, device)
    chosen = sample([t for t in load_trajectories(played.path) if t.error is None], episodes)
    texts = {} if written is None else {key: skill.text for key, skill in load_skills(written.path).items()}
    return diagnose(
        model,
        tokenizer,
        chosen,
        texts,
        contexts,
        measures,
        Provenance(subject.run.name, subject.config.method, subject.config.env.kind, name, seed, subject.step),
        Path(out) if out else subject.run / "measurements" / name,
        max_tokens=max_tokens,
        temperature=subject.config.sampler.temperature,
        retokenise=not same_tokenizer(tokenizer, played),
        weights=method_weights(),
        accepted=judged(chosen),
        config=subject.config,
        args={"target": target, "reader": reader, "episodes": episodes, "max_tokens": max_tokens},
        inputs=[played] if written is None else [played, written],
    )


def sample(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """`count` of them (0: all), chosen by the hash of their ids: a smaller choice is the beginning of a larger one."""
    ordered = sorted(trajectories, key=lambda t: hashlib.sha256(t.id.encode()).digest())
    return ordered[:count] if count else ordered


def _skills(
    played: Artifact, given: str | None, source: str, config: Config, device: str, contexts: Sequence[str]
) -> Artifact | None:
    """The skills given, those beside the episodes, or those that the policy writes now."""
    if given is not None:
        return load_artifact(given, "skills")
    if all(context in WITHOUT_SKILL for context in contexts):
        return None
    beside = skills_beside(played)
    if beside is not None:
        return beside
    model, tokenizer = load_policy(source, config.model.dtype, device)
    with Session(config, model, tokenizer) as session:
        return own_skills(session, played.path.parent.parent, played)
