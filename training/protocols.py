"""How a policy may be helped while it is evaluated: each protocol puts its own text into the player's prompt.

    vanilla       no text
    skill_prompt  the skill that a library has for the task
    own_skill     the policy's hindsight skill of an earlier attempt at the same task
    reflexion     further attempts at tasks that were not won, with what the policy wrote down after its failures
    expel         the policy's insights from failures and successes at training tasks
    expert        no policy plays: the searching expert does, for any model to read again (training/expert_play.py)

The weights never change. Texts are of the task's kind or of earlier attempts, never of the episode that is evaluated;
reflexion's come from failures at the same task, which is why its success is told by the number of attempts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from diagnostics.records import Skill, Trajectory
from diagnostics.render import encode
from training.envs.panels import disjoint, train_order
from training.rollout import Start, group_starts
from training.session import EARLIER_SEED, Session
from training.skills.insights import retrieve_insights, write_insights
from training.skills.source import retriever

log = logging.getLogger(__name__)

MEMORY = 3  # reflections kept in a prompt, the latest


def library_skills(session: Session) -> dict[str, Skill]:
    """Panel task id -> the skill that the library of `config.skills` has for it.

    Source: SDAR's SkillPrompt rows. A task without a skill is left out, and so is one whose skill is over the budget:
    it is played without (never cut), and the log says how many there are.
    """
    given = session.config.skills
    chosen = retriever(given, session.config.env.kind, session.config.seed)
    texts = {
        task.id: chosen.retrieve(task.task_type, task.description, ("eval", task.id)).text
        for task in session.panel_tasks
    }
    long = {id for id, text in texts.items() if len(encode(session.tokenizer, text)) > given.budget}
    if long:
        log.warning("%d of %d skills are over %d tokens and left out", len(long), len(texts), given.budget)
    return {id: Skill(text, "retrieved", id) for id, text in texts.items() if text and id not in long}


def reflexion(
    session: Session, seed: int, trials: int, progress: Callable[[int, int], None] | None = None
) -> list[Trajectory]:
    """Up to `trials` attempts at each task of the panel; a task that is won is not played again.

    After a failed attempt the policy writes down its mistake and what to do instead, and its latest three such notes
    stand in the prompt of the next attempt. The first attempt is that of `vanilla`, bit for bit. An attempt whose
    environment crashed, or whose note cannot be parsed, adds no note.
    Source: Reflexion (Shinn et al. 2023). Departures: the note is the hindsight skill of the failed attempt.
    Args: progress(done, total), in tasks times trials.
    Returns: trajectories ordered by (task id, attempt).
    """
    tasks = sorted(session.panel_tasks, key=lambda task: task.id)
    ahead = list(enumerate(tasks))
    notes: dict[str, list[str]] = {task.id: [] for task in tasks}
    played: list[Trajectory] = []
    for trial in range(trials):
        settled = len(tasks) * (trial + 1) - len(ahead)

        def report(done: int, _: int, settled: int = settled) -> None:
            if progress:
                progress(settled + done, len(tasks) * trials)

        starts = [Start(task, group, trial) for group, task in ahead]
        texts = {(task.id, trial): "\n".join(notes[task.id][-MEMORY:]) for _, task in ahead if notes[task.id]}
        attempts = session.play(starts, seed, texts, report)
        played += attempts
        lost = [attempt for attempt in attempts if not attempt.success]
        ahead = [(attempt.group, tasks[attempt.group]) for attempt in lost]
        if not lost or trial == trials - 1:
            break
        for note in session.write_skills(lost, session.step).values():
            notes[note.task_id].append(note.text)
    return sorted(played, key=lambda trajectory: (trajectory.task_id, trajectory.attempt))


def experience(session: Session) -> list[Trajectory]:
    """Attempts at training tasks that insights are taken from: the tasks of one training step, no text in the prompt.

    Raises: ValueError when a training task is in the panel.
    """
    disjoint(session.train_tasks, session.panel)
    config = session.config
    tasks = train_order(session.train_tasks, config.seed, session.step, config.tasks_per_step)
    return session.play(group_starts(tasks, config.group_size), EARLIER_SEED)


def insight_skills(session: Session, attempts: Sequence[Trajectory]) -> dict[str, Skill]:
    """Panel task id -> the insights nearest to it, which the policy takes from attempts at training tasks.

    Source: ExpeL (Zhao et al. 2024). A task of a type without insights is left out. Departures: an insight is written
    from one failure and one success at the same task, and kept as it is (no votes, no edits).
    Raises: ValueError when an attempt was made at a task of the panel.
    """
    both = sorted({attempt.task_id for attempt in attempts} & {task.id for task in session.panel_tasks})
    if both:
        raise ValueError(f"task {both[0]!r} of the panel is one that insights are taken from; take training tasks")
    sampler = session.sampler(session.config.sampler.temperature)
    insights, counts = write_insights(
        sampler, attempts, seed=session.config.seed, step=session.step, terse=session.terse
    )
    log.info("insights from %d training episodes: %s", len(attempts), counts)
    texts = {task.id: retrieve_insights(insights, task.task_type, task.description) for task in session.panel_tasks}
    return {id: Skill(text, "hindsight", id) for id, text in texts.items() if text}
