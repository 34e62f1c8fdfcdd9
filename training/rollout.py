"""Plays tasks: the policy answers, the environments step, side by side in lock-step waves; trajectories come out.

A wave is `sampler.batch_size` episodes in the order of the input, so its composition depends on the caller's list
only, never on which environment answered first. Episodes that end leave the wave: they are neither generated for nor
stepped (case R3). Sampled ids are stored as sampled and never encoded again (case B07).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from diagnostics import render
from diagnostics.records import Message, Segment, Trajectory, Turn
from training.envs.base import EnvError, Step, Task
from training.samplers.base import Reply, Request, Sampler


@runtime_checkable
class Pool(Protocol):
    """Environments by slot; a call that crashes or hangs answers EnvError (training/envs/pool.py)."""

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step | EnvError]: ...

    def step(self, actions: Mapping[int, str]) -> dict[int, Step | EnvError]: ...


@dataclass(frozen=True)
class Start:
    """One episode to play. `group` is the index of the task in its step or panel, `attempt` the index inside it."""

    task: Task
    group: int
    attempt: int


@dataclass
class RolloutStats:
    """Counters of one rollout, for the log."""

    episodes: int = 0
    errors: int = 0
    turns: int = 0
    invalid_turns: int = 0
    cut_replies: int = 0  # reached max_new_tokens without end-of-turn
    generated_tokens: int = 0
    split_segments: int = 0  # new segments because the template rewrote its history (case B08)
    near_ties: int = 0  # draws that round-off could turn


def group_starts(tasks: Sequence[Task], attempts: int) -> list[Start]:
    """Every task `attempts` times, the attempts of a task next to each other (case B49)."""
    return [Start(task, group, attempt) for group, task in enumerate(tasks) for attempt in range(attempts)]


def rollout(
    sampler: Sampler,
    pool: Pool,
    starts: Sequence[Start],
    *,
    seed: int,
    step: int = 0,
    max_turns: int,
    max_context: int,
    history: int = 2,
    show_admissible: bool = True,
    skills: Mapping[tuple[str, int], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    finished: list[Trajectory] | None = None,
) -> tuple[list[Trajectory], RolloutStats]:
    """Plays every start once; a reply depends on (seed, task, attempt, turn) and on what the policy has read.

    Source: ours (DESIGN, samplers); validity of replies as in METHODS, GRPO.
    Args: seed of the draws; step is only recorded; max_turns replies of an episode; max_context tokens of a segment,
        an episode that could pass it stops; history is the number of earlier turns shown under `windowed`; skills
        maps (task id, attempt) to the text placed in the player's own prompt; progress(finished, total) is called
        after every turn of a wave; finished, episodes of these starts that are not played again: each other one is
        added as it ends, so that its owner still has them when the rollout breaks off.
    Returns: trajectories in the order of the starts, and counters. A crashed environment gives a trajectory with stop
        reason "error" and its text, which is no loss: leave it out of denominators.
    Raises: ValueError when a start is listed twice: its replies would be the same.
    """
    names = {(start.task.id, start.attempt) for start in starts}
    if len(names) < len(starts):
        raise ValueError(
            f"rollout: {len(starts) - len(names)} starts are listed twice; give each its own attempt number"
        )
    stats = RolloutStats()
    finished = [] if finished is None else finished
    before = {(trajectory.task_id, trajectory.attempt) for trajectory in finished}
    episodes = [
        Episode(start, seed, sampler, history, show_admissible, (skills or {}).get((start.task.id, start.attempt)))
        for start in starts
        if (start.task.id, start.attempt) not in before
    ]
    for first in range(0, len(episodes), sampler.batch_size):
        wave = dict(enumerate(episodes[first : first + sampler.batch_size]))
        session = sampler.session(len(wave))
        for slot, answer in pool.reset({slot: episode.start.task for slot, episode in wave.items()}).items():
            wave[slot].observe(answer, max_turns)
        finished += [episode.trajectory(step) for episode in wave.values() if episode.stop is not None]
        while live := {slot: episode for slot, episode in wave.items() if episode.stop is None}:
            requests = {slot: episode.request(max_context, stats) for slot, episode in live.items()}
            replies = session.reply({slot: request for slot, request in requests.items() if request is not None})
            actions = {slot: live[slot].take(reply, stats) for slot, reply in replies.items()}
            for slot, answer in pool.step(actions).items():
                live[slot].observe(answer, max_turns)
            finished += [episode.trajectory(step) for episode in live.values() if episode.stop is not None]
            if progress:
                progress(len(finished), len(starts))
    stats.episodes, stats.errors = len(episodes), sum(episode.stop == "error" for episode in episodes)
    found = {(trajectory.task_id, trajectory.attempt): trajectory for trajectory in finished}
    return [found[start.task.id, start.attempt] for start in starts], stats


@dataclass
class Draft:
    """A segment while it grows."""

    messages: tuple[Message, ...]
    ids: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    token_class: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], turn: int = -1, classes: Any = None, logprobs: Any = None) -> None:
        self.ids.extend(ids)
        self.turn.extend([turn] * len(ids))
        self.token_class.extend([0] * len(ids) if classes is None else classes)
        self.logprobs.extend([0.0] * len(ids) if logprobs is None else logprobs)

    def segment(self) -> Segment:
        turn = np.array(self.turn, np.int16)
        return Segment(
            messages=self.messages,
            ids=np.array(self.ids, np.int32),
            response_mask=turn >= 0,
            turn=turn,
            token_class=np.array(self.token_class, np.int8),
            rollout_logprobs=np.array(self.logprobs, np.float32),
        )


class Episode:
    """One episode while it is played: asks for replies, takes them, observes answers."""

    def __init__(
        self, start: Start, seed: int, sampler: Sampler, history: int, show_admissible: bool, skill: str | None
    ) -> None:
        self.start, self.seed, self.sampler = start, seed, sampler
        self.history, self.show_admissible, self.skill = history, show_admissible, skill
        self.messages: tuple[Message, ...] = ()  # the conversation up to the coming reply (append)
        self.drafts: list[Draft] = []
        self.turns: list[Turn] = []
        self.state: Step | None = None
        self.last: Reply | None = None
        self.first_observation = ""
        self.reward, self.won = 0.0, False
        self.score: float | None = None
        self.outcome: str | None = None
        self.stop: str | None = None
        self.error: str | None = None

    def request(self, max_context: int, stats: RolloutStats) -> Request | None:
        """The tokens that lead to the next reply; None when the segment has no room for one."""
        assert self.state is not None
        task, observation = self.start.task, self.state.observation
        admissible = self.state.admissible if self.show_admissible else None
        new: list[int] | None = None
        split, windowed = False, self.sampler.protocol == "windowed"
        if windowed:
            new = self._windowed(admissible, max_context - self.sampler.max_new_tokens)
        elif self.last is None:
            self.messages = render.task_messages(task.description, observation, admissible, self.skill)
        else:
            following = render.observation_message(observation, admissible)
            new = render.continuation_ids(self.sampler.tokenizer, self.messages, self.last.text, following)
            split = new is None
            self.messages = (*self.messages, Message("assistant", self.last.text), following)
        fresh = windowed or new is None
        if new is None:
            new = render.prompt_ids(self.sampler.tokenizer, self.messages)
        elif (
            not fresh and self.last is not None and not self.last.ended
        ):  # the template ends every turn; this token was not sampled
            new = [self.sampler.tokenizer.eos_token_id, *new]
        if (0 if fresh else len(self.drafts[-1].ids)) + len(new) + self.sampler.max_new_tokens > max_context:
            self.stop = "context_limit"
            return None
        if fresh:
            self.drafts.append(Draft(self.messages))
            stats.split_segments += split
        self.drafts[-1].add(new)
        return Request((self.seed, task.id, self.start.attempt, len(self.turns)), new, fresh)

    def _windowed(self, admissible: Sequence[str] | None, room: int) -> list[int]:
        """The prompt of one turn; turns of the history go, the oldest first, while it has more than `room` tokens.

        Source: ours; the released WebShop prompts leave the whole history out of a long one.
        """
        assert self.state is not None
        description, observation = self.start.task.description, self.state.observation
        ids: list[int] = []
        for first in range(max(0, len(self.turns) - self.history), len(self.turns) + 1):
            shown = self.turns[first:]
            self.messages = render.windowed_messages(
                description, len(self.turns), shown, observation, admissible, self.skill
            )
            ids = render.prompt_ids(self.sampler.tokenizer, self.messages)
            if len(ids) <= room:
                break
        return ids

    def take(self, reply: Reply, stats: RolloutStats) -> str:
        """Store a reply; the text for the environment: the command, or the raw reply, which changes nothing there."""
        assert self.state is not None
        think, action = render.parse_reply(reply.text)
        valid = think is not None and action is not None and render.admits(self.state.admissible, action)
        classes = render.token_classes(self.sampler.tokenizer, reply.ids)
        self.drafts[-1].add(reply.ids.tolist(), len(self.turns), classes, reply.logprobs)
        self.turns.append(Turn(self.state.observation, self.state.admissible, reply.text, action or "", valid))
        self.last = reply
        stats.turns += 1
        stats.invalid_turns += not valid
        stats.cut_replies += not reply.ended
        stats.generated_tokens += len(reply.ids)
        stats.near_ties += reply.near_ties
        return reply.text if action is None else action

    def observe(self, answer: Step | EnvError, max_turns: int) -> None:
        """Store what the environment answered to the reset or to the last command."""
        if isinstance(answer, EnvError):
            self.stop, self.error, self.reward, self.won = "error", f"{answer.call}: {answer.reason}", 0.0, False
            self.score = self.outcome = None
            return
        if self.state is None:
            self.first_observation = answer.observation
        self.state = answer
        self.reward += answer.reward
        self.won, self.score, self.outcome = answer.won, answer.score, answer.outcome
        if answer.won:
            self.stop = "won"
        elif len(self.turns) >= max_turns:
            self.stop = "turn_limit"
        elif answer.done:
            self.stop = "done"

    def trajectory(self, step: int) -> Trajectory:
        """The record of the finished episode."""
        task = self.start.task
        return Trajectory(
            id=f"{task.id}#{self.start.attempt}/seed{self.seed}/step{step}",
            task_id=task.id,
            task_type=task.task_type,
            env=task.env,
            split=task.split,
            description=task.description,
            group=self.start.group,
            attempt=self.start.attempt,
            seed=self.seed,
            step=step,
            turns=tuple(self.turns),
            segments=tuple(draft.segment() for draft in self.drafts if any(turn >= 0 for turn in draft.turn)),
            reward=self.reward,
            success=self.won,
            stop_reason=self.stop or "done",
            first_observation_sha256=hashlib.sha256(self.first_observation.encode()).hexdigest(),
            error=self.error,
            skill=self.skill,
            score=self.score,
            outcome=self.outcome,
        )
