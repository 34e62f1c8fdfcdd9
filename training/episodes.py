"""Evaluation episodes and the skills in their prompts, kept as artifacts of a run.

    <run>/trajectories/<env>_<panel>_step<n>_seed<s>[_<protocol>]      <run>/skills/<the same name>
    <run>/unfinished/<the same name>                                   what a panel that broke off has finished

An artifact that was played by the same weights in the same way is not played again, so that a command that is repeated
after an interruption, or asks for one seed more, plays only what is missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from diagnostics.artifact import (
    Artifact,
    ArtifactError,
    load_artifact,
    load_skills,
    load_trajectories,
    save_artifact,
    save_skills,
    save_trajectories,
)
from diagnostics.columns import table_trajectories, trajectory_table
from diagnostics.progress import progress as show_progress
from diagnostics.records import Skill, Trajectory
from diagnostics.run import tokenizer_digest
from training.config import Config, EnvConfig
from training.expert_play import expert_episodes, expert_skills
from training.models.load import load_policy, model_source
from training.options import TRIALS, Protocol
from training.protocols import experience, insight_skills, library_skills, reflexion
from training.samplers.server import vllm_command
from training.session import EARLIER_SEED, Session
from training.subject import Subject, keep_config

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def panel_episodes(
    session: Session,
    run: Path,
    seed: int,
    *,
    protocol: Protocol = "vanilla",
    trials: int = 1,
    elsewhere: Sequence[Path] = (),
    progress: Progress | None = None,
) -> Artifact:
    """The panel played once at one evaluation seed, as a trajectories artifact of the run.

    Args: protocol, see training/protocols.py (a task it has no text for is played without one); trials, attempts at a
    task under a protocol of TRIALS; elsewhere, other runs in which the same weights may have played the panel already.
    """
    skills = panel_skills(session, run, protocol)
    played = _how_played(session, seed, protocol, skills, trials if protocol in TRIALS else 1)
    name = f"{_panel_name(session)}_seed{seed}" + ("" if protocol == "vanilla" else f"_{protocol}")
    inputs = [] if skills is None else [skills]
    for folder in (run, *elsewhere):
        found = _kept(folder / "trajectories" / name, "trajectories", played)
        if found is not None and folder == run:
            return found
        if found is not None:
            trajectories, inputs = load_trajectories(found.path), [found]
            break
    else:
        if protocol == "reflexion":
            trajectories = reflexion(session, seed, trials, progress)
        elif protocol == "expert":
            given = {"seed": seed, "attempts": trials, "max_context": session.config.sampler.max_context}
            with closing(session.make_env()) as env:
                trajectories = expert_episodes(env, session.panel_tasks, session.tokenizer, **given, progress=progress)
        else:
            written = {} if skills is None else load_skills(skills.path)
            texts = {skill.task_id: skill.text for skill in written.values()}
            trajectories = _evaluate(session, run / "unfinished" / name, seed, texts, played, progress)
    saved = save_trajectories(
        run / "trajectories" / name,
        trajectories,
        config=session.config,
        seeds=[seed],
        inputs=inputs,
        extra={"played": played, "tokenizer": tokenizer_digest(session.tokenizer)},
    )
    if protocol == "expert":
        _skills(session, run / "skills" / name, {"of": saved.digest}, lambda: expert_skills(trajectories), [saved])
    return saved


def _evaluate(
    session: Session, path: Path, seed: int, texts: Mapping[str, str], played: dict[str, Any], progress: Progress | None
) -> list[Trajectory]:
    """The panel, less what stands at `path` from a time when it broke off; what is finished when it breaks off now is
    kept there."""
    kept = _kept(path, "unfinished", played)
    finished = [] if kept is None else table_trajectories(kept.table("trajectories"))
    before = len(finished)
    try:
        trajectories = session.evaluate(seed, texts, progress, finished)
    except BaseException:
        if len(finished) > before:
            given: dict[str, Any] = {"config": session.config, "seeds": [seed], "extra": {"played": played}}
            save_artifact(path, "unfinished", tables={"trajectories": trajectory_table(finished)}, **given)
            log.warning("%d finished episodes are kept; the same command goes on from them", len(finished))
        raise
    shutil.rmtree(path, ignore_errors=True)
    return trajectories


def play_seeds(
    subject: Subject, config: Config, seeds: Sequence[int], *, protocol: Protocol, trials: int, device: str
) -> list[Artifact]:
    """The panel played by a subject at several evaluation seeds, as artifacts of its run in their order."""
    if config.sampler.engine == "vllm":  # what it cannot serve is said before anything is loaded or written
        vllm_command(model_source(subject.source)[0], config.model.dtype)
    model, tokenizer = load_policy(subject.source, config.model.dtype, device)
    artifacts = []
    with Session(config, model, tokenizer, subject.step, subject.source) as session:
        each = len(session.panel_tasks) * trials
        keep_config(subject.run, config)  # not before: a request that is refused makes no folder
        with show_progress("eval", each * len(seeds)) as report:
            for index, seed in enumerate(seeds):

                def played(done: int, _: int, before: int = index * each) -> None:
                    report(before + done)

                made = panel_episodes(session, subject.run, seed, protocol=protocol, trials=trials, progress=played)
                episodes = made.table("trajectories").select(["task_id", "success"]).to_pylist()
                won = {episode["task_id"] for episode in episodes if episode["success"]}
                report((index + 1) * each, success=len(won) / len({episode["task_id"] for episode in episodes}))
                artifacts.append(made)
    return artifacts


def panel_skills(session: Session, run: Path, protocol: Protocol) -> Artifact | None:
    """The texts that a protocol has ready before the panel is played, as a skills artifact; None where it has none."""
    if protocol == "own_skill":
        return own_skills(session, run, panel_episodes(session, run, EARLIER_SEED))
    path = run / "skills" / f"{_panel_name(session)}_{protocol}"
    if protocol == "skill_prompt":
        found = library_skills(session)
        texts = json.dumps({id: skill.text for id, skill in sorted(found.items())})
        return _skills(session, path, {"texts": hashlib.sha256(texts.encode()).hexdigest()}, lambda: found)
    if protocol == "expel":
        source = training_episodes(session, run)
        made = {"policy": session.policy(), "of": source.digest, "panel": session.panel.sha256}
        return _skills(session, path, made, lambda: insight_skills(session, load_trajectories(source.path)), [source])
    return None


def training_episodes(session: Session, run: Path) -> Artifact:
    """The attempts at training tasks that insights are taken from, as a trajectories artifact of the run."""
    config = session.config
    played = _how_played(session, EARLIER_SEED, "experience", None, config.group_size)
    played |= {"split": config.env.split, "tasks": config.tasks_per_step, "order": config.seed}
    path = run / "trajectories" / f"{config.env.kind}_{config.env.split}_step{session.step}_experience"
    found = _kept(path, "trajectories", played)
    if found is not None:
        return found
    extra = {"played": played, "tokenizer": tokenizer_digest(session.tokenizer)}
    return save_trajectories(path, experience(session), config=config, seeds=[EARLIER_SEED], extra=extra)


def own_skills(session: Session, run: Path, trajectories: Artifact) -> Artifact:
    """The policy's hindsight skills of a trajectories artifact, as a skills artifact beside it, by trajectory."""
    made = {"policy": session.policy(), "of": trajectories.digest, **_draws(session.config)}
    path = run / "skills" / trajectories.path.name
    played = load_trajectories(trajectories.path)
    return _skills(session, path, made, lambda: session.write_skills(played, session.step), [trajectories])


def skills_beside(trajectories: Artifact) -> Artifact | None:
    """The skills artifact that was written from a trajectories artifact and stands beside it; None without one."""
    path = trajectories.path.parent.parent / "skills" / trajectories.path.name
    if not (path / "manifest.json").is_file():
        return None
    found = load_artifact(path, "skills")
    return found if found.manifest.get("played", {}).get("of") == trajectories.digest else None


def latest_episodes(run: Path) -> Artifact:
    """The panel a run played last without a skill, at its lowest seed; else what an expert played for it.

    Raises: ValueError when there is neither.
    """
    found = []
    for path in sorted((run / "trajectories").glob("*/manifest.json")):
        artifact = load_artifact(path.parent, "trajectories")
        played = artifact.manifest.get("played", {})
        how = played.get("evaluation", "vanilla")
        if how in ("vanilla", "expert"):
            rank = (how == "expert", -played.get("step", 0), played.get("seed", 0), path.parent.name)
            found.append((*rank, artifact))
    if not found:
        raise ValueError(f"{run} has no episodes; play some first with `undertow eval`, or give --trajectories")
    return min(found)[-1]


def _panel_name(session: Session) -> str:
    return f"{session.config.env.kind}_{session.config.eval.panel}_step{session.step}"


def _how_played(session: Session, seed: int, evaluation: str, skills: Artifact | None, trials: int) -> dict[str, Any]:
    """All that decides what the episodes are."""
    config = session.config
    return {
        **_shown(config.env),
        **_draws(config),
        "evaluation": evaluation,
        "trials": trials,
        "policy": session.policy(),
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


def _shown(env: EnvConfig) -> dict[str, Any]:
    """What pages and searches show beside the task: task ids do not tell which shop or passages they came from."""
    search = env.search
    shown: dict[str, dict[str, Any]] = {
        "searchqa": {"search": [search.retriever, search.passages, search.passage_tokens]},
        "webshop": {"products": env.shop.products},
    }
    data = {} if env.data is None else {"data": str(Path(env.data).resolve())}
    return {**shown[env.kind], **data} if env.kind in shown else {}


def _draws(config: Config) -> dict[str, Any]:
    """What a reply depends on beside its key: each sampler has draws of its own."""
    return {} if config.sampler.engine == "hf" else {"engine": config.sampler.engine}


def _skills(
    session: Session,
    path: Path,
    made: dict[str, Any],
    write: Callable[[], Mapping[str, Skill]],
    inputs: Sequence[Artifact] = (),
) -> Artifact:
    """The skills artifact at `path` if it was made in this way, else a new one."""
    found = _kept(path, "skills", made)
    return found or save_skills(path, write(), config=session.config, inputs=inputs, extra={"played": made})


def _kept(path: Path, kind: str, played: dict[str, Any]) -> Artifact | None:
    """A complete artifact that was made in exactly this way; a damaged one is made again."""
    try:
        artifact = load_artifact(path, kind)
    except ArtifactError:
        return None
    return artifact if artifact.manifest.get("played") == played else None
