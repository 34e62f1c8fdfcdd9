"""The environment: one customer, one goal, at most `max_turns` actions."""

from __future__ import annotations

from training.envs.base import Step, Task
from training.envs.webshop.goals import Goal
from training.envs.webshop.pages import WINDOW, Place, commands, follow, observation
from training.envs.webshop.reward import Purchase, judge
from training.envs.webshop.shop import Shop, read_goal

WIN_REWARD = 10.0


class WebShopEnv:
    """An episode ends with a purchase. Reward is 10 where its score is 1, else 0; the score itself is told beside it.

    Args: max_turns: actions of an episode; `done` is then true whether or not something was bought. products: of one
    page of results.
    """

    def __init__(self, max_turns: int = 15, products: int = WINDOW):
        self.max_turns, self.products = max_turns, products
        self._shop: Shop | None = None  # None: no running episode
        self._goal: Goal | None = None
        self._place = Place()
        self._turn = 0

    def reset(self, task: Task) -> Step:
        """The index page. Raises ValueError where the task's goal is not in its shop."""
        self._shop, self._goal = read_goal(task)
        self._place, self._turn = Place(size=self.products), 0
        return self._step(None)

    def step(self, action: str) -> Step:
        """The page that an action leads to; the same page where it cannot be done."""
        if self._shop is None or self._goal is None:
            raise ValueError("no running episode: call reset before step, also after an episode is done")
        self._turn += 1
        self._place = follow(self._place, action, self._shop) or self._place
        if self._place.page != "bought":
            return self._step(None)
        product, wanted = self._shop.product(self._place.row), self._shop.product(self._goal.product)
        return self._step(judge(product, self._place.chosen.values(), wanted, self._goal))

    def _step(self, purchase: Purchase | None) -> Step:
        assert self._shop is not None
        score = 0.0 if purchase is None else purchase.score
        won, done = score == 1.0, purchase is not None or self._turn >= self.max_turns
        text, admissible = observation(self._place, self._shop), commands(self._place, self._shop)
        if done:
            self._shop = None
        outcome = "nothing was bought" if purchase is None else purchase.outcome
        return Step(text, admissible, WIN_REWARD if won else 0.0, done, won, score, outcome)

    def close(self) -> None:
        """Let go of the episode; the environment may be reset again."""
        self._shop = self._goal = None
