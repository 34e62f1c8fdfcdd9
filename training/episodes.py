"""Evaluation episodes and the skills written from them, kept as artifacts of a run.

    <run>/trajectories/<env>_<panel>_step<n>_seed<s>[_own_skill]      <run>/skills/<the same name>

An artifact that was played by the same weights in the same way is not played again, so that a command that is repeated
after an interruption, or asks for one seed more, plays only what is missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diagnostics.artifact import (
    Artifact,
    ArtifactError,
    load_artifact,
    load_skills,
    load_trajectories,
    save_skills,
    save_trajectories,
)
from diagnostics.run import tokenizer_digest
from training.session import EARLIER_SEED, Session

Progress = Callable[[int, int], None]


def panel_episodes(
    session: Session,
    run: Path,
    seed: int,
    *,
    own_skill: bool = False,
    elsewhere: Sequence[Path] = (),
    progress: Progress | None = None,
) -> Artifact:
    """The panel played once at one evaluation seed, as a trajectories artifact of the run.

    Args: own_skill, with the policy's own hindsight skill of an earlier attempt at the same task in its prompt (a task
    whose skill could not be read is played without one); elsewhere, other runs in which the same weights may have
    played the same panel already.
    """
    skills = own_skills(session, run, panel_episodes(session, run, EARLIER_SEED)) if own_skill else None
    played = _how_played(session, seed, skills)
    name = f"{_panel_name(session)}_seed{seed}" + ("_own_skill" if own_skill else "")
    inputs = [] if skills is None else [skills]
    for folder in (run, *elsewhere):
        found = _kept(folder / "trajectories" / name, "trajectories", played)
        if found is not None and folder == run:
            return found
        if found is not None:
            trajectories, inputs = load_trajectories(found.path), [found]
            break
    else:
        texts = None
        if skills is not None:
            texts = {skill.task_id: skill.text for skill in load_skills(skills.path).values()}
        trajectories = session.evaluate(seed, texts, progress)
    return save_trajectories(
        run / "trajectories" / name,
        trajectories,
        config=session.config,
        seeds=[seed],
        inputs=inputs,
        extra={"played": played, "tokenizer": tokenizer_digest(session.tokenizer)},
    )


def own_skills(session: Session, run: Path, trajectories: Artifact) -> Artifact:
    """The policy's hindsight skills of a trajectories artifact, as a skills artifact beside it, by trajectory."""
    written = {"policy": policy_digest(session.model), "of": trajectories.digest}
    path = run / "skills" / trajectories.path.name
    found = _kept(path, "skills", written)
    if found is not None:
        return found
    skills = session.write_skills(load_trajectories(trajectories.path), session.step)
    return save_skills(path, skills, config=session.config, inputs=[trajectories], extra={"played": written})


def skills_beside(trajectories: Artifact) -> Artifact | None:
    """The skills artifact that was written from a trajectories artifact and stands beside it; None without one."""
    path = trajectories.path.parent.parent / "skills" / trajectories.path.name
    if not (path / "manifest.json").is_file():
        return None
    found = load_artifact(path, "skills")
    return found if found.manifest.get("played", {}).get("of") == trajectories.digest else None


def latest_episodes(run: Path) -> Artifact:
    """The episodes a run played last without a skill, at its lowest seed. Raises ValueError when there are none."""
    found = []
    for path in sorted((run / "trajectories").glob("*/manifest.json")):
        artifact = load_artifact(path.parent, "trajectories")
        played = artifact.manifest.get("played", {})
        if not played.get("skills"):
            found.append((-played.get("step", 0), played.get("seed", 0), path.parent.name, artifact))
    if not found:
        raise ValueError(f"{run} has no episodes; play some first with `undertow eval`, or give --trajectories")
    return min(found)[-1]


def policy_digest(model: Any) -> str:
    """sha256 over the names and float32 values of all weights."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        sha.update(name.encode())
        sha.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def _panel_name(session: Session) -> str:
    return f"{session.config.env.kind}_{session.config.eval.panel}_step{session.step}"


def _how_played(session: Session, seed: int, skills: Artifact | None) -> dict[str, Any]:
    """All that decides what the episodes are."""
    config = session.config
    return {
        "policy": policy_digest(session.model),
        "step": session.step,
        "panel": session.panel.sha256,
        "seed": seed,
        "skills": None if skills is None else skills.digest,
        "temperature": config.eval.temperature,
        "protocol": config.sampler.protocol,
        "max_new_tokens": config.sampler.max_new_tokens,
        "max_context": config.sampler.max_context,
        "max_turns": config.env.max_turns,
        "history": config.env.history,
        "show_admissible": config.env.show_admissible,
    }


def _kept(path: Path, kind: str, played: dict[str, Any]) -> Artifact | None:
    """A complete artifact that was made in exactly this way; a damaged one is made again."""
    try:
        artifact = load_artifact(path, kind)
    except ArtifactError:
        return None
    return artifact if artifact.manifest.get("played") == played else None
