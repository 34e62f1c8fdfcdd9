"""ALFWorld's text games on the real engine; household games are the same kind of record and play the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.envs.base import Step, Task
from training.envs.games import read_record

WIN_REWARD = 10.0


class AlfworldEnv:
    """One live episode at a time. Reward is 10 on the winning step and nowhere else.

    Args: max_turns: commands of an episode; `done` is then true whether or not the game is won.
    """

    def __init__(self, max_turns: int = 50):
        import textworld  # the engine is imported where it is used: `--help` and analysis never pay for it
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos

        from training.envs.engine import Engine

        infos = textworld.EnvInfos(won=True, admissible_commands=True, extras=["gamefile"])
        self._engine = Engine(infos)
        self._env = AlfredInfos(AlfredDemangler(self._engine, shuffle=False))
        self.max_turns = max_turns
        self._turn: int | None = None  # None: no running episode

    def reset(self, task: Task) -> Step:
        """First observation of a task. Raises ValueError naming the file where its record cannot be read."""
        return self.reset_game(read_record(task))

    def reset_game(self, game: Mapping[str, Any]) -> Step:
        """First observation of a game record (pddl_domain, grammar, pddl_problem, walkthrough)."""
        self._env.load(game)
        self._turn = 0
        return self._step(self._env.reset())

    def step(self, action: str) -> Step:
        """The engine's answer to a command; "Nothing happens." where it is not admissible."""
        if self._turn is None:
            raise ValueError("no running episode: call reset before step, also after an episode is done")
        self._turn += 1
        state, _, _ = self._env.step(action)
        return self._step(state)

    def _step(self, state: Mapping[str, Any]) -> Step:
        won = bool(state["won"])
        done = won or (self._turn is not None and self._turn >= self.max_turns)
        if done:
            self._turn = None
        return Step(state["feedback"], tuple(state["admissible_commands"]), WIN_REWARD if won else 0.0, done, won)

    def close(self) -> None:
        """Let go of the game; the environment may be reset again."""
        self._turn = None
        self._engine.close()
