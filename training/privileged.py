"""The privileged texts of one training step: who gets which, what is left out and why, and samples to look at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diagnostics.contexts import contexts_for
from diagnostics.paired import PairedSegment
from diagnostics.records import Skill, Trajectory
from diagnostics.render import decode, encode
from training.config import Config
from training.method import Needs
from training.skills.source import SkillSource

SAMPLES = 2  # teacher contexts kept a step, to be read by a human

WriteSkills = Callable[[Sequence[Trajectory], int], Mapping[str, Skill]]  # (finished trajectories, step) -> by id


def teacher_texts(
    config: Config,
    tokenizer: Any,
    needs: Needs,
    played: Sequence[Trajectory],
    step: int,
    write: WriteSkills | None,
    source: SkillSource | None,
) -> tuple[dict[str, str] | None, dict[str, float]]:
    """Trajectory id -> the text in front of the teacher's task, None without a teacher; and counts.

    `skills.control` puts another text in the skill's place (see diagnostics/contexts.py). A text over `skills.budget`
    tokens is not cut: its trajectory gets no teacher and is counted (case B32). `tokens/skills`: what the policy wrote.
    Raises: ValueError when nobody gives the skills that the method needs.
    """
    if needs.teacher == "none" or needs.skill == "none":
        return None, {}
    giver: Any = write if needs.skill == "hindsight" else source
    if giver is None:
        what = "write_skills_fn" if needs.skill == "hindsight" else "a skill source"
        raise ValueError(f"method {config.method!r} needs {needs.skill} skills at step {step}; give {what}")
    skills: Mapping[str, Skill] = {}
    if played:
        skills = write(played, step) if giver is write and write else giver.for_trajectories(played, step)
    texts = {id: skill.text for id, skill in skills.items() if skill.text.strip()}
    counts = {"tokens/skills": written_tokens(tokenizer, skills.values())} if giver is write else {}
    control = config.skills.control
    if control != "own_skill" and texts:
        written = [trajectory for trajectory in played if trajectory.id in texts]
        texts = contexts_for(tokenizer, written, texts, [control], config.seed)[control]
    kept = {id: text for id, text in texts.items() if len(encode(tokenizer, text)) <= config.skills.budget}
    return kept, {**counts, "distill/over_budget": (len(texts) - len(kept)) / max(len(texts), 1)}


def written_tokens(tokenizer: Any, skills: Iterable[Skill]) -> float:
    """Tokens of the skills that the policy wrote in a step; replies without a skill are not in it."""
    return float(sum(len(encode(tokenizer, skill.text)) for skill in skills))


def write_samples(run: Path, step: int, tokenizer: Any, pairs: Sequence[PairedSegment]) -> None:
    """<run>/samples/step_<n>.json: the first teacher contexts of a step, decoded, up to the first response token."""
    read = [pair for pair in pairs if pair.teacher_ids is not None and len(pair.response_ids)][:SAMPLES]
    if not read:
        return
    document = [
        {
            "trajectory": pair.trajectory_id,
            "task": pair.task_id,
            "teacher_prompt": decode(tokenizer, pair.teacher_ids[: pair.teacher_positions[0]]),  # type: ignore[index]
        }
        for pair in read
    ]
    path = run / "samples" / f"step_{step}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
