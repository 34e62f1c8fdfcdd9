"""Evaluation: play a fixed list of tasks and count wins. Intervals are analysis' business."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diagnostics.records import Trajectory
from training.envs.base import Task
from training.rollout import Pool, group_starts, rollout
from training.samplers.base import Sampler


@dataclass(frozen=True)
class Count:
    """Wins among the episodes that count; errors are crashed environments, in neither number."""

    wins: int = 0
    n: int = 0
    errors: int = 0

    @property
    def success(self) -> float:
        """Success rate in [0, 1]; NaN without episodes."""
        return self.wins / self.n if self.n else float("nan")


@dataclass(frozen=True)
class Summary:
    """Counts of an evaluation, of all tasks and by task type (sorted by name), and means over the counted episodes."""

    total: Count
    by_type: dict[str, Count]
    turns: float  # mean turns an episode
    invalid: float  # share of turns without a valid command
    score: float | None = None  # mean score in [0, 1], where the environment grades episodes


def evaluate(
    sampler: Sampler,
    pool: Pool,
    tasks: Sequence[Task],
    *,
    seed: int,
    max_turns: int,
    max_context: int,
    attempts: int = 1,
    step: int = 0,
    history: int = 2,
    show_admissible: bool = True,
    skills: Mapping[tuple[str, int], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    finished: list[Trajectory] | None = None,
) -> list[Trajectory]:
    """Plays every task `attempts` times, in the order of the task ids, at the sampler's temperature.

    Source: METHODS, evaluation; the order by id makes batches a function of the task set (case B42).
    Args: as in rollout; skills maps (task id, attempt) to the text in the player's prompt.
    Returns: trajectories ordered by (task id, attempt).
    Raises: ValueError when a task is listed twice.
    """
    trajectories, _ = rollout(
        sampler,
        pool,
        group_starts(sorted(tasks, key=lambda task: task.id), attempts),
        seed=seed,
        step=step,
        max_turns=max_turns,
        max_context=max_context,
        history=history,
        show_admissible=show_admissible,
        skills=skills,
        progress=progress,
        finished=finished,
    )
    return trajectories


def summarise(trajectories: Sequence[Trajectory]) -> Summary:
    """Counts wins, episodes and errors (cases B38, B50: `done` is no win, an error is no loss).

    Source: ours.
    Returns: Summary; its rates are NaN when no episode counts.
    """
    played = [t for t in trajectories if t.stop_reason != "error"]
    turns = sum(len(t.turns) for t in played)
    scores = [t.score for t in played if t.score is not None]
    return Summary(
        total=_count(trajectories),
        by_type={
            kind: _count([t for t in trajectories if t.task_type == kind])
            for kind in sorted({t.task_type for t in trajectories})
        },
        turns=turns / len(played) if played else float("nan"),
        invalid=sum(t.n_invalid for t in played) / turns if turns else float("nan"),
        score=sum(scores) / len(scores) if scores else None,
    )


def as_metrics(summary: Summary) -> dict[str, float]:
    """The rows of metrics.jsonl that tell of an evaluation."""
    return {
        "eval/success": summary.total.success,
        "eval/errors": float(summary.total.errors),
        "eval/turns": summary.turns,
        "eval/invalid_share": summary.invalid,
        **({} if summary.score is None else {"eval/score": summary.score}),
        **{f"eval/success/{kind}": count.success for kind, count in summary.by_type.items()},
    }


def _count(trajectories: Sequence[Trajectory]) -> Count:
    played = [t for t in trajectories if t.stop_reason != "error"]
    return Count(sum(t.success for t in played), len(played), len(trajectories) - len(played))
